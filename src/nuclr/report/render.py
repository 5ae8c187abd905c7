"""Pages as lists of sections, and their rendering to one HTML file that needs no other file.

A `Section` is a record: key, title, template and the function that computes its content. A `Page` is a list of
sections for one kind of folder. `render_page` calls the functions, renders the templates and puts the page together. A
section that cannot be computed or rendered is left out, and a note at the top of the page says why.

The templates escape all text. As a second safeguard, the page has a content security policy that allows one script,
identified by its hash, and no network requests. So even if some text were mistaken for markup, no script in it could
run.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from nuclr import __version__
from nuclr.errors import UserError
from nuclr.report import numbers


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Args:
        samples: number of training pairs on which popularity is solved. None: 3000, or fewer if the model is slow.
        gallery: number of samples of each side that the popularity gallery shows, chosen by exact popularity. The
            samples with the largest and smallest zeta of training are added.
        pictures: whether the page contains small pictures.
        model: whether to encode pairs with the trained model. Without it, the page has only numbers and curves.

    """

    samples: int | None = None
    gallery: int = 30
    pictures: bool = True
    model: bool = True


@dataclass(frozen=True)
class Tile:
    """A headline number with its label and an explanation."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """A table of texts. The first cell of a row is its name; `best` holds the cells (row, column) to print in bold."""

    columns: list[str]
    rows: list[list[str]]
    best: frozenset[tuple[int, int]] = frozenset()


class LeaveOut(Exception):  # noqa: N818 (not an error: the section has nothing to show)
    """Raised by a section's function to leave the section out. Its text becomes a note; an empty text adds none."""


@dataclass
class Context:
    """What the sections of a page are computed from. Each kind of page has a subclass with its own data.

    Args:
        title: the page's heading.
        sentence: one sentence below it.
        notes: what a reader should know about the page, such as missing files.

    """

    title: str
    sentence: str
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note, unless the page has it already."""
        if text and text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class Section:
    """One section of a page.

    Args:
        key: the section's id in the page, and the target of its link in the navigation: lower-case letters, digits
            and "-".
        title: its heading.
        template: a Jinja template: the name of a template of this package ("sections/curves.html"), the `Path` of a
            file, or the source itself. It sees `content`, `notes`, and the macros of `parts.html` as `parts`.
        content: called with the page's `Context`; returns what the template shows, usually a frozen dataclass. None
            leaves the section out with a general note, `LeaveOut` with a note of its own.
        menu: its name in the navigation, by default the title.
        heading: whether the title is printed above the section.

    Example:
        >>> Section("hello", "Hello", "<p>{{ content }}</p>", lambda context: f"This is {context.title}.").menu
        'Hello'

    """

    key: str
    title: str
    template: str | Path
    content: Callable[[Any], object | None]
    menu: str = ""
    heading: bool = True

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", self.key):
            raise ValueError(f"key must be lower-case letters, digits and '-', but is {self.key!r}")
        if not self.menu:
            object.__setattr__(self, "menu", self.title)


@dataclass(frozen=True)
class Page:
    """One kind of page.

    Args:
        kind: what the page is about, printed above its heading.
        files: a folder with one of these files gets a page of this kind.
        open: reads the folder. Raises `UserError` if there is nothing to make a page from.
        sections: in the order of the page.

    """

    kind: str
    files: tuple[str, ...]
    open: Callable[[Path, Options], Context]
    sections: list[Section]

    def accepts(self, path: Path) -> bool:
        """Return whether a folder gets a page of this kind."""
        return any((path / name).is_file() for name in self.files)


def render_page(page: Page, context: Context) -> str:
    """Return the page as HTML.

    Args:
        page: the kind of page.
        context: what its sections are computed from. Notes about sections that are left out are added to it.

    """
    environment = _environment()
    rendered: list[tuple[Section, Markup]] = []
    # Backwards, so that the notes in the first section, the summary, include those about the others.
    for section, content in reversed(compute_sections(page, context)):
        try:
            template = _template(environment, section.template)
            body = template.render(section=section, content=content, notes=context.notes)
            rendered.insert(0, (section, Markup(body)))
        except Exception as error:
            context.note(f"{section.title} is left out: {describe(error)}")
    style, script = (_resource(name) for name in ("style.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return environment.get_template("base.html").render(
        page=page,
        context=context,
        sections=rendered,
        notes=[] if any(section.key == "summary" for section, _ in rendered) else context.notes,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        version=__version__,
    )


def compute_sections(page: Page, context: Context) -> list[tuple[Section, object]]:
    """Return the sections of a page with their content, without those that are left out."""
    contents = [(section, _compute(section, context)) for section in page.sections]
    return [(section, content) for section, content in contents if content is not None]


def _compute(section: Section, context: Context) -> object | None:
    """Return the section's content, or None and a note. A page must not be lost because one section fails."""
    try:
        content = section.content(context)
    except LeaveOut as reason:
        context.note(str(reason))
        return None
    except Exception as error:  # data, models and plugins of users can fail in any way
        context.note(f"{section.title} is left out: {describe(error)}")
        return None
    if content is None:
        context.note(f"{section.title} is left out: there is nothing to show.")
    return content


def describe(error: Exception) -> str:
    """Return an error as one line for a note: the text of a user's mistake, with its type for any other error."""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"


def to_json(data: object) -> Markup:
    """Return JSON for a script element, escaped so that it cannot end the element or begin another."""
    dumped = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        dumped = dumped.replace(character, f"\\u{ord(character):04x}")
    return Markup(dumped)


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
    environment.filters |= {
        "count": numbers.count,
        "percent": numbers.percent,
        "number": numbers.number,
        "times": numbers.times,
        "score": numbers.score,
        "duration": numbers.duration,
        "json": to_json,
    }
    environment.globals["parts"] = environment.get_template("parts.html").module
    return environment


def _template(environment: Environment, template: str | Path) -> Template:
    if isinstance(template, Path):
        return environment.from_string(template.read_text(encoding="utf-8"))
    return environment.get_template(template) if template.endswith(".html") else environment.from_string(template)


def _resource(name: str) -> str:
    return (resources.files("nuclr.report") / "templates" / name).read_text(encoding="utf-8")
