"""Pages in a real browser: they request nothing, nothing overflows, and the controls work."""

import csv
import io
import json
import time

import numpy as np
import pytest

from nuclr.files import csv_cell, read_csv_cell
from nuclr.report.charts.lines import Series, line_chart
from nuclr.report.render import Context, Options, Page, Section, render_page
from nuclr.report.write import write_report
from tests.report import browser, folders
from tests.studies.table.tiny import table_content

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
    return write_report(picture_run, tmp_path_factory.mktemp("page") / "page.html", Options(gallery=24))


def shown(tab) -> list[int]:
    """Return the indices of the visible cards in their order."""
    return tab.run("[...document.querySelectorAll('.card:not([hidden])')].map(c => Number(c.dataset.card))")


def choose(tab, control: str, value: str) -> None:
    event = "input" if control == "g-text" else "change"
    tab.run(f"(() => {{ const c = document.getElementById('{control}'); c.value = {value!r};"
            f" c.dispatchEvent(new Event('{event}', {{bubbles: true}})); }})()")  # fmt: skip


def test_pages_fit_and_request_nothing(chromium, page, tmp_path):
    folders.write_json(tmp_path / "c" / "compare.json", folders.comparison())
    folders.write_json(tmp_path / "t" / "toy.json", folders.toy())
    folders.write_json(tmp_path / "table" / "table.json", table_content())
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
    sections = [
        Section(f"n{n}", f"{n}", "{{ parts.charts(content) }}", lambda _, n=n: [chart] * n) for n in range(2, 9)
    ]
    file = tmp_path / "charts.html"
    file.write_text(render_page(Page("test", (), lambda *_: None, sections), Context("Charts", "")), encoding="utf-8")
    chromium.open(file, 1280)
    empty = """[...document.querySelectorAll('.charts')].map(row => {
        const edge = row.getBoundingClientRect().right, boxes = [...row.children].map(c => c.getBoundingClientRect());
        return Math.max(...boxes.map(b => edge - Math.max(...boxes.filter(o => o.top == b.top).map(o => o.right))));
    })"""
    assert max(chromium.run(empty)) < 1


def test_data_stays_text(chromium, page):
    chromium.open(page)
    assert chromium.run("document.querySelector('h1').textContent") == folders.HOSTILE
    choose(chromium, "g-side", "")
    choose(chromium, "g-text", "alert(1)")
    captions = chromium.run("[...document.querySelectorAll('.card:not([hidden]) .said-text')].map(c => c.textContent)")
    assert captions and set(captions) == {folders.HOSTILE}
    choose(chromium, "g-side", "images")
    choose(chromium, "g-text", '"7"')
    assert chromium.run("document.querySelector('.card:not([hidden]) .file').textContent") == folders.QUOTED
    assert chromium.run("document.querySelectorAll('.card b b, .said-text script').length") == 0
    assert chromium.complaints() == []


def test_sort_filter_and_download(chromium, page, tmp_path):
    chromium.open(page)
    data = chromium.run("JSON.parse(document.getElementById('g-data').textContent)")
    first = shown(chromium)
    assert all(data[k]["side"] == "captions" for k in first)
    assert sum(data[k]["group"].split(" ")[0] in ("most", "middle", "least") for k in first) == 24
    assert first == sorted(first, key=lambda k: -data[k]["popularity"])
    choose(chromium, "g-sort", "-zeta")
    assert shown(chromium) == sorted(first, key=lambda k: (-data[k]["zeta"], k))
    choose(chromium, "g-group", "least")
    choose(chromium, "g-text", "THING")
    expected = [k for k in first if "least" in data[k]["group"].split(" ") and "thing" in data[k]["caption"]]
    assert set(shown(chromium)) == set(expected) and 0 < len(expected) < len(first)
    assert (
        chromium.run("document.getElementById('g-count').textContent")
        == f"{len(expected)} of {len(data)} samples shown"
    )

    order = shown(chromium)
    rows = list(csv.DictReader(io.StringIO(download(chromium, tmp_path), newline="")))
    assert [row["caption"] for row in rows] == [data[k]["caption"] for k in order]
    assert [float(row["popularity"]) for row in rows] == [data[k]["popularity"] for k in order]
    choose(chromium, "g-text", "no such caption")
    assert shown(chromium) == [] and chromium.run("!document.querySelector('.empty').hidden")
    assert chromium.complaints() == []


def download(tab, folder) -> str:
    """Click the download button and return the content of the file."""
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    tab.run("document.getElementById('g-csv').click()")
    file = folder / "popularity.csv"
    deadline = time.monotonic() + 30
    while not file.is_file() and time.monotonic() < deadline:
        tab.run("1")
        time.sleep(0.05)
    return file.read_bytes().decode("utf-8")


def test_the_download_escapes_cells_like_popularity_csv(chromium, nuclr, tmp_path):
    texts = ["=1+1", "+cmd", "-2", "-2 dogs", "@sum", "'=kept", 'quotes "here"', "comma, here", "\ttab", "plain"]
    np.savez(tmp_path / "e.npz", x=np.eye(len(texts)), y=np.eye(len(texts)))
    lines = [{"image": f"{k}.png", "caption": text} for k, text in enumerate(texts)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--temperature", 0.3, "--captions", tmp_path / "c.jsonl", "--out", tmp_path / "out")
    assert nuclr("popularity", tmp_path / "e.npz", *arguments)[0] == 0
    chromium.open(tmp_path / "out" / "report.html")
    choose(chromium, "g-sort", "+number")
    (tmp_path / "download").mkdir()
    content = download(chromium, tmp_path / "download")
    rows = list(csv.DictReader(io.StringIO(content, newline="")))
    table = csv.DictReader((tmp_path / "out" / "popularity.csv").open(encoding="utf-8", newline=""))
    written = [row["caption"] for row in table if row["side"] == "y"]
    assert [row["caption"] for row in rows] == written == [csv_cell(text) for text in texts]
    assert [read_csv_cell(cell) for cell in written][:5] == texts[:5]
    assert '"quotes ""here"""' in content and '"comma, here"' in content
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
