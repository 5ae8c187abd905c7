"""Which column or key holds the image, and which the caption."""

import difflib
from collections.abc import Sequence
from pathlib import Path

from nuclr.errors import UserError

IMAGE = ("image", "filepath", "image_path", "file_name", "filename", "path", "jpg", "png")
CAPTION = ("caption", "captions", "title", "text", "sentence", "txt")


def choose(columns: Sequence[str], asked: str | None, usual: Sequence[str], what: str, path: Path) -> str:
    """The column `asked` for, or else the first of the `usual` ones; `what` is "image" or "caption"."""
    if asked is not None and asked in columns:
        return asked
    if asked is None:
        for name in usual:
            if name in columns:
                return name
    found = ", ".join(repr(column) for column in columns[:20])
    if asked is None:
        raise UserError(
            f"{path}: no column for the {what} among {found}; name it with {what}_key (known: {', '.join(usual)})"
        )
    near = difflib.get_close_matches(asked, columns, n=1, cutoff=0)
    raise UserError(
        f"{path}: no column {asked!r} ({what}_key); found: {found}; nearest: {near[0]!r}"
        if near
        else f"{path}: no column {asked!r} ({what}_key); found: {found}"
    )
