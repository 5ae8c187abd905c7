"""The page of the toy study."""

import pytest

from nuclr.errors import UserError
from nuclr.report.render import Options
from nuclr.report.write import make_page
from tests.report import folders


def test_all_sections_are_on_the_page(tmp_path):
    folders.write_json(tmp_path / "toy.json", folders.toy())
    context, contents = folders.open_page("toy", tmp_path)
    assert not context.notes
    sections = ["summary", "error", "constant", "learning", "popularity", "terms", "sampling", "finite", "repeat"]
    assert list(contents) == sections
    page = make_page(tmp_path, Options())
    for text in (
        "GCL: uniform q, slope \u22120.52",
        "guide: slope \u22120.50",
        "error.svg",
        "7 repetitions with n = 100",
    ):
        assert text in page


def test_slopes_belong_to_their_part(tmp_path):
    folders.write_json(tmp_path / "toy.json", folders.toy())
    _, contents = folders.open_page("toy", tmp_path)
    names = [key.name for chart in contents["finite"].charts for key in chart.legend]
    assert "GCL" in names and not any("slope \u22120.52" in name for name in names)


def test_each_y_has_the_color_of_its_anchor(tmp_path):
    folders.write_json(tmp_path / "toy.json", folders.toy())
    _, contents = folders.open_page("toy", tmp_path)
    anchors, first, _ = contents["popularity"].samples
    assert [key.name for key in anchors.legend][:2] == ["0° to 30°", "30° to 60°"]
    assert anchors.svg.count("<circle") == first.svg.count("<circle") == 2
    assert '<g class="s2"><title>30° to 60°</title><circle' in first.svg


def test_an_older_file_has_the_sections_that_it_can_fill(tmp_path):
    content = folders.toy()
    for part in ("learning", "finite", "shown"):
        del content[part]
    folders.write_json(tmp_path / "toy.json", content)
    context, contents = folders.open_page("toy", tmp_path)
    assert "toy.json has no 'learning': run nuclr toy again." in context.notes
    assert {"error", "constant", "terms", "sampling", "repeat"} <= contents.keys()


def test_missing_methods_are_notes(tmp_path):
    content = folders.toy()
    content["records"] = [record for record in content["records"] if record["method"] == "nuclr"]
    folders.write_json(tmp_path / "toy.json", content)
    context, contents = folders.open_page("toy", tmp_path)
    assert "Summary is left out: IndexError: list index out of range" in context.notes
    assert {"popularity", "repeat"} <= contents.keys()


def test_a_damaged_file_is_an_error(tmp_path):
    (tmp_path / "toy.json").write_text('{"records": 3}')
    with pytest.raises(UserError, match=r"toy\.json was not written by nuclr toy, or is damaged"):
        make_page(tmp_path, Options())
