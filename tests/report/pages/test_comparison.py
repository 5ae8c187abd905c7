"""The page of comparisons and tables."""

from nuclr.report.charts import Chart
from nuclr.report.page import Options, Table
from nuclr.report.write import make_page
from nuclr.studies.engine.tables import write_results
from tests.report import folders
from tests.studies import tiny


def test_comparison(tmp_path):
    write_results(tmp_path, tiny.comparison(label=folders.HOSTILE))
    page, sections = folders.fill_page("comparison", tmp_path)
    assert list(sections) == ["compare", "repeat"]
    assert any("clip 1: killed" in note for note in page.notes)
    assert "over SogCLR: better (val)" in page.verdict
    results = folders.of_kind(sections["compare"], Table)[0]
    assert results.best == {(1, results.columns.index("mean_R@1"))}
    assert len(folders.of_kind(sections["compare"], Chart)) == 2
    html = make_page(tmp_path, Options())
    assert folders.HOSTILE not in html and "+1.25" in html
    assert "--own:#0072B2" in html and "--own:#D55E00" in html


def test_table(tmp_path):
    write_results(tmp_path, tiny.paper_table(label=folders.HOSTILE))
    page, sections = folders.fill_page("comparison", tmp_path)
    assert any("nuclr-seed=1" in note for note in page.notes)
    table = folders.of_kind(sections["table"], Table)[0]
    assert (table.title, list(table.columns), table.best) == ("CC3M", ["", "COCO", "Mean"], {(0, 1)})
    assert table.rows[1][1] == "20.50 ± 0.20" and table.rows[2][1] == "+0.50"
    assert [chart.title for chart in folders.of_kind(sections["table"], Chart)] == ["CC3M: Mean"]
    html = make_page(tmp_path, Options())
    assert folders.HOSTILE not in html and "--own:#0072B2" in html
