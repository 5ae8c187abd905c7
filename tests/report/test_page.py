"""Blocks become a page; a section that fails becomes a note; text is never markup."""

import re

import pytest

from nuclr.errors import UserError
from nuclr.report.charts import Series, line_chart
from nuclr.report.page import (
    Answer,
    Card,
    Example,
    Fold,
    Gallery,
    Item,
    LeaveOut,
    Page,
    Section,
    Table,
    Text,
    Tile,
    render_page,
)
from tests.report.folders import HOSTILE

ITEM = Item("text", HOSTILE, HOSTILE)
CARD = Card(ITEM, ITEM, {HOSTILE: HOSTILE}, (0.5,))


def fail(error):
    def content(_):
        raise error

    return content


def page_of(*sections, notes=()):
    return render_page(Page("test", "Title", "Verdict.", list(sections), list(notes)), "result")


WORDS = Section("words", "Some words", lambda result: [Text(f"This is <b>{result}</b>.")], menu="Words")


def test_a_section_is_on_the_page_and_in_the_navigation():
    page = page_of(Section("summary", "Summary", lambda _: [Tile("Error", "0.01")]), WORDS)
    assert '<li><a href="#words">Words</a></li>' in page
    assert '<section id="words"' in page and "<h2>Some words</h2>" in page
    assert "<p>This is &lt;b&gt;result&lt;/b&gt;.</p>" in page
    assert "<h2>Summary</h2>" not in page and "<aside" not in page


@pytest.mark.parametrize(
    "block",
    [
        Text(HOSTILE),
        Text(HOSTILE, "code"),
        Text(HOSTILE, "heading"),
        Tile(HOSTILE, HOSTILE, HOSTILE),
        Table(HOSTILE, ["", HOSTILE], [[HOSTILE, HOSTILE]]),
        line_chart(HOSTILE, [Series(HOSTILE, [0.0, 1.0], [1.0, 2.0])] * 2, HOSTILE, note=HOSTILE),
        Gallery([CARD]),
        Example(ITEM, [Answer(ITEM, HOSTILE, HOSTILE, right=True)], HOSTILE),
        Fold(HOSTILE, [Text(HOSTILE)]),
    ],
)
def test_text_is_never_markup(block):
    page = page_of(Section("one", "One", lambda _: [block]), notes=[HOSTILE])
    assert 'id="one"' in page and HOSTILE not in page and "&lt;script&gt;alert(1)" in page


def test_blocks_of_one_kind_are_laid_out_together():
    chart = line_chart("Loss", [Series("a", [0.0, 1.0], [1.0, 2.0])], "epoch")
    page = page_of(Section("one", "One", lambda _: [chart, chart, Text("between"), chart]))
    groups = [part.count('class="chart"') for part in page.split('class="charts"')[1:]]
    assert groups == [2, 1]


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (lambda _: None, "TypeError"),
        (lambda _: ["no block"], "AttributeError"),
        (lambda _: [Table("t", ["a"], None)], "TypeError"),
        (fail(LeaveOut("No data.")), "No data."),
        (fail(UserError("a.csv: missing")), "Lost is left out: a.csv: missing"),
        (fail(ZeroDivisionError("division by zero")), "ZeroDivisionError: division by zero"),
    ],
)
def test_a_section_that_fails_is_a_note(content, note):
    page = page_of(Section("lost", "Lost", content), WORDS)
    assert re.search(f"<li>.*{note}", page)
    assert 'id="lost"' not in page and "#lost" not in page and 'id="words"' in page


def test_a_section_may_be_left_out_without_a_note():
    page = page_of(Section("lost", "Lost", fail(LeaveOut())))
    assert 'id="lost"' not in page and "<aside" not in page
