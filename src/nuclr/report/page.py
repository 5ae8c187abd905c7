"""Pages: a title, a verdict, and sections made of a few kinds of blocks; rendered to one HTML file that needs no other.

How to write a page. A page is a short function from a result object to a `Page`:

    def make_page(study: ToyStudy) -> Page:
        return Page(
            kind="toy study",
            title="Toy study",
            verdict="The estimated popularity is as good as the true one.",
            sections=[
                Section("summary", "Summary", summary),
                Section("error", "Generalization error", error, menu="Error"),
            ],
        )

    def error(study: ToyStudy) -> Iterator[Block]:
        yield Text("With a uniform popularity, the error does not vanish.")
        yield from (error_chart(study, tau) for tau in study.temperatures)
        yield Table("Slopes", ["", "slope"], [["GCL", "0.00"], ["NUCLR", "-0.53"]])

The function of a section is called with the result object when the page is rendered, and returns or yields blocks.
Blocks of one kind that follow one another are laid out together: charts and tables side by side, tiles in a row.

- `Text`: a paragraph, a heading, small print, or code. `Tile`: a headline number. `Table`: rows of texts.
- `Chart`: what the functions of `charts` return.
- `Gallery`: cards of items.
- `Example`: a query with its answers. `Fold`: blocks that are shown after a click.
- `SearchBox`: queries to choose from, and what each finds.

All text is escaped: it is never markup.

A section that has nothing to show raises `LeaveOut`, with a text for the notes at the top of the page or without one. A
section that fails in any other way is left out with a note as well: a page is never lost because of one section.

A page becomes known by a row of `KINDS` in `write`, which is named like its module in `pages`. The section "summary"
has no heading, and the notes follow it.
"""

import base64
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nuclr import __version__
from nuclr.errors import UserError
from nuclr.report.charts import Chart


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Args:
        pictures: whether the page contains small pictures.
        model: whether to encode pairs with the trained model. Without it, the page has only numbers and curves.

    """

    pictures: bool = True
    model: bool = True


@dataclass(frozen=True)
class Text:
    """A paragraph (style ""), a heading within a section, small print, or code to copy."""

    text: str
    style: Literal["", "heading", "small", "code"] = ""


@dataclass(frozen=True)
class Tile:
    """A headline number with its label and an explanation."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Args:
        title: printed above the table; no two tables of a page have the same.
        columns: the heading of each column; empty for a table without headings.
        rows: cells; the first cell of a row is its name.
        best: the cells (row, column) to print in bold.

    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Item:
    """An image, a text or a vector as the page shows it; `items` makes them.

    Args:
        kind: "picture", "text" or "numbers"; the layout depends on it.
        label: what the page calls the item if it cannot show it: "image 12".
        text: the text itself; empty for other kinds.
        picture: a data URI; None for other kinds, and for a picture that cannot be read or is not wanted.
        curve: numbers as SVG; None for other kinds.

    """

    kind: str
    label: str
    text: str = ""
    picture: str | None = None
    curve: Markup | None = None

    @property
    def plain(self) -> str:
        """The item in words, for places that show no pictures and curves."""
        return self.text or self.label


@dataclass(frozen=True)
class Card:
    """One item of a gallery.

    Args:
        item: what the card is about.
        other: the other side of its pair, if the card shows it, too.
        facts: names and values, printed below the item.
        bars: shares from 0 to 1, drawn as bars.

    """

    item: Item
    other: Item | None = None
    facts: dict[str, str] = field(default_factory=dict)
    bars: tuple[float, ...] = ()


@dataclass(frozen=True)
class Gallery:
    """Cards in the order of the page."""

    cards: Sequence[Card]


@dataclass(frozen=True)
class Answer:
    """An answer of an example: `tag` is printed in front of it, `note` after it; a right one is marked."""

    item: Item
    tag: str = ""
    note: str = ""
    right: bool = False


@dataclass(frozen=True)
class Example:
    """A query with its answers."""

    query: Item
    answers: Sequence[Answer]
    note: str = ""


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown after a click on the title."""

    title: str
    blocks: "Sequence[Block]"


@dataclass(frozen=True)
class SearchBox:
    """Queries to filter and pick, and what each finds before and after a correction. At most one per page.

    Args:
        queries: in the order of the list.
        items: what they find.
        counts: per item, how many queries find it, before and after.
        plain: per query, positions in `items`, best first.
        corrected: the same after the correction.
        right: per query, the positions that are right answers.

    """

    queries: Sequence[Item]
    items: Sequence[Item]
    counts: Sequence[Sequence[int]]
    plain: Sequence[Sequence[int]]
    corrected: Sequence[Sequence[int]]
    right: Sequence[Sequence[int]]

    def to_json(self) -> dict[str, Any]:
        """Return what the script of the page reads; pictures are listed by the position of their item."""
        return {
            "queries": [item.plain for item in self.queries],
            "items": [item.plain for item in self.items],
            "pictures": {
                name: {at: item.picture for at, item in enumerate(items) if item.picture}
                for name, items in (("queries", self.queries), ("items", self.items))
            },
            "counts": self.counts,
            "plain": self.plain,
            "corrected": self.corrected,
            "right": self.right,
        }


Block = Text | Tile | Table | Chart | Gallery | Example | Fold | SearchBox


LONGEST = 1000  # characters of a text that a page shows


def shorten(text: str) -> str:
    """Return a text that a page can show; a long document is cut."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1].rstrip()}…"


class LeaveOut(Exception):  # noqa: N818 (not an error: the section has nothing to show)
    """Raised by a section's function to leave the section out. Its text becomes a note; an empty text adds none."""


@dataclass(frozen=True)
class Section:
    """One section of a page.

    Args:
        key: the section's id in the page, and the target of its link in the navigation: lower-case letters, digits
            and "-".
        title: its heading.
        content: called with the page's result object; returns or yields blocks.
        menu: its name in the navigation, by default the title.

    Example:
        >>> Section("hello", "Hello", lambda result: [Text(f"This is {result}.")]).key
        'hello'

    """

    key: str
    title: str
    content: Callable[[Any], Iterable[Block]]
    menu: str = ""


@dataclass(frozen=True)
class Page:
    """A page.

    Args:
        kind: what the page is about, printed above its title: "toy study".
        title: its heading.
        verdict: one sentence below it.
        sections: in the order of the page.
        notes: what a reader should know about the page, such as missing files. Sections may add some.

    """

    kind: str
    title: str
    verdict: str
    sections: list[Section]
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note, unless the page has it already."""
        if text and text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class Rendered:
    """A section with its blocks and their HTML."""

    section: Section
    blocks: list[Block]
    html: Markup


def render_sections(page: Page, result: object) -> list[Rendered]:
    """Return the sections of a page without those that are left out; the page's notes say why.

    Args:
        page: its sections are computed.
        result: what they are computed from.

    """
    rendered = []
    for section in page.sections:
        try:
            blocks = list(section.content(result))
            rendered.append(Rendered(section, blocks, render_blocks(blocks)))
        except LeaveOut as reason:
            page.note(str(reason))
        except Exception as error:  # data, models and plugins of users can fail in any way
            page.note(f"{section.title} is left out: {describe(error)}")
    return rendered


def render_page(page: Page, result: object) -> str:
    """Return a page as HTML.

    As a second safeguard next to escaping, the page has a content security policy that allows one script, identified by
    its hash, and no network requests. Even if some text were mistaken for markup, no script in it could run.

    Args:
        page: the page.
        result: what its sections are computed from.

    """
    sections = render_sections(page, result)
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return (
        _environment()
        .get_template("page.html")
        .render(
            page=page,
            sections=sections,
            style=Markup(_resource("style.css")),
            script=Markup(script),
            policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
            version=__version__,
        )
    )


def render_blocks(blocks: Iterable[Block]) -> Markup:
    """Return blocks as HTML: one macro of `blocks.html` per kind, called with all that follow one another."""
    macros = _environment().get_template("blocks.html").module
    return Markup("").join(
        getattr(macros, kind.__name__.lower())(list(group)) for kind, group in itertools.groupby(blocks, type)
    )


def describe(error: Exception) -> str:
    """Return an error as one line for a note: the text of a user's mistake, with its type for any other error."""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("nuclr.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}  # fewer bytes for most scripts
    environment.globals["render"] = render_blocks
    return environment


def _resource(name: str) -> str:
    return (resources.files("nuclr.report") / "templates" / name).read_text(encoding="utf-8")
