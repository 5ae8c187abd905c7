"""Pages in a real browser: they request nothing, nothing overflows, and the controls work."""

import json

import numpy as np
import pytest

from nuclr.report.charts import Series, line_chart
from nuclr.report.page import Page, Section, render_page
from nuclr.report.write import write_report
from tests.report import browser, folders
from tests.studies import tiny

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browser.find_chromium() is None, reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser.browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def page(picture_run, tmp_path_factory):
    return write_report(picture_run, tmp_path_factory.mktemp("page") / "page.html")


def test_pages_fit_and_request_nothing(chromium, page, tmp_path):
    folders.write_json(tmp_path / "c" / "compare.json", tiny.comparison().to_json())
    folders.write_toy(tmp_path / "t")
    folders.write_json(tmp_path / "table" / "table.json", tiny.paper_table().to_json())
    for file in (page, *(write_report(tmp_path / name) for name in ("c", "t", "table"))):
        for width in (1280, 390):
            for dark in (False, True):
                chromium.open(file, width, dark=dark)
                assert chromium.run("document.documentElement.scrollWidth") == width, (file, width)
        assert chromium.run("[...document.images].every(i => i.alt)")
        assert chromium.run("[...document.querySelectorAll('th')].every(h => h.textContent.trim())")
        regions = chromium.run("[...document.querySelectorAll('[role=region]')].map(r => r.ariaLabel)")
        assert all(regions) and len(set(regions)) == len(regions), file
    assert chromium.complaints() == []


def test_rows_of_charts_fill_the_width(chromium, tmp_path):
    chart = line_chart("Loss", [Series("a", [0.0, 1.0], [1.0, 2.0])], "epoch")
    sections = [Section(f"n{n}", f"{n}", lambda _, n=n: [chart] * n) for n in range(2, 9)]
    file = tmp_path / "charts.html"
    file.write_text(render_page(Page("test", "Charts", "", sections), None), encoding="utf-8")
    chromium.open(file, 1280)
    empty = """[...document.querySelectorAll('.charts')].map(row => {
        const edge = row.getBoundingClientRect().right, boxes = [...row.children].map(c => c.getBoundingClientRect());
        return Math.max(...boxes.map(b => edge - Math.max(...boxes.filter(o => o.top == b.top).map(o => o.right))));
    })"""
    assert max(chromium.run(empty)) < 1


def test_data_stays_text(chromium, page):
    chromium.open(page)
    assert chromium.run("document.querySelector('h1').textContent") == folders.HOSTILE
    shown = chromium.run("[...document.querySelectorAll('.said-text, .item p')].map(c => c.textContent)")
    assert folders.HOSTILE in shown
    assert chromium.run("document.querySelectorAll('.said-text > *, .item p script').length") == 0
    assert chromium.complaints() == []


def test_legend_and_arrow_keys(chromium, page):
    chromium.open(page)
    chart = "[...document.querySelectorAll('.chart')].find(c => c.querySelector('button.key'))"
    hidden = f"{chart}.querySelectorAll('[data-series][hidden]').length"
    assert chromium.run(hidden) == 0
    chromium.run(f"{chart}.querySelector('button.key').click()")
    assert chromium.run(hidden) == 1
    assert chromium.run(f"{chart}.querySelector('button.key').getAttribute('aria-pressed')") == "false"
    chromium.run(f"{chart}.querySelector('svg').focus()")
    for kind in ("keyDown", "keyUp"):
        chromium.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight")
    readout = chromium.run(f"{chart}.querySelector('.readout').textContent")
    name = chromium.run(f"{chart}.querySelector('button.key').dataset.key")
    assert readout.startswith("epoch ") and name not in readout
    chromium.run(f"{chart}.querySelector('button.key').click()")
    assert chromium.run(hidden) == 0
    assert chromium.complaints() == []


def test_the_search_box(chromium, nuclr, tmp_path):
    rng = np.random.default_rng(1)
    y = rng.normal(size=(60, 5)).astype("f4") + 0.5
    np.savez(tmp_path / "e.npz", x=y + 0.3 * rng.normal(size=y.shape).astype("f4"), y=y)
    (tmp_path / "names.txt").write_text("".join(f"{folders.HOSTILE if k == 0 else 'thing'} {k}\n" for k in range(60)))
    names = ("--names", tmp_path / "names.txt", "--query-names", tmp_path / "names.txt", "--normalize", "--strength", 1)
    done = nuclr("hubness", f"{tmp_path}/e.npz:x", f"{tmp_path}/e.npz:y", *names, "--out", tmp_path / "h")
    assert done.status == 0, done.err
    chromium.open(tmp_path / "h" / "report.html", 390)
    listed = "[...document.querySelectorAll('.try-{} button span')].map(s => s.textContent)"
    queries, items = (chromium.run(listed.format(side)) for side in ("queries", "items"))
    report = json.loads((tmp_path / "h" / "hubness.json").read_text())
    assert len(queries) == report["counted"]
    assert any(folders.HOSTILE in text for text in queries + items)
    assert items[0] == report["hubs"][0]["name"], "the largest hub is the first item"

    # A word that is typed filters queries and items.
    word = queries[3].split()[-1]
    chromium.run("document.querySelector('#try-filter').focus()")
    chromium.call("Input.insertText", text=word)
    assert chromium.run(listed.format("queries")) == [text for text in queries if word in text]
    assert chromium.run(listed.format("items")) == [text for text in items if word in text]
    assert chromium.run("document.querySelector('.try-asked').textContent").endswith(queries[3])
    assert chromium.run("document.querySelectorAll('.try-lists li').length") == 20
    chromium.run("document.querySelector('#try-filter').select()")
    chromium.call("Input.insertText", text=" ")

    # The arrow keys reach a query whose list changes; a click on the item that is gone shows whom it crowds out.
    gone = "document.querySelector('.try-plain li.gone button')"
    while not chromium.run(f"{gone} !== null"):
        chromium.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowDown", code="ArrowDown")
    new = chromium.run("document.querySelector('.try-corrected li.new span').textContent")
    query = chromium.run("document.querySelector('.try-queries [aria-current] span').textContent")
    item = chromium.run(f"{gone}.querySelector('span').textContent")
    chromium.run(f"{gone}.click()")
    rows = chromium.run("[...document.querySelectorAll('.try-queries button')].map(b => b.textContent)")
    assert f"{query}instead: {new}" in rows
    assert item in chromium.run("document.querySelector('.try-status').textContent")
    chromium.run("document.activeElement.click()")  # "Show all queries"
    assert chromium.run(listed.format("queries")) == queries

    # The queries that won the right first result, and those that lost it.
    for kind in ("won", "lost"):
        chromium.run(
            f"(s => {{ s.value = '{kind}'; s.dispatchEvent(new Event('change')) }})(document.querySelector('select'))"
        )
        assert len(chromium.run(listed.format("queries"))) == report[f"{kind}_count"]
    assert chromium.run("document.documentElement.scrollWidth") == 390
    assert chromium.complaints() == []
