"""The values of the paper's tables in configs/tables."""

from pathlib import Path

import pytest

from nuclr.studies.engine.tables import block_table
from nuclr.studies.paper_tables import MEAN, plan_table, read_table

ROOT = Path(__file__).parents[2]
PAPER = ROOT.parent / "shared" / "paper" / "tables.md"  # not part of the project
FILES = [ROOT / "configs" / "tables" / f"table{number}.yaml" for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("path", FILES[:3], ids=lambda path: path.stem)
def test_the_values_of_every_row_average_to_its_mean(path):
    for block in read_table(path).blocks:
        for row in block.rows:
            values = [row.published[column.title].mean for column in block.columns]
            # the paper's mean has two digits, and so have the values that it is made of
            assert sum(values) / len(values) == pytest.approx(row.published[MEAN].mean, abs=0.0101), row


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_values_are_those_of_the_paper(path, tmp_path):
    if not PAPER.is_file():
        pytest.skip("needs the paper's tables")
    number = path.stem.removeprefix("table")
    part = PAPER.read_text("utf-8").split(f"**Table {number}.")[1].split("**Table")[0].replace("**", "")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
    if number == "4":  # the two blocks stand side by side
        lines = [[block, *line[k : k + 3]] for k, block in ((0, "CC3M"), (3, "CC12M")) for line in lines]
    expected = [line for line in lines if line[0] in ("CC3M", "CC12M") and "±" in line[2]]
    study = plan_table(path, tmp_path, tmp_path, ["data.root=DATA"])
    found = []
    for block in study.summarize().blocks:
        rows = block_table(block, study.summarize()).rows  # as Markdown and the page show it
        for ours, published, _ in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            assert published[0].endswith("the paper")
            found.append([block.title, ours[0], *published[1:]])
    names = {"NUCLR (Ours)": "NUCLR"}
    assert found == [[block, names.get(label, label), *values] for block, label, *values in expected]
