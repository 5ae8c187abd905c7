"""The values of the paper's tables in configs/tables."""

from pathlib import Path

import pytest

from nuclr.objectives import entry
from nuclr.studies.paper_tables import MEAN, read_table

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
def test_the_values_are_those_of_the_paper(path):
    if not PAPER.is_file():
        pytest.skip("needs the paper's tables")
    number = path.stem.removeprefix("table")
    part = PAPER.read_text("utf-8").split(f"**Table {number}.")[1].split("**Table")[0].replace("**", "")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
    if number == "4":  # the two blocks stand side by side
        lines = [[block, *line[k : k + 3]] for k, block in ((0, "CC3M"), (3, "CC12M")) for line in lines]
    expected = [line for line in lines if line[0] in ("CC3M", "CC12M") and "±" in line[2]]
    found = []
    for block in read_table(path).blocks:
        titles = [*(column.title for column in block.columns), *([MEAN] if number != "4" else [])]
        for row in block.rows:
            label = row.label or entry(Path(row.config).stem.split("_")[1]).label
            found.append([block.title, label, *(row.published[title].text for title in titles)])
    names = {"NUCLR (Ours)": "NUCLR"}
    assert found == [[block, names.get(label, label), *values] for block, label, *values in expected]
