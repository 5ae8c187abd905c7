"""Choose the kind of page for a folder, and write the page. Sections of your own are added with `register_section`."""

from pathlib import Path

from nuclr import files
from nuclr.errors import UserError
from nuclr.report.pages import comparison, hubness, popularity, table, toy, training
from nuclr.report.render import Options, Page, Section, describe, render_page

REPORT = "report.html"
PAGES: dict[str, Page] = {
    "training": training.PAGE,
    "comparison": comparison.PAGE,
    "popularity": popularity.PAGE,
    "hubness": hubness.PAGE,
    "toy": toy.PAGE,
    "table": table.PAGE,
}


def register_section(page: str, section: Section, before: str | None = None) -> None:
    """Add a section to all pages of one kind.

    Args:
        page: "training", "comparison", "popularity", "hubness", "toy" or "table".
        section: the record. Registering the same record again changes nothing.
        before: the key of the section that it is put in front of. By default it is the last one.

    Raises:
        ValueError: if there is no such page or no such section, or another section has this key.

    Example:
        >>> from nuclr.report import Section, register_section
        >>> def count_notes(context):
        ...     return len(context.notes)
        >>> section = Section("notes", "Notes", "<p>{{ content }} notes</p>", count_notes)
        >>> register_section("toy", section, before="repeat")
        >>> unregister_section("toy", "notes")

    """
    sections = _sections(page)
    known = {other.key: other for other in sections}
    if known.get(section.key) == section:
        return
    if section.key in known:
        raise ValueError(f"key {section.key!r} is already a section of the {page} page; choose another key")
    if before is not None and before not in known:
        raise ValueError(f"before is {before!r}, but the {page} page has the sections {', '.join(known)}")
    sections.insert(len(sections) if before is None else list(known).index(before), section)


def unregister_section(page: str, key: str) -> None:
    """Remove a section from all pages of one kind, as tests of plugins do.

    Args:
        page: as for `register_section`.
        key: the key of the section.

    Raises:
        ValueError: if there is no such page or no such section.

    """
    sections = _sections(page)
    keys = [section.key for section in sections]
    if key not in keys:
        raise ValueError(f"key is {key!r}, but the {page} page has the sections {', '.join(keys)}")
    del sections[keys.index(key)]


def _sections(page: str) -> list[Section]:
    if page not in PAGES:
        raise ValueError(f"page is {page!r}; allowed: {', '.join(PAGES)}")
    return PAGES[page].sections


def write_report(path: Path, out: Path | None = None, options: Options | None = None) -> Path:
    """Write the page of a folder.

    Args:
        path: a folder that `nuclr train`, `compare`, `table`, `popularity`, `hubness` or `toy` wrote.
        out: the file to write, by default report.html in the folder.
        options: what the page contains.

    Returns:
        The file that was written.

    Raises:
        UserError: if the folder is not one of these, or the file cannot be written.

    """
    target = out or path / REPORT
    if target.is_dir():
        raise UserError(f"{target} is a folder; name a file with --out")
    text = make_page(path, options or Options())
    try:
        files.write_text(target, text)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); name another file with --out") from None
    return target


def make_page(path: Path, options: Options) -> str:
    """Return the page of a folder as HTML.

    Args:
        path: a folder that `nuclr train`, `compare`, `table`, `popularity`, `hubness` or `toy` wrote.
        options: what the page contains.

    Raises:
        UserError: if the folder is not one of these, or its files are damaged.

    """
    if not path.is_dir():
        problem = "a file, not a folder" if path.exists() else "no such folder"
        raise UserError(f"{path}: {problem}; name the folder that a nuclr command wrote")
    page = next((page for page in PAGES.values() if page.accepts(path)), None)
    if page is None:
        expected = ", ".join(name for page in PAGES.values() for name in page.files)
        raise UserError(
            f"{path} is not a run folder: it has none of the files {expected}; "
            "name the folder that nuclr train, compare, table, popularity, hubness or toy wrote"
        )
    try:
        context = page.open(path, options)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: the files of this {page.kind} are damaged ({describe(error)})") from None
    return render_page(page, context)
