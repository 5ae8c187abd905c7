"""A comparison: grids, rows, names of runs, and results from runs trained in this process."""

import dataclasses

import numpy as np
import pytest

from nuclr import compare as compare_api
from nuclr.errors import UserError
from nuclr.evaluation import metrics
from nuclr.evaluation.intervals import per_seed
from nuclr.evaluation.retrieval import retrieval_metrics
from nuclr.objectives import names, options
from nuclr.report.page import Options
from nuclr.report.write import make_page
from nuclr.runs.run import Run
from nuclr.runs.settings import Data, Settings, content, content_hash
from nuclr.studies import compare
from nuclr.studies.engine import measure, results
from nuclr.studies.engine.plan import Study, change, make_run
from tests.studies import tiny
from tests.studies.tiny import inline  # noqa: F401

BASE = Settings(data=Data(train="train.npz", val="val.npz"))
ALL = list(names())


def rows_of(methods, temperatures=(0.03,), tune=(), base=BASE):
    grids = compare.method_grids(methods, temperatures, tune, base)
    return compare.method_rows(grids, base, ())


# -- grids and rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tune", [[], ["gamma=0.3,0.8", "nuclr.zeta_lr=0.003,0.01"], ["lr_factor=1,3"]])
def test_every_method_is_tuned_over_a_grid_of_the_same_size(tune):
    rows = rows_of(ALL, compare.TEMPERATURES, tune)
    assert {len(row.grid) for row in rows} == {8}
    runs = [make_run(row.base, changes, 0, row.method) for row in rows for changes in row.grid]
    assert len({run.name for run in runs}) == 8 * len(ALL)
    for run in runs:
        run.objective.build(4)


@pytest.mark.parametrize("zeta_lr", [5e-6, 3e-3])
def test_the_steps_of_zeta_that_are_tried_are_multiples_of_the_configs(zeta_lr):
    base = change(BASE, "objective.zeta_lr", zeta_lr)
    grid = compare.method_grids(["sogclr", "nuclr-authors"], [0.03], [], base)["nuclr-authors"]
    assert grid["objective.zeta_lr"] == (zeta_lr, pytest.approx(10 * zeta_lr, rel=1e-12))
    assert grid["objective.zeta_lr"][1] in (5e-5, 3e-2), "rounding must not give the run another name"
    named = compare.method_grids(["nuclr"], [0.03], ["nuclr.zeta_lr=0.01,0.03"], base)["nuclr"]
    assert named == {compare.TEMPERATURE: (0.03,), "objective.zeta_lr": (0.01, 0.03)}


def test_siglip_is_tuned_over_initial_scales_of_its_own():
    grids = compare.method_grids(ALL, compare.TEMPERATURES, [], BASE)
    assert grids["siglip"][compare.TEMPERATURE] == (0.1, 0.05, 0.2, 0.02)
    assert all(grids[method][compare.TEMPERATURE] == compare.TEMPERATURES for method in ALL if method != "siglip")
    named = compare.method_grids(ALL, [0.01, 0.03], ["siglip.temperature=0.01,0.03", "gamma=0.3,0.8"], BASE)
    assert {grid[compare.TEMPERATURE] for grid in named.values()} == {(0.01, 0.03)}
    assert named["sogclr"]["objective.gamma"] == named["nuclr"]["objective.gamma"] == (0.3, 0.8)


def test_a_name_depends_on_everything_that_decides_the_result_and_on_nothing_else():
    def name(base: Settings, seed: int = 0) -> str:
        return make_run(change(base, "objective.name", "nuclr"), {"objective.temperature": 0.03}, seed, "nuclr").name

    elsewhere = dataclasses.replace(BASE, name="other", threads=4, data=dataclasses.replace(BASE.data, root="/x"))
    assert name(elsewhere) == name(BASE)
    assert len({name(BASE), name(BASE, seed=1), name(change(BASE, "schedule.epochs", 11))}) == 3
    assert content(Settings()) == {}  # a setting added by a later version must not change any name
    explicit = change(BASE, "objective.gamma", options(BASE.objective.name)["gamma"])
    assert content_hash(explicit) == content_hash(BASE)


def test_ablations_that_equal_the_base_settings_are_left_out():
    base = change(change(BASE, "objective.gamma", 0.3), "schedule.zeta_frozen_epochs", 0)
    rows = compare.ablation_rows(rows_of(["sogclr", "nuclr"], base=base))
    labels = {row.name for row in rows}
    assert "zeta fixed" in labels and "gamma 0.8" in labels
    assert not {"gamma 0.3", "no freezing"} & labels
    assert {row.name: row.to for row in rows}["sogclr"] == ("nuclr",)
    frozen = change(BASE, "schedule.zeta_frozen_epochs", 2)
    assert "no freezing" in [row.name for row in compare.ablation_rows(rows_of(["nuclr"], base=frozen))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare.numbers("0.01,warm", "--temperatures"), "--temperatures.*warm"),
        (lambda: compare.method_grids(["clip"], [0.1, 0.1], [], BASE), "temperature"),
        (lambda: compare.method_grids(["clip"], [0.1], ["gamma=0.3"], BASE), "gamma"),
        (lambda: compare.method_grids(ALL, [0.1], ["gamma=0.1,0.2,0.3"], BASE), "--tune"),
        (lambda: compare.method_grids(["nuclr-authors"], [0.1], [], change(BASE, "objective.zeta_lr", 0.0)), "zeta_lr"),
        (lambda: compare.method_grids(ALL, [0.01, 0.02, 0.03, 0.05, 0.07], [], BASE), "--temperatures.*siglip"),
        (lambda: compare.method_grids(ALL, [0.01], ["temperature=0.1"], BASE), "temperature"),
        (lambda: compare.ablation_rows(rows_of(["clip"])), "nuclr"),
    ],
)
def test_wrong_values_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


# -- from a request to results -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("inline")
def test_halves_are_tuned_on_one_and_reported_on_the_other(tmp_path):
    options = {
        "methods": ["sogclr", "nuclr"],
        "seeds": 2,
        "temperatures": [0.03],
        "halves": True,
        "tests": ["test.npz"],
    }
    plan = compare.plan_comparison(tiny.write_config(tmp_path), **options)
    out = tmp_path / "out"
    result = compare.run_comparison(plan, out)
    done = Study(plan, out)

    row = done.rows["nuclr"]
    chosen = done.chosen(row)
    grid = done.grid(row)
    for tuned, reported in (("val_a", "val_b"), ("val_b", "val_a")):
        scores = [done.score(cell, tuned) for cell in grid]
        assert chosen[tuned] == row.grid[int(np.argmax(scores))]
        values = [done.score(cell, reported) for cell in done.finals(row)[tuned]]
        folds = results.folds_of(done, row, row.sets[0])
        assert per_seed([one for one in folds if one.name == reported]) == pytest.approx(values, abs=1e-6)
    assert [one.set for one in result.differences] == ["halves", "test"]
    ours = result.row("nuclr")
    assert {one.bank for one in ours.corrected if one.set == "halves"} == {"train", "queries"}
    assert ours.epochs == (1, 2) and len(ours.curves[""]) == 2

    cell = done.finals(row)["val_a"][0]
    features = measure.val_features(Run.open(done.path(cell)))["val"]
    expected = retrieval_metrics(features.x, features.y, features.links)["mean_R@1"]
    assert done.score(cell, "val") == pytest.approx(expected, abs=1e-6)
    assert not (done.path(cell) / "checkpoints").exists()
    assert all((out / name).is_file() for name in ("compare.json", "compare.md", "compare.tex"))

    # Nothing is trained again, and batch sizes use the same runs where they are the same.
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/*.*")}
    sizes = compare_api(tmp_path / "tiny.yaml", batch_sizes=[8, 16], out=out, **options)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    pairs = [(one.row, one.to) for one in sizes.differences if one.set == "halves"]
    assert pairs == [("nuclr B=8", "sogclr B=8"), ("nuclr B=16", "sogclr B=16")]
    key = "halves/mean_R@1"
    assert sizes.row("nuclr B=16").values[key].per_seed == ours.values[key].per_seed


@pytest.mark.usefixtures("inline")
def test_ablations_change_one_thing_in_the_chosen_setting(tmp_path):
    plan = compare.plan_comparison(
        tiny.write_config(tmp_path), methods=["nuclr"], temperatures=[0.03], ablations=True, seeds=1
    )
    kept = tuple(row for row in plan.rows if row.name in ("nuclr", "zeta fixed", "no freezing"))
    result = compare.run_comparison(dataclasses.replace(plan, rows=kept), tmp_path / "out")
    chosen = result.row("nuclr").chosen["val"]
    assert result.row("zeta fixed").chosen["val"] == chosen | {"objective.zeta_lr": 0.0}
    assert [(one.row, one.to) for one in result.differences] == [("zeta fixed", "nuclr"), ("no freezing", "nuclr")]
    assert (tmp_path / "out/ablations.md").is_file()


@pytest.mark.usefixtures("inline")
def test_after_a_failed_run_the_other_rows_have_results(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny.InlinePool, "broken", ("clip",))
    path = tiny.write_config(tmp_path)
    result = compare_api(path, methods=["clip", "sogclr"], temperatures=[0.03], seeds=1, out=tmp_path / "out")
    assert [row.name for row in result.rows] == ["sogclr"]
    assert "clip" in result.failed and len(result.failed) == 3


@pytest.mark.usefixtures("inline")
def test_a_new_metric_is_one_row_of_the_registry(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))
    metrics.register_metric(metrics.recall_at(3))
    path, out = tiny.write_config(tmp_path), tmp_path / "out"
    result = compare_api(path, methods=["clip"], temperatures=[0.03], seeds=1, out=out)
    value = result.row("clip").values["val/mean_R@3"]
    assert result.row("clip").values["val/mean_R@1"].mean <= value.mean
    assert "val mean recall@3" in (out / "compare.md").read_text()
    assert "val mean recall@3" in make_page(out, Options())
