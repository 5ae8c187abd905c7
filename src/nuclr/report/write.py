"""Choose the kind of page for a folder, and write the page."""

import importlib
from pathlib import Path

from nuclr import files
from nuclr.errors import UserError
from nuclr.report.page import Options, Page, describe, render_page

REPORT = "report.html"
# The kinds of pages, and the files by which their folders are recognized. The module of a kind in `pages` has
# `open_folder(path, options)`, which returns a result object, and `make_page(result)`.
KINDS = {
    "training": ("config.yaml",),
    "comparison": ("compare.json", "ablations.json", "batch_sizes.json", "table.json"),
    "popularity": ("popularity.json",),
    "hubness": ("hubness.json",),
    "toy": ("toy.json",),
}


def write_report(
    path: Path,
    out: Path | None = None,
    options: Options | None = None,
) -> Path:
    """Write the page of a folder.

    Args:
        path: a folder that `nuclr train`, `compare`, `table`, `popularity`, `hubness` or `toy` wrote.
        out: the file to write, by default report.html in the folder.
        options: what the page contains.

    Returns:
        The file that was written.

    Raises:
        UserError: if the folder is not one of these, its files are damaged, or the page cannot be written.

    """
    target = out or path / REPORT
    find_kind(path)
    with files.locked(path, REPORT):
        text = make_page(path, options or Options())
        with files.user_errors(target):
            files.write_text(target, text)
    return target


def make_page(path: Path, options: Options) -> str:
    """Return the page of a folder as HTML. See `write_report`."""
    page, result = open_page(find_kind(path), path, options)
    return render_page(page, result)


def find_kind(path: Path) -> str:
    """Return which page a folder gets."""
    for kind, names in KINDS.items():
        if any((path / name).is_file() for name in names):
            return kind
    problem = f"has none of the files {', '.join(sum(KINDS.values(), ()))}" if path.is_dir() else "no such folder"
    raise UserError(f"{path}: {problem}; name the folder that a nuclr command wrote")


def open_page(
    kind: str,
    path: Path,
    options: Options,
) -> tuple[Page, object]:
    """Return the page of a folder, and the object that its sections are computed from."""
    module = importlib.import_module(f"nuclr.report.pages.{kind}")
    try:
        result = module.open_folder(path, options)
        return module.make_page(result), result
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, OSError) as error:
        raise UserError(f"{path}: its files are damaged ({describe(error)})") from None
