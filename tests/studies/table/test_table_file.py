"""Table files: what they may say, and what is refused with which words."""

from pathlib import Path

import pytest

from nuclr.errors import UserError
from nuclr.runs import config
from nuclr.studies.table.plan import plan_runs
from nuclr.studies.table.table_file import Published, overrides_of, read_table

ROOT = Path(__file__).parents[3]
START = "columns: [{title: COCO, test: mscoco}]\n"
ROW = "rows: [{label: a, results: r.json}]\n"


def read(folder: Path, text: str):
    path = folder / "t.yaml"
    path.write_text(text, encoding="utf-8")
    return read_table(path)


def test_blocks_columns_rows_and_overrides(tmp_path):
    (tmp_path / "c.yaml").write_text("name: c\n")
    table = read(
        tmp_path,
        """
        title: T
        seeds: [3, 5]
        published_in: a paper
        overrides: {data.train: builtin}
        columns:
          - {title: COCO, test: mscoco, metric: image_to_text_R@5}
          - {test: "cifar100:where/it/is"}
        blocks:
          - title: one
            hours: 26
            overrides: [seed_of_nothing.key=1]
            rows:
              - {config: c.yaml, overrides: {objective: {gamma: 0.5}}, published: {COCO: 20.5 ± 0.25, Mean: [30, 1]}}
          - title: two
            columns: [{title: mine, test: a.npz, kind: classification}]
            rows: [{label: x, results: [a.json, "b*.json"]}]
        """,
    )
    assert (table.title, table.seeds, table.published_in, table.mean) == ("T", (3, 5), "a paper", True)
    one, two = table.blocks
    assert (one.hours, two.hours) == (26, None)
    assert [(c.title, c.kind, c.metric) for c in one.columns] == [
        ("COCO", "retrieval", "image_to_text_R@5"),
        ("cifar100:where/it/is", "classification", "zero_shot_acc1"),
    ]
    assert one.rows[0].config == tmp_path / "c.yaml"
    assert one.rows[0].overrides == ("data.train=builtin", "seed_of_nothing.key=1", "objective.gamma=0.5")
    assert one.rows[0].published == {"COCO": Published(20.5, 0.25), "Mean": Published(30.0, 1.0)}
    assert [column.title for column in two.columns] == ["mine"]
    assert two.rows[0].results == ("a.json", "b*.json")


def test_files_are_looked_for_next_to_the_table_then_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    (tmp_path / "here.yaml").write_text("name: here\n")
    monkeypatch.chdir(tmp_path)
    rows = "rows: [{config: here.yaml}, {config: ../here.yaml, label: b}]\n"
    table = read(tmp_path / "tables", START + rows)
    assert [row.config for row in table.blocks[0].rows] == [Path("here.yaml"), tmp_path / "here.yaml"]


@pytest.mark.parametrize("value", [0.5, 5e-6, True, None, "builtin:n=20,split=val", "1.5", "a: b", "yes", 12])
def test_overrides_from_keys_and_values_are_read_as_the_same_values(value):
    (text,) = overrides_of({"data": {"train": value}}, "")
    assert config.split_override(text) == ("data.train", value) or float(config.split_override(text)[1]) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (START + "rowz: []", "unknown key rowz; did you mean rows"),
        (START, r"rows \(or blocks\) are missing"),
        (START + ROW + "blocks: []", "both rows and blocks"),
        (START + "rows: []", "rows: needs a list with at least one entry"),
        (START + "rows: [5]", r"rows\[0\]: needs keys and values, not int"),
        (ROW, "columns are missing; list the test sets"),
        (START + "rows: [{lable: a, results: r}]", r"unknown key rows\[0\]\.lable; did you mean rows\[0\]\.label"),
        (START + "rows: [{label: a}]", "neither config nor results"),
        (START + "rows: [{label: a, config: c, results: r}]", "both config and results"),
        (START + "rows: [{results: r.json}]", r"rows\[0\]\.label is missing"),
        (START + "rows: [{label: a, results: r, overrides: {seed: 1}}]", "results are not trained"),
        (START + "rows: [{config: cc.yaml}]", r"rows\[0\]\.config: there is no file cc\.yaml .*did you mean"),
        (START + ROW + "seeds: 0", "seeds is '0'; it needs a number"),
        (START + ROW + "seeds: [1, 1]", "a seed is listed twice"),
        (START + ROW + "seeds: 1000000000000", "it needs a number"),
        (START + ROW + "mean: 3", "mean is 3; it needs true or false"),
        (START + ROW + "overrides: {out: x}", "out cannot be an override; name the folder"),
        (START + ROW + "overrides: 5", "overrides: needs keys and values, or a list of KEY=VALUE"),
        (START + "rows: [{label: a, results: r}, {label: a, results: r}]", "the label 'a' occurs twice"),
        (START + "rows: [{label: a, results: r, published: {COC: 1}}]", r"unknown column .*COC; did you mean .*COCO"),
        (START + "rows: [{label: a, results: r, published: {COCO: many}}]", "it needs a percentage"),
        (START + "rows: [{label: a, results: r, published: {COCO: 120}}]", "it needs a percentage"),
        ("columns: [{title: COCO}]\n" + ROW, r"columns\[0\]\.test is missing"),
        ("columns: [{test: mscocoo}]\n" + ROW, "not a standard test set .*did you mean mscoco"),
        ("columns: [{test: a.npz, kind: probe}]\n" + ROW, r"columns\[0\]\.kind is 'probe'; allowed: retrieval"),
        ("columns: [{test: mscoco, kind: classification}]\n" + ROW, "mscoco is for the other kind"),
        ("columns: [{test: mscoco, metric: acc}]\n" + ROW, "it needs a recall, such as mean_R@1"),
        ("columns: [{test: dtd, metric: mean_R@1}]\n" + ROW, "allowed: zero_shot_acc1"),
        ("columns: [{test: mscoco, prompts: p.json}]\n" + ROW, "only for classification"),
        ("columns: [{test: dtd, prompts: p.json}]\n" + ROW, r"columns\[0\]\.prompts: there is no file p\.json"),
        ("columns: [{test: dtd}, {test: dtd}]\n" + ROW, "the title 'dtd' occurs twice"),
        ("columns: [{test: dtd, title: Mean}]\n" + ROW, "'Mean' is the mean of all columns"),
        (START + "blocks: [{rows: [{label: a, results: r}]}]", r"blocks\[0\]\.title is missing"),
        (START + "blocks: [{title: a, hours: -1, rows: [{label: a, results: r}]}]", r"blocks\[0\]\.hours is -1"),
        ("- 1", "it needs keys and values"),
    ],
)
def test_mistakes_name_the_key_and_the_fix(tmp_path, text, message):
    (tmp_path / "ccc.yaml").write_text("name: c\n")
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "t.yaml") in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "tables").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_tables_of_this_repository_can_be_planned(path, tmp_path):
    table = read_table(path)
    runs = plan_runs(table, tmp_path, tmp_path, ["data.root=DATA"])
    rows = sum(len(block.rows) for block in table.blocks)
    assert len(runs) == rows * len(table.seeds) == rows * 3
    assert len({run.folder for run in runs}) == len(runs)
