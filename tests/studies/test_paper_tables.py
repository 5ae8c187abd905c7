"""Table files, planned runs, and the table from runs trained here and results made elsewhere."""

from pathlib import Path

import numpy as np
import pytest

from nuclr.errors import UserError
from nuclr.report.charts import Chart
from nuclr.report.pages import comparison
from nuclr.studies import paper_tables
from nuclr.studies.engine.measure import read_outcomes
from nuclr.studies.engine.tables import Value, read_results
from nuclr.studies.evaluate import evaluate
from tests.studies import tiny
from tests.studies.tiny import inline  # noqa: F401

ROOT = Path(__file__).parents[2]
START = "columns: [{title: COCO, test: mscoco}]\n"
ROW = "rows: [{label: a, published: {Mean: 3}}]\n"


# -- table files -------------------------------------------------------------------------------------------------------


def read(folder: Path, text: str) -> paper_tables.TableFile:
    (folder / "t.yaml").write_text(text, encoding="utf-8")
    return paper_tables.read_table(folder / "t.yaml")


def test_blocks_take_over_columns_and_published_values_have_two_forms(tmp_path):
    published = "published: {COCO: 20.5 ± 0.3, DTD: 3, Mean: 7}"
    table = read(
        tmp_path,
        "seeds: 2\ncolumns: [{title: COCO, test: mscoco}, {title: DTD, test: dtd, metric: zero_shot_acc5}]\n"
        "overrides: {data.mask: false, objective: {gamma: 0.5}}\n"
        f"blocks:\n  - {{title: A, rows: [{{label: a, {published}}}]}}\n"
        "  - {title: B, hours: 2, rows: [{config: c.yaml}], "
        "columns: [{test: mine.npz, kind: retrieval, metric: mean_R@5}]}\n",
    )
    a, b = table.blocks
    assert (table.title, table.seeds, table.overrides) == ("t", 2, {"data.mask": False, "objective.gamma": 0.5})
    assert [(c.name, c.metric) for c in a.columns] == [("COCO", "first"), ("DTD", "zero_shot_acc5")]
    assert a.rows[0].published == {"COCO": Value(20.5, 0.3), "DTD": Value(3), "Mean": Value(7)}
    assert [(c.name, c.metric) for c in b.columns] == [("mine.npz", "mean_R@5")] and b.hours == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (START + ROW + "rowz: []", "rowz"),
        (START + ROW + "blocks: [{title: a, rows: [{config: c}]}]", "blocks"),
        (ROW, "columns"),
        (START + "rows: [{label: a}]", "config"),
        (START + ROW + "seeds: 1000000000000", "seeds"),
        (START + "rows: [{config: c, published: {COC: 1}}]", "COC"),
        (START + "rows: [{config: c, published: {COCO: 120}}]", "COCO"),
        ("columns: [{test: dtd}, {test: dtd}]\n" + ROW, "dtd"),
        ("columns: [{test: dtd, title: Mean}]\n" + ROW, "Mean"),
        ("columns: [{title: Both, of: [DTD]}, {title: DTD, test: dtd}]\n" + ROW, "Both"),
        ("- 1", "t.yaml"),
    ],
)
def test_mistakes_in_the_file_name_the_key_or_value(tmp_path, text, named):
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "t.yaml") in str(caught.value) and named in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "tables").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_tables_of_this_repository_can_be_planned(path, tmp_path):
    table = paper_tables.plan_table(path, tmp_path, tmp_path, ["data.root=DATA"])
    rows = sum(len(block.rows) for block in table.file.blocks)
    assert len(table.plan.rows) == rows and len(table.plan.seeds) == 3
    assert any("mscoco" in problem for problem in table.problems) or path.stem in ("small", "table4")
    assert len({run.name for _, run in table.runs()}) == 3 * rows


def test_tables_share_their_runs(tmp_path):
    """After Table 1, Table 4 and Figure 3 train nothing; the others train only rows that Table 1 does not have."""
    names = {}
    for table in ("table1", "table2", "table3", "table4", "figure3", "figure4"):
        path = ROOT / "configs" / "tables" / f"{table}.yaml"
        runs = paper_tables.plan_table(path, tmp_path, tmp_path, ["data.root=DATA"]).runs()
        names[table] = {run.name for _, run in runs}
    new = {table: len(own - names["table1"]) // 3 for table, own in names.items()}
    assert new == {"table1": 0, "table2": 2, "table3": 2, "table4": 0, "figure3": 0, "figure4": 6}


# -- runs trained here -------------------------------------------------------------------------------------------------


def test_a_wrong_row_is_named(tmp_path):
    path = tiny.write_table(tmp_path)
    text = path.read_text()
    for old, new, named in (
        ("tiny.yaml, overrides: {objective.name: clip}", "tiny.yaml, overrides: {objective.tau: 3}", "objective.tau"),
        ("label: ours, config: tiny.yaml", "label: CLIP, config: tiny.yaml", "CLIP"),
        ("label: ours, config: tiny.yaml", "label: ours, config: none.yaml", "none.yaml"),
        ("objective.gamma: 0.5", "out: x", "--out"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(UserError, match=named):
            paper_tables.plan_table(path, tmp_path, tmp_path)


@pytest.mark.usefixtures("inline")
def test_runs_are_trained_and_measured_once(tmp_path):
    path, out = tiny.write_table(tmp_path), tmp_path / "out"
    table = paper_tables.plan_table(path, tmp_path, out)
    empty = table.train(collect=True)
    assert [row.values["pairs"] for row in empty.rows] == [None, None] and len(empty.missing) == 2

    table.train_one(table.missing()[0])
    table = paper_tables.plan_table(path, tmp_path, out)
    first = table.train(collect=True)
    assert [row.values["pairs"] is None for row in first.rows] == [False, True]
    run = out / "cells" / next(iter(first.row("CLIP").runs))
    assert (run / "checkpoints").is_dir(), "runs stay whole"
    stamps = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}
    both = table.train()
    assert not both.missing and both.row("CLIP").values == first.row("CLIP").values
    assert [column.key for column in both.blocks[0].columns] == ["pairs", "classes", "Mean"]
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps

    # a column that is added later is measured without training again
    path.write_text(
        path.read_text().replace("rows:", "  - {title: R@5, test: val.npz, kind: retrieval, metric: x_to_y_R@5}\nrows:")
    )
    result = paper_tables.plan_table(path, tmp_path, out).train()
    assert (run / "results.json").stat().st_mtime_ns == stamps[run / "results.json"]
    (hits,) = (hits["x_to_y"] for key, hits in read_outcomes(run).items() if "val.npz" in key)
    assert result.row("CLIP").values["R@5"].mean == pytest.approx(100 * hits[:, 1].mean(), abs=1e-4)

    # `nuclr evaluate` gives the same values, and a published value is shown next to them
    evaluation = evaluate(run, retrieval=[str(tmp_path / "test.npz")], classification=[str(tmp_path / "classes.npz")])
    ours = first.row("CLIP").values
    (retrieved,), (classified,) = (evaluation.sets[kind].values() for kind in ("retrieval", "classification"))
    assert ours["pairs"].mean == pytest.approx(100 * retrieved.plain["mean_R@1"], abs=1e-4)
    assert ours["classes"].mean == pytest.approx(100 * classified.plain["zero_shot_acc1"], abs=1e-4)
    path.write_text(path.read_text() + "  - {label: theirs, published: {pairs: 20 ± 1}}\n")
    theirs = paper_tables.plan_table(path, tmp_path, out).train(collect=True).row("theirs")
    assert theirs.values == {"pairs": Value(20, 1)}

    with pytest.raises(UserError, match=r"CLIP: optimizer\.lr.*0\.02.*0\.03"):
        paper_tables.plan_table(path, tmp_path, out, ["optimizer.lr=0.02"]).train()


@pytest.mark.usefixtures("inline")
def test_curves_on_several_sets_and_means_of_columns(tmp_path):
    path = tiny.write_table(tmp_path, seeds=2)
    text = path.read_text().replace("rows:", "  - {title: Both, of: [pairs, classes]}\nrows:")
    path.write_text(text + "mean: false\noverrides: {data.val: {near: val.npz, far: test.npz}}\n")
    result = paper_tables.plan_table(path, tmp_path, tmp_path / "out").train()
    assert read_results(tmp_path / "out" / "table.json") == result
    for row in result.rows:
        mean = np.mean([row.values[key].per_seed for key in ("pairs", "classes")], axis=0)
        assert row.values["Both"].per_seed == pytest.approx(mean)
        assert row.epochs == (1, 2) and list(row.curves) == ["near", "far"]
        assert np.shape(row.curves["far"]) == (2, 2)
        last = [seed[-1] for seed in row.curves["far"]]
        assert last == pytest.approx(row.values["pairs"].per_seed, abs=1e-3), "the test set is one of the sets"
    charts = [block for block in comparison.show_study(result, (result,)) if isinstance(block, Chart)]
    assert [chart.title.partition(":")[0] for chart in charts] == ["near", "far", "Both"]


@pytest.mark.parametrize("metric", ["acc", "zero_shot_acc5", "image_to_text_R@1"])
def test_a_metric_that_the_column_does_not_have_is_a_problem(tmp_path, metric):
    path = tiny.write_table(tmp_path)
    path.write_text(path.read_text().replace("kind: retrieval", f"kind: retrieval, metric: {metric}"))
    (problem,) = paper_tables.plan_table(path, tmp_path, tmp_path).problems
    assert "pairs" in problem and metric in problem


def test_a_killed_command_leaves_no_temporary_file_for_the_next(tmp_path):
    path = tiny.write_table(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".plan.json.0123abcd.tmp").write_text("{")
    assert len(paper_tables.plan_table(path, tmp_path, tmp_path / "out").missing()) == 2
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_the_time_of_a_run_is_from_the_table_file(tmp_path):
    path = tiny.write_table(tmp_path)
    row = "{label: ours, config: tiny.yaml}"
    path.write_text(f"columns: [{{test: test.npz}}]\nblocks: [{{title: b, hours: 26, rows: [{row}]}}]\n")
    run, total, problem = paper_tables.plan_table(path, tmp_path / "nowhere", tmp_path).describe()
    assert "26 h" in run and "missing" in run and "26 h" in total and "test.npz" in problem
    *_, root, _ = paper_tables.plan_table(path, tmp_path / "nowhere", tmp_path, ["data.root=none"]).describe()
    assert "data.root=none" in root
