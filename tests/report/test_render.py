"""Sections become a page; a section that fails becomes a note."""

import json
from dataclasses import dataclass

import pytest

from nuclr.errors import UserError
from nuclr.report.render import Context, LeaveOut, Page, Section, render_page, to_json


@dataclass(frozen=True)
class Words:
    text: str


def fail(error):
    def content(_):
        raise error

    return content


def page_of(*sections):
    return render_page(Page("test", (), lambda *_: None, list(sections)), Context("Title", "Sentence."))


SUMMARY = Section("summary", "Summary", "{{ parts.notes(notes) }}", lambda _: Words(""), heading=False)
WORDS = Section("words", "Some words", "<p>{{ content.text }}</p>", lambda _: Words("<b>"), menu="Words")


def test_a_section_is_on_the_page_and_in_the_navigation():
    page = page_of(SUMMARY, WORDS)
    assert '<li><a href="#words">Words</a></li>' in page
    assert '<section id="words"' in page and "<h2>Some words</h2>" in page and "<p>&lt;b&gt;</p>" in page
    assert "<h2>Summary</h2>" not in page and 'class="notes"' not in page


@pytest.mark.parametrize(
    ("content", "template", "note"),
    [
        (lambda _: None, "", "Lost is left out: there is nothing to show."),
        (fail(LeaveOut("No data.")), "", "No data."),
        (fail(UserError("a.csv: missing")), "", "Lost is left out: a.csv: missing"),
        (fail(ZeroDivisionError("division by zero")), "", "Lost is left out: ZeroDivisionError: division by zero"),
        (lambda _: Words(""), "{{ content.nothing }}", "Lost is left out: UndefinedError"),
        (lambda _: Words(""), "{% if %}", "Lost is left out: TemplateSyntaxError"),
        (lambda _: Words(""), "sections/nowhere.html", "Lost is left out: TemplateNotFound"),
    ],
)
def test_a_section_that_fails_is_a_note(content, template, note):
    page = page_of(SUMMARY, Section("lost", "Lost", template or "x", content), WORDS)
    assert f"<li>{note}" in page
    assert 'id="lost"' not in page and "#lost" not in page and 'id="words"' in page


def test_a_section_may_be_left_out_without_a_note():
    page = page_of(SUMMARY, Section("lost", "Lost", "x", fail(LeaveOut())))
    assert 'id="lost"' not in page and 'class="notes"' not in page


def test_notes_are_shown_without_a_summary():
    page = page_of(Section("summary", "Summary", "x", lambda _: 1 / 0), WORDS)
    assert "<li>Summary is left out: ZeroDivisionError" in page and 'id="words"' in page


def test_templates_of_other_folders(tmp_path):
    (tmp_path / "own.html").write_text("<p>own {{ content.text }}</p>")
    assert "<p>own x</p>" in page_of(Section("own", "Own", tmp_path / "own.html", lambda _: Words("x")))


def test_keys_are_ids():
    with pytest.raises(ValueError, match="key must be lower-case"):
        Section("Not an id", "Title", "x", lambda _: None)


def test_json_cannot_leave_its_script():
    dumped = to_json({"caption": "</script><!--\u2028"})
    assert "<" not in dumped and json.loads(dumped)["caption"] == "</script><!--\u2028"
