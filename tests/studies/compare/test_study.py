"""From a request to tables, with the jobs run in this process."""

import csv
import json

import numpy as np
import pytest

from nuclr.evaluation.retrieval import retrieval_metrics
from nuclr.runs.run import Run
from nuclr.studies.compare import cells, comparison_folder, measure, plan, pool, row_metrics, study, tables
from tests.studies.compare import tiny


@pytest.fixture(autouse=True)
def _inline(monkeypatch):
    monkeypatch.setattr(study, "Pool", tiny.InlinePool)


def finished(request, out):
    done = study.Study(request, out)
    done.run(1)
    done.examine(1)
    content = comparison_folder.summarize(done, "nuclr compare ...")
    comparison_folder.write(out, request.kind, content)
    return done, content


@pytest.mark.slow
def test_halves_are_tuned_on_one_and_reported_on_the_other(tmp_path):
    settings = tiny.base(tmp_path)
    test = measure.parse_test("test.npz", settings.data)
    request = tiny.request(settings, tiny.rows(["sogclr", "nuclr"]), tests=(test,), halves=True, baseline="sogclr")
    done, content = finished(request, tmp_path / "out")

    row = done.rows["nuclr"]
    chosen = done.chosen(row)
    for tuned, reported in (("val_a", "val_b"), ("val_b", "val_a")):
        scores = [done.outcomes.score(cell, tuned) for cell in row.grid]
        assert chosen[tuned] == row.grid[int(np.argmax(scores))]
        values = [done.outcomes.score(cell, reported) for cell in done.finals(row)[tuned]]
        folds = row_metrics.folds_of(done, row, request.reported_sets()[0])
        assert row_metrics.per_seed([one for one in folds if one.name == reported]) == pytest.approx(values, abs=1e-6)
    by_seed = content["rows"]["nuclr"]["metrics"]["halves"]["mean_R@1"]["per_seed"]
    assert len(by_seed) == 2
    assert [d["set"] for d in content["differences"]] == ["halves", "test", "average: mean"]
    assert set(content["rows"]["nuclr"]["corrected"]["halves"]) == {"train", "queries"}
    assert content["rows"]["nuclr"]["curve"]["epochs"] == [1, 2]

    cell = done.outcomes.path(done.finals(row)["val_a"][0])
    features = measure.val_features(Run.open(cell))
    expected = retrieval_metrics(features.x, features.y, features.links)["mean_R@1"]
    assert done.outcomes.score(done.finals(row)["val_a"][0], "val") == pytest.approx(expected, abs=1e-6)
    assert not (cell / "checkpoints").exists()

    assert json.loads((tmp_path / "out/compare.json").read_text())["seeds"] == [0, 1]
    lines = list(csv.DictReader((tmp_path / "out/table.csv").open()))
    assert {"halves", "val", "test", "average: mean"} == {line["set"] for line in lines}
    page = (tmp_path / "out/table.md").read_text()
    (difference,) = (d for d in content["differences"] if d["set"] == "halves")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    (line,) = (line for line in lines if line[:2] == ["NUCLR - SogCLR", "halves"])
    assert line[2] == f"{difference['difference']:+.2f}"
    assert line[4] == tables.verdict(difference)
    assert (tmp_path / "out/curves_nuclr_sogclr.svg").is_file()

    again = study.Study(request, tmp_path / "out")
    again.run(1)
    assert again._trained == 0

    rows = plan.batch_rows(tiny.rows(["sogclr", "nuclr"]), [8, 16])
    sizes = tiny.request(settings, rows, tests=(test,), halves=True, kind="batch_sizes")
    done, content = finished(sizes, tmp_path / "out")
    assert [d["row"] + " - " + d["to"] for d in content["differences"] if d["set"] == "halves"] == [
        "nuclr B=8 - sogclr B=8",
        "nuclr B=16 - sogclr B=16",
    ]
    assert content["rows"]["nuclr B=16"]["metrics"]["halves"]["mean_R@1"]["per_seed"] == by_seed  # the same cells
    assert (tmp_path / "out/batch_sizes.png").is_file()


def test_ablations_change_one_thing_in_the_chosen_setting(tmp_path):
    settings = tiny.base(tmp_path)
    rows = plan.ablation_rows(tiny.rows(["nuclr"]), settings)
    kept = [row for row in rows if row.name in ("nuclr", "zeta fixed", "no freezing")]
    request = tiny.request(settings, kept, kind="ablations", baseline="nuclr")
    done, content = finished(request, tmp_path / "out")
    chosen = content["rows"]["nuclr"]["tuning"]["chosen"]["val"]
    assert content["rows"]["zeta fixed"]["tuning"]["chosen"]["val"] == chosen | {"objective.zeta_lr": 0.0}
    assert [(d["row"], d["to"]) for d in content["differences"]] == [("zeta fixed", "nuclr"), ("no freezing", "nuclr")]
    state = cells.read_groups(done.outcomes.path(done.finals(done.rows["zeta fixed"])["val"][0]) / cells.STATE)[""]
    assert not state["zeta_x"].any()
    assert (tmp_path / "out/ablations.md").is_file()


def test_share_of_false_negatives_of_builtin_pairs(tmp_path):
    from nuclr.runs import config

    keys = ["data.train=builtin:n=64", "data.val=builtin:n=20,split=val", "data.batch_size=16", "model.width=8"]
    settings = config.load(tiny.write_config(tmp_path), [*keys, "data.root=", "schedule.epochs=1"])
    request = tiny.request(settings, tiny.rows(["sogclr", "nuclr"]), seeds=(0,))
    _, content = finished(request, tmp_path / "out")
    for row in content["rows"].values():
        share = row["false_negatives"]
        assert 0 < share["uniform"] < 100
        assert 0 <= share["weighted"]["mean"] <= 100
    assert "false negatives" in (tmp_path / "out/table.md").read_text()


def test_after_a_failed_cell_the_other_rows_have_metrics(tmp_path, monkeypatch):
    settings = tiny.base(tmp_path)
    request = tiny.request(settings, tiny.rows(["clip", "sogclr"]), seeds=(0,))
    done = study.Study(request, tmp_path / "out")
    broken = done.rows["clip"].grid

    def run(self):
        while self.waiting:
            job = self.waiting.popleft()
            failed = job.cell in {str(done.outcomes.path(cell)) for cell in broken}
            if not failed:
                pool.run_job(job, {})
            self.done(job, "broken" if failed else None)

    monkeypatch.setattr(tiny.InlinePool, "run", run)
    done.run(1)
    content = comparison_folder.summarize(done, "")
    assert list(content["rows"]) == ["sogclr"]
    assert content["missing"] == ["clip"]
    assert len(content["failed"]) == 2
