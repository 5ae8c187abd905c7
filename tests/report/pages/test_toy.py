"""The page of the toy study."""

import pytest

from nuclr.errors import UserError
from nuclr.report.render import Options
from nuclr.report.write import make_page
from tests.report import folders


def test_toy(tmp_path):
    folders.write_json(tmp_path / "toy.json", folders.toy())
    page = make_page(tmp_path, Options())
    assert "The figure spaces.png is missing." in page and "GCL: uniform popularity" in page


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
