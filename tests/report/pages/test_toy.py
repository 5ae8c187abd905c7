"""The page of the toy study."""

from nuclr.report.page import Table
from tests.report import folders


def test_all_sections_are_on_the_page(tmp_path):
    page, sections = folders.fill_page("toy", folders.write_toy(tmp_path))
    assert not page.notes
    assert list(sections) == [section.key for section in page.sections]
    [slopes] = folders.of_kind(sections["error"], Table)
    assert slopes.rows[0][0] == "GCL: uniform q" and slopes.rows[0][1].startswith("−1.00 ±")
    [views] = folders.of_kind(sections["views"], Table)
    assert [row[0] for row in views.rows[:3]] == ["τ = 0.2, m = 1", "τ = 0.2, m = 4", "τ = 0.2, m = 16"]
    assert views.rows[0][1] == "0.005 ± 0.0007"


def test_missing_methods_are_notes(tmp_path):
    content = folders.toy().to_json()
    content["records"] = [record for record in content["records"] if record["method"] == "nuclr"]
    folders.write_json(tmp_path / "toy.json", content)
    page, sections = folders.fill_page("toy", tmp_path)
    assert any("Summary" in note for note in page.notes)
    assert {"popularity", "repeat"} <= sections.keys()
