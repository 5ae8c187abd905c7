"""The page of a table."""

import pytest

from nuclr.errors import UserError
from nuclr.report.render import Options
from nuclr.report.write import make_page
from tests.report import folders
from tests.studies.table.tiny import table_content


def test_table(tmp_path):
    content = table_content(label=folders.HOSTILE)
    content["blocks"][0]["rows"][0]["runs"] = {"nuclr-seed0": "done", "nuclr-seed1": "missing"}
    folders.write_json(tmp_path / "table.json", content)
    context, contents = folders.open_page("table", tmp_path)
    assert context.notes == ["1 of 2 runs are not done; the table has the others."]
    assert list(contents) == ["summary", "results", "published", "runs"]
    (title, table), _ = contents["results"].blocks
    assert title == "CC3M"
    assert table.columns == ["", "COCO", "Mean"]
    assert table.rows[0][1:] == ["21.00 ± 1.41", "20.00 (1 of 2)"] and table.best == {(0, 1)}
    assert [chart.title for chart in contents["results"].charts] == ["CC3M: Mean"]
    assert contents["published"].blocks[0][1].rows == [
        [f"{folders.HOSTILE}, COCO", "21.00 ± 1.41", "20.50 ± 0.20", "+0.50"]
    ]
    page = make_page(tmp_path, Options())
    assert folders.HOSTILE not in page and "--own:#0072B2" in page


def test_without_published_values_there_is_no_such_section(tmp_path):
    content = table_content()
    content["blocks"][0]["rows"][0] |= {"published": {}, "differences": {}}
    folders.write_json(tmp_path / "table.json", content)
    context, contents = folders.open_page("table", tmp_path)
    assert "published" not in contents and not context.notes


def test_wrong_values_are_notes_or_errors(tmp_path):
    complete = table_content()
    wrong = [complete | {key: value} for key in complete for value in (None, 3, [], [3])]
    wrong += [{name: value for name, value in complete.items() if name != key} for key in complete]
    for content in wrong:
        folders.write_json(tmp_path / "table.json", content)
        try:
            assert "</html>" in make_page(tmp_path, Options())
        except UserError as error:
            assert "table.json" in str(error) or "damaged" in str(error)
    (tmp_path / "table.json").write_text("{")
    with pytest.raises(UserError, match=r"table\.json was not written by nuclr table, or is damaged"):
        make_page(tmp_path, Options())
