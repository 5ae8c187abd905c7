"""From results to the table: means, standard deviations, best rows, differences, and results that do not fit."""

import json

import pytest

from nuclr.errors import UserError
from nuclr.studies.table import table_folder
from nuclr.studies.table.aggregate import missing_runs, summarize
from nuclr.studies.table.evaluations import read, table_of_results
from nuclr.studies.table.plan import plan_runs
from nuclr.studies.table.table_file import read_table
from tests.studies.table.tiny import table_content, write_results

TABLE = """
title: elsewhere
columns: [{title: COCO, test: mscoco}, {title: CIFAR, test: cifar100}]
published_in: the paper
rows:
  - {label: a, results: "a*.json"}
  - {label: b, results: [b0.json, b1.json], published: {COCO: 20.0 ± 0.5, Mean: 30}}
  - {label: c, results: c.json}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # in percent: COCO 10, 12, 17 and CIFAR 30, 40, 35: means per run 20, 26, 26
    for seed, (coco, cifar) in enumerate([(0.10, 0.30), (0.12, 0.40), (0.17, 0.35)]):
        write_results(tmp_path / f"a{seed}.json", f"run/a{seed}", {"mscoco": coco, "cifar100": cifar}, seed=seed)
    for seed, (coco, cifar) in enumerate([(0.22, 0.34), (0.24, 0.36)]):
        write_results(tmp_path / f"b{seed}.json", f"run/b{seed}", {"mscoco": coco, "cifar100": cifar})
    write_results(tmp_path / "c.json", "run/c", {"mscoco": 0.20, "cifar100": 0.35, "dtd": 0.5})
    (tmp_path / "t.yaml").write_text(TABLE, encoding="utf-8")
    return tmp_path


def content_of(folder):
    return summarize(read_table(folder / "t.yaml"), [], folder, "nuclr table")


def test_means_and_standard_deviations_equal_hand_computed_values(folder):
    content = content_of(folder)
    a, b, c = content["blocks"][0]["rows"]
    assert content["blocks"][0]["columns"] == ["COCO", "CIFAR", "Mean"]
    assert a["cells"]["COCO"]["mean"] == pytest.approx(13.0)
    assert a["cells"]["COCO"]["std"] == pytest.approx(13**0.5)  # ((-3)^2 + (-1)^2 + 4^2) / 2
    assert a["cells"]["COCO"]["per_seed"] == pytest.approx([10, 12, 17])
    assert a["cells"]["COCO"]["seeds"] == ["0", "1", "2"]
    assert a["cells"]["CIFAR"]["std"] == pytest.approx(5.0)
    assert a["cells"]["Mean"]["mean"] == pytest.approx(24.0)
    assert a["cells"]["Mean"]["std"] == pytest.approx(12**0.5)  # of 20, 26, 26
    assert [a["cells"][key]["text"] for key in ("COCO", "CIFAR", "Mean")] == [
        "13.00 ± 3.61", "35.00 ± 5.00", "24.00 ± 3.46",
    ]  # fmt: skip
    assert b["cells"]["COCO"]["text"] == "23.00 ± 1.41"
    assert c["cells"]["COCO"]["text"] == "20.00"


def test_the_best_of_every_column_is_marked_and_equal_values_share_it(folder):
    a, b, c = content_of(folder)["blocks"][0]["rows"]
    assert (a["best"], b["best"], c["best"]) == ([], ["COCO", "Mean"], [])  # CIFAR: all have 35.00
    write_results(folder / "c.json", "run/c", {"mscoco": 0.230004, "cifar100": 0.2})
    a, b, c = content_of(folder)["blocks"][0]["rows"]
    assert (a["best"], b["best"], c["best"]) == (["CIFAR"], ["COCO", "CIFAR", "Mean"], ["COCO"])


def test_differences_are_ours_minus_published(folder):
    content = content_of(folder)
    row = content["blocks"][0]["rows"][1]
    assert row["published"]["COCO"] == {"mean": 20.0, "std": 0.5, "text": "20.00 ± 0.50"}
    assert row["published"]["Mean"]["text"] == "30.00"
    assert row["differences"] == pytest.approx({"COCO": 3.0, "Mean": -1.0})
    assert content["published_in"] == "the paper"
    assert missing_runs(content) == []


def test_results_of_one_run_may_be_in_several_files_and_of_a_file_elsewhere(folder):
    write_results(folder / "b0.json", "run/b", {"mscoco": 0.22})
    write_results(folder / "b1.json", "run/b", {"cifar100": 0.34})
    assert content_of(folder)["blocks"][0]["rows"][1]["cells"]["Mean"]["per_seed"] == pytest.approx([28.0])
    (folder / "t.yaml").write_text(TABLE.replace("test: cifar100", "test: x/mine.npz, kind: classification"))
    for path in folder.glob("[abc]*.json"):
        path.write_text(path.read_text().replace("cifar100", f"/data/{path.stem[0]}/mine.npz"))
    assert content_of(folder)["blocks"][0]["rows"][0]["cells"]["CIFAR"]["mean"] == pytest.approx(35.0)


def test_no_mean_if_it_is_not_wanted_or_there_is_one_column(folder):
    (folder / "t.yaml").write_text("mean: false\n" + TABLE)
    assert content_of(folder)["blocks"][0]["columns"] == ["COCO", "CIFAR"]
    (folder / "t.yaml").write_text(TABLE.replace(", {title: CIFAR, test: cifar100}", "").replace(", Mean: 30", ""))
    assert content_of(folder)["blocks"][0]["columns"] == ["COCO"]


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "c.json").unlink(), "c: no file matches c.json"),
        (lambda f: (f / "c.json").write_text("{"), r"c\.json: not JSON"),
        (lambda f: (f / "c.json").write_text("[]"), r"c\.json: was not written by `nuclr evaluate --out`"),
        (lambda f: rewrite(f / "c.json", written_by="nuclr toy"), "was not written by"),
        (lambda f: rewrite(f / "c.json", retrieval={"mscoco": 5}), r"c\.json: is damaged"),
        (lambda f: rewrite(f / "c.json", retrieval={"mscoco": {"plain": {"mean_R@5": 1}}}), "no metric 'mean_R@1'"),
        (
            lambda f: write_results(f / "c.json", "run/c", {"flickr30k": 0.2, "cifar100": 0.2}),
            r"c\.json has no retrieval result on mscoco:.* \(it has flickr30k\); evaluate with --retrieval",
        ),
        (
            lambda f: write_results(f / "c.json", "run/c", {"mscoco": 0.2, "cifar100": 0.2}, fingerprint="g"),
            r"a0\.json and .*c\.json: not the same test set for the column COCO; the pairs \(fingerprint\) differ",
        ),
        (
            lambda f: write_results(f / "a3.json", "run/a0", {"mscoco": 0.3, "cifar100": 0.30}),
            r"a0\.json and .*a3\.json: different results of run/a0 on mscoco",
        ),
    ],
)
def test_results_that_do_not_fit_are_refused(folder, spoil, message):
    spoil(folder)
    with pytest.raises(UserError, match=message):
        content_of(folder)


def test_a_file_that_is_far_too_large_is_not_read(folder, monkeypatch):
    monkeypatch.setattr("nuclr.studies.table.evaluations.LARGEST", 10)
    with pytest.raises(UserError, match="too large for results"):
        read(folder / "c.json")


def test_a_table_of_results_alone_groups_runs_by_their_settings(folder):
    for name in ("n0", "n1"):
        write_results(folder / f"{name}.json", name, {"mscoco": 0.2}, objective="nuclr", settings="1234", seed=name[1])
    write_results(folder / "n2.json", "n2", {"mscoco": 0.3}, objective="nuclr", settings="5678", seed=0)
    write_results(folder / "other.json", "models/other", {"mscoco": 0.1})
    table = table_of_results(["n*.json", "other.json", "mine=n2.json"])
    content = summarize(table, [], folder, "")
    rows = {row["label"]: row["cells"]["mscoco"]["text"] for row in content["blocks"][0]["rows"]}
    assert rows == {"mine": "30.00", "NUCLR": "20.00 ± 0.00", "NUCLR (2)": "30.00", "other": "10.00"}
    with pytest.raises(UserError, match="--results: no file matches none"):
        table_of_results(["none*.json"])


def test_runs_without_results_leave_their_cells_empty(tmp_path):
    from tests.studies.table import tiny

    table = read_table(tiny.write_table(tmp_path, seeds=2))
    runs = plan_runs(table, tmp_path / "out", tmp_path)
    content = summarize(table, runs, tmp_path, "")
    assert [row["cells"]["pairs"] for row in content["blocks"][0]["rows"]] == [None, None]
    assert missing_runs(content) == [run.name for run in runs]


def test_a_table_is_not_replaced_by_one_with_fewer_values(tmp_path):
    content = table_content()
    table_folder.write(tmp_path, content)
    content["blocks"][0]["rows"][0]["cells"]["COCO"] = None
    with pytest.raises(UserError, match=r"has 2 values, and this command finds 1 of them, not COCO of CC3M NUCLR"):
        table_folder.write(tmp_path, content)
    table_folder.write(tmp_path, content | {"title": "another table in the same folder"})
