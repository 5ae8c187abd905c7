"""What a caller asks for, and what the columns of a source hold.

Settings name the columns (`data.x.key`, `data.y.key`). Without them, the first of these that exists is used: the usual
names of an image and its caption, the usual names of two texts (question and answer, query and passage, ...), or both
columns of a table with exactly two. Upper and lower case do not matter.

The modality of a column is set by `data.x.modality`, or recognized from its first cells: lists of numbers are vectors,
names that end with the suffix of an image are images, other texts are texts.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nuclr.data.modalities import Modality, get_modality, modality_names
from nuclr.data.modalities.base import shorten
from nuclr.data.modalities.image import MOSTLY, SUFFIXES
from nuclr.data.side import SIDES, SideName
from nuclr.errors import UserError

IMAGE_COLUMNS = ("image", "filepath", "image_path", "file_name", "filename", "path", "jpg", "png")
CAPTION_COLUMNS = ("caption", "captions", "title", "text", "sentence", "txt")
TEXT_COLUMNS = (
    (("question", "questions"), ("answer", "answers")),
    (("query", "queries"), ("positive", "positives", "passage", "passages", "document", "documents")),
    (("anchor",), ("positive", "positives")),
    (("premise",), ("hypothesis",)),
    (("source",), ("target",)),
    (("sentence1",), ("sentence2",)),
    (("text1",), ("text2",)),
    (("code",), ("docstring",)),
)
_ADDRESSES = ("url", "urls", "image_url")
_INDEX = "__index_level_0__"  # the index that pandas writes to Parquet


@dataclass(frozen=True)
class SideChoice:
    """What is known about one side of pairs before they are opened; the rest is recognized.

    Attributes:
        key: the column (setting `data.x.key`), or None to choose it.
        modality: the name of the modality (`data.x.modality`), or None to recognize it.
        name: the name of the side (`data.x.name`), or None for the column's.

    """

    key: str | None = None
    modality: str | None = None
    name: str | None = None


ANY = SideChoice()


@dataclass(frozen=True)
class Request:
    """What to open, and how; see `nuclr.data.open`.

    Attributes:
        path: the file or folder.
        root: the folder that names of files are relative to; None for that of the file.
        sides: what is known about both sides.
        split: the split to read.
        allow_outside: read files outside of the root as well.
        views: read only the images of one column.

    """

    path: Path
    root: Path | None = None
    sides: Mapping[SideName, SideChoice] = field(default_factory=lambda: {"x": ANY, "y": ANY})
    split: str | None = None
    allow_outside: bool = False
    views: bool = False

    def __post_init__(self) -> None:
        for name, side in self.sides.items():
            if side.modality not in (None, *modality_names()):
                allowed = ", ".join(modality_names())
                raise UserError(f"data.{name}.modality={side.modality}: unknown modality; allowed: {allowed}")


def choose_columns(columns: Sequence[str], request: Request) -> dict[SideName, str]:
    """Return the columns of x and y; both are the same with `request.views`.

    Args:
        columns: the columns of a table, or the keys of its entries.
        request: what is asked for.

    Raises:
        UserError: if a column does not exist, or two columns cannot be chosen.

    """
    columns = [column for column in columns if column != _INDEX]
    listed = ", ".join(repr(column) for column in columns[:20])
    named: dict[SideName, str] = {}
    for side, choice in request.sides.items():
        if choice.key is not None:
            column = find_column(columns, (choice.key, choice.key.lower()))
            if column is None:
                nearest = difflib.get_close_matches(choice.key, columns, n=1)
                hint = f"; nearest: {nearest[0]!r}" if nearest else ""
                raise UserError(f"{request.path}: no column {choice.key!r} (data.{side}.key); found: {listed}{hint}")
            named[side] = column
    if request.views:
        image = named.get("x") or find_column(columns, IMAGE_COLUMNS)
        if image is None:
            raise UserError(f"{request.path}: data.contrast=views: no column of images among {listed}; set data.x.key")
        return {"x": image, "y": image}
    chosen = _guess(columns, named)
    address = find_column(columns, _ADDRESSES)
    if address is not None and address not in named.values() and address in (chosen or {"x": address}).values():
        raise UserError(
            f"{request.path}: column {address!r} holds addresses; download the files first (for example with "
            f"img2dataset), or name other columns with data.x.key and data.y.key among {listed}"
        )
    if chosen is None:
        missing = " and ".join(f"data.{side}.key" for side in SIDES if side not in named)
        raise UserError(f"{request.path}: no usual columns among {listed}; name {missing}")
    return chosen


def _guess(columns: Sequence[str], named: Mapping[SideName, str]) -> dict[SideName, str] | None:
    """Return both columns, of which none, one or both are named; None if they cannot be chosen."""
    others = [column for column in columns if column not in named.values()]
    for x_names, y_names in ((IMAGE_COLUMNS, CAPTION_COLUMNS), *TEXT_COLUMNS):
        x = named.get("x") or find_column(others, x_names)
        y = named.get("y") or find_column(others, y_names)
        if x is not None and y is not None:
            return {"x": x, "y": y}
    if len(columns) == 2 and others:
        return {"x": named.get("x", others[0]), "y": named.get("y", others[-1])}
    return None


def find_column(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the column with the first of these names that exists, in upper or lower case."""
    lower = {column.lower(): column for column in reversed(columns)}
    for name in names:
        if name in columns:
            return name
        if name in lower:
            return lower[name]
    return None


# -- modality ----------------------------------------------------------------------------------------------------------


def recognize_modality(
    cells: Sequence[Any],
    column: str | None,
    side: SideName,
    request: Request,
) -> Modality:
    """Return the modality of a column.

    Args:
        cells: its first cells without empty ones.
        column: its name.
        side: its side.
        request: what is asked for.

    Raises:
        UserError: if some cells are names of images and others are texts.

    """
    chosen = request.sides[side].modality
    if chosen is not None:
        return get_modality(chosen)
    # Modalities of plugins come first; images and texts are distinguished below, by names of columns and of files.
    plugins = [name for name in modality_names() if name not in ("image", "text", "vector")]
    for name in (*plugins, "vector"):
        if cells and get_modality(name).recognize(cells):
            return get_modality(name)
    usual = (column or "").lower()
    if usual in CAPTION_COLUMNS:
        return get_modality("text")
    # A name without a suffix counts as a text, unless the column has the usual name of a column of images.
    images: list[str] = []
    texts: list[str] = []
    for cell in cells:
        if isinstance(cell, str):
            is_image = cell.lower().endswith(SUFFIXES) or (usual in IMAGE_COLUMNS and " " not in cell)
            (images if is_image else texts).append(cell)
    share = len(images) / max(len(images) + len(texts), 1)
    if 1 - MOSTLY < share < MOSTLY:
        raise UserError(
            f"{request.path}: column {column!r} mixes names of images and texts: {shorten(images[0])} and "
            f"{shorten(texts[0])}; fix the column, or set data.{side}.modality to image or text"
        )
    return get_modality("image" if share >= MOSTLY or usual in IMAGE_COLUMNS else "text")
