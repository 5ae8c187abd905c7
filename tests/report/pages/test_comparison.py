"""The page of a comparison."""

import pytest

from nuclr.errors import UserError
from nuclr.report.pages.comparison import result_tables
from nuclr.report.render import Options
from nuclr.report.write import make_page
from tests.report import folders


def test_comparison(tmp_path):
    folders.write_json(tmp_path / "compare.json", folders.comparison(label=folders.HOSTILE))
    page = make_page(tmp_path, Options())
    assert "A run failed: clip 1: killed" in page and "+1.25" in page and folders.HOSTILE not in page
    assert page.count('<button type="button" class="key own"') == 2
    assert "--own:#0072B2" in page and "--own:#D55E00" in page
    assert 'id="methods"' in page and "blations" not in page.partition("</style>")[2]


def test_one_damaged_study_is_a_note(tmp_path):
    folders.write_json(tmp_path / "compare.json", folders.comparison())
    (tmp_path / "ablations.json").write_text("{")
    content = folders.comparison()
    del content["rows"]["nuclr"]["metrics"]
    folders.write_json(tmp_path / "batch_sizes.json", content)
    context, contents = folders.open_page("comparison", tmp_path)
    assert list(contents) == ["summary", "methods", "repeat"]
    assert any("ablations.json was not written by nuclr compare, or is damaged" in note for note in context.notes)
    assert "Batch sizes is left out: KeyError: 'metrics'" in context.notes


def test_wrong_values_are_notes_or_errors(tmp_path):
    complete = folders.comparison()
    wrong = [complete | {key: value} for key in complete for value in (None, 3, "x", [])]
    wrong += [{name: value for name, value in complete.items() if name != key} for key in complete]
    for content in wrong:
        folders.write_json(tmp_path / "compare.json", content)
        try:
            page = make_page(tmp_path, Options())
        except UserError as error:
            assert "damaged" in str(error)
        else:
            assert "<main" in page


def test_a_damaged_comparison_is_an_error(tmp_path):
    (tmp_path / "compare.json").write_text('{"rows": {}}')
    with pytest.raises(UserError, match="is damaged"):
        make_page(tmp_path, Options())


@pytest.mark.parametrize("outside", [True, False])
def test_only_a_significantly_better_row_is_in_bold(outside):
    study = folders.comparison()
    study["differences"][0]["outside"] = outside
    ((_, table),) = result_tables(study)
    column = table.columns.index("mean @1")
    means = [row["metrics"]["val"]["mean_R@1"]["mean"] for row in study["rows"].values()]
    assert table.best == ({(means.index(max(means)), column)} if outside else set())
