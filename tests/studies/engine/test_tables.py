"""Results of known numbers as Markdown, LaTeX and JSON."""

import math
import re

import pytest

from nuclr.errors import UserError
from nuclr.studies.engine import tables
from nuclr.studies.engine.plan import Plan, Study
from nuclr.studies.engine.results import Block, Column, ResultRow, Value
from tests.studies import tiny


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_equal_values_share_the_best_and_no_row_is_best_if_all_are_equal():
    def best(*means: float | None) -> list[bool]:
        rows = [ResultRow(str(k), "", "", {"c": m if m is None else Value(m)}) for k, m in enumerate(means)]
        block = Block("", (Column("c", "c", "c", "mean_R@1"),), tuple(rows))
        found = tables.best_values(block, tiny.paper_table())
        return [(row.name, "c") in found for row in rows]

    assert best(1.0, 2.0, 2.0004, None) == [False, True, True, False]
    assert best(2.0, 2.0) == [False, False] == best(2.0, None)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.5, 2.0, ["+1.25", "[+0.50, +2.00]", "better"]),
        (-2.0, -0.5, ["-1.25", "[-2.00, -0.50]", "worse"]),
        (-0.5, 2.0, ["+0.75", "[-0.50, +2.00]", "no significant difference"]),
    ],
)
def test_the_verdict_follows_from_the_interval(low, high, expected):
    text = tables.markdown(tiny.comparison(low=low, high=high))
    (line,) = (line for line in text.splitlines() if line.startswith("| NUCLR - SogCLR"))
    assert cells(line) == ["NUCLR - SogCLR", "val", *expected]
    assert ("**21.25 ± 0.50**" in text) == (expected[2] != "no significant difference")


def test_markdown_shows_published_values_below_ours():
    text = tables.markdown(tiny.paper_table(label="a|b"))
    assert "# a|b" in text and "## CC3M" in text and "the paper" in text and "`mscoco`" not in text
    rows = {cells(line.replace("\\|", "/"))[0]: cells(line.replace("\\|", "/"))[1:] for line in text.splitlines()}
    assert rows["a/b"] == ["**21.00 ± 1.41**", "20.00 (1 of 2)"]
    assert rows["↳ the paper"] == ["20.50 ± 0.20", "-"]
    assert rows["↳ difference"] == ["+0.50", "-"]
    assert rows["=CLIP"] == ["19.00", "-"]


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>alert(1)</script>",
        "<!-- ",
        "[click](javascript:alert(1))",
        "![x](http://tracker)",
        "\\<img src=x>",
        "a\n# heading",
        "x\n[x]: javascript:1",
        "[x]: javascript:1",
        "a [b][x]",
    ],
)
def test_markdown_of_users_is_text(hostile):
    text = tables.markdown(tiny.paper_table(label=hostile))
    assert not re.search(r"<[a-zA-Z/!?]|\][(:\[]", text)
    assert len([line for line in text.splitlines() if line.startswith("# ")]) == 1


def test_latex_is_balanced_and_escaped():
    text = tables.latex(tiny.paper_table(label=r"\input{x} & 5% _ζ"))
    assert r"\textbackslash{}input\{x\} \& 5\% \_$\zeta$" in text and r"\textit{CC\_12M}" in text
    assert text.count("\\begin{tabular}") == text.count("\\end{tabular}") == 1
    assert r"\textbf{21.00 $\pm$ 1.41}" in text
    other = tables.latex(tiny.paper_table(second=("COCO", "DTD")))
    assert other.count("\\begin{tabular}") == other.count("\\end{tabular}") == other.count("\\toprule") == 2
    for line in other.splitlines():
        if line.endswith(r"\\") and "multicolumn" not in line:
            assert line.count("&") == 2


@pytest.mark.parametrize("comparison", [tiny.comparison(), tiny.paper_table()], ids=["compare", "table"])
def test_results_are_read_back_from_their_json(tmp_path, comparison):
    tables.write_results(tmp_path, comparison)
    assert tables.read_results(tmp_path / f"{comparison.kind}.json") == comparison
    (tmp_path / "wrong.json").write_text("{")
    with pytest.raises(UserError, match=r"wrong\.json"):
        tables.read_results(tmp_path / "wrong.json")


def study(out, **entries):
    return Study(Plan("nuclr table", "table", (), (0,), entries=entries), out)


def test_a_plan_refuses_other_settings_of_what_was_trained(tmp_path):
    a = {"optimizer.lr": 0.1, "objective.xi_init": math.inf}
    for entries in ({"a": a}, {"b": {"optimizer.lr": 0.2}}, {"a": a}):
        with study(tmp_path, **entries).locked():
            pass
    with (
        pytest.raises(UserError, match=r"b: optimizer\.lr.*0\.3.*0\.2"),
        study(tmp_path, b={"optimizer.lr": 0.3}).locked(),
    ):
        pass
    (tmp_path / "plan.json").write_text('{"written_by": "nuclr table", "runs": {}}')
    with pytest.raises(UserError, match=r"plan\.json"), study(tmp_path).locked():
        pass


def test_a_folder_has_one_command_at_a_time(tmp_path):
    with study(tmp_path).locked(), pytest.raises(UserError, match=str(tmp_path)), study(tmp_path).locked():
        pass
    other = tmp_path / "other"
    other.mkdir()
    (other / "table.md").write_text("mine")
    with pytest.raises(UserError, match=r"table\.md"), study(other).locked():
        pass
