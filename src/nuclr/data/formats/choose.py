"""Choose the two columns of a source, and recognize what they hold.

Settings name the columns (`data.x.key`, `data.y.key`). Without them, the first of these that exists is used: the usual
names of an image and its caption, the usual names of two texts (question and answer, query and passage, ...), or both
columns of a table with exactly two. Upper and lower case do not matter.

The modality of a column is set by `data.x.modality`, or recognized from its first cells: lists of numbers are vectors,
names that end with the suffix of an image are images, other texts are texts.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nuclr.data.modalities import get_modality, modality_names
from nuclr.data.modalities.image import MOSTLY, is_image_name
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
    """What the settings say about one side.

    Attributes:
        side: "x" or "y".
        key: the column (`data.x.key`), or None to choose it.
        kind: the modality (`data.x.modality`), or None to recognize it.
        name: the name of the side (`data.x.name`), or None for the column's.

    """

    side: Literal["x", "y"]
    key: str | None = None
    kind: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Choice:
    """What the settings say about both sides; with `views`, only the images of one column are read."""

    x: SideChoice = SideChoice("x")
    y: SideChoice = SideChoice("y")
    views: bool = False

    def __post_init__(self) -> None:
        for side in (self.x, self.y):
            if side.kind is not None and side.kind not in modality_names():
                allowed = ", ".join(modality_names())
                raise UserError(f"data.{side.side}.modality={side.kind}: unknown modality; allowed: {allowed}")


def choose_columns(columns: Sequence[str], choice: Choice, path: Path) -> tuple[str, str]:
    """Return the columns of x and y; both are the same with `choice.views`.

    Args:
        columns: the columns of a table, or the keys of its entries.
        choice: the settings of both sides.
        path: the file, for messages.

    Raises:
        UserError: if a column does not exist, or two columns cannot be chosen.

    """
    columns = [column for column in columns if column != _INDEX]
    x, y = (_named(columns, side, path) if side.key is not None else None for side in (choice.x, choice.y))
    if choice.views:
        image = x or find_column(columns, IMAGE_COLUMNS)
        if image is None:
            raise UserError(
                f"{path}: no column of images for data.contrast=views among {_list(columns)}; name it with data.x.key"
            )
        return image, image
    if x is not None and y is not None:
        return x, y
    if x is not None:
        y = find_column([column for column in columns if column != x], CAPTION_COLUMNS) or _partner(columns, x)
    elif y is not None:
        x = find_column([column for column in columns if column != y], IMAGE_COLUMNS) or _partner(columns, y)
    else:
        x, y = find_column(columns, IMAGE_COLUMNS), find_column(columns, CAPTION_COLUMNS)
        if x is None or y is None:
            x, y = _usual_texts(columns) or _both(columns) or (x, None)
    for column, side in ((x or find_column(columns, _ADDRESSES), choice.x), (y, choice.y)):
        if side.key is None and column is not None and column.lower() in _ADDRESSES:
            raise UserError(
                f"{path}: column {column!r} holds addresses; download the files first (for example with img2dataset), "
                f"or name another column with data.{side.side}.key among {_list(columns)}"
            )
    if x is None or y is None:
        raise UserError(_missing(columns, x, y, path))
    return x, y


def _named(columns: Sequence[str], side: SideChoice, path: Path) -> str:
    key = str(side.key)
    column = find_column(columns, (key,)) or find_column(columns, (key.lower(),))
    if column is not None:
        return column
    nearest = difflib.get_close_matches(key, columns, n=1, cutoff=0)
    hint = f"; nearest: {nearest[0]!r}" if nearest else ""
    raise UserError(f"{path}: no column {key!r} (data.{side.side}.key); found: {_list(columns)}{hint}")


def find_column(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the column with the first of these names that exists, in upper or lower case."""
    lower = {column.lower(): column for column in reversed(columns)}
    for name in names:
        if name in columns:
            return name
        if name in lower:
            return lower[name]
    return None


def _usual_texts(columns: Sequence[str]) -> tuple[str, str] | None:
    for first, second in TEXT_COLUMNS:
        x, y = find_column(columns, first), find_column(columns, second)
        if x is not None and y is not None:
            return x, y
    return None


def _both(columns: Sequence[str]) -> tuple[str, str] | None:
    return (columns[0], columns[1]) if len(columns) == 2 else None


def _partner(columns: Sequence[str], column: str) -> str | None:
    """Return the usual other column of two texts, or the only other column."""
    for names in TEXT_COLUMNS:
        for own, others in (names, names[::-1]):
            other = find_column(columns, others) if column.lower() in own else None
            if other is not None:
                return other
    both = _both(columns)
    return None if both is None else both[both[0] == column]


def _missing(columns: Sequence[str], x: str | None, y: str | None, path: Path) -> str:
    if x is not None and x.lower() in IMAGE_COLUMNS:
        usual = ", ".join(CAPTION_COLUMNS)
        return (
            f"{path}: no column for the caption among {_list(columns)}; "
            f"name it with data.y.key (names found automatically: {usual})"
        )
    if x is not None or y is not None:
        side = "x" if x is None else "y"
        return f"{path}: no usual column next to {x or y!r} among {_list(columns)}; name it with data.{side}.key"
    return f"{path}: no two usual columns among {_list(columns)}; name them with data.x.key and data.y.key"


def _list(columns: Sequence[str]) -> str:
    return ", ".join(repr(column) for column in columns[:20])


# -- modality ----------------------------------------------------------------------------------------------------------


def recognize_kind(cells: Sequence[tuple[str, Any]], column: str | None, choice: SideChoice, path: Path) -> str:
    """Return the modality of a column.

    Args:
        cells: (place, cell) of its first cells without empty ones, where the place is such as "line 3".
        column: its name.
        choice: the settings of the side.
        path: the file, for messages.

    Raises:
        UserError: if some cells are names of images and others are texts.

    """
    if choice.kind is not None:
        return choice.kind
    values = [cell for _, cell in cells]
    own = [name for name in modality_names() if name not in ("image", "text", "vector")]
    for name in [*own, "vector"]:
        if values and get_modality(name).recognize(values):
            return name
    usual = (column or "").lower()
    if usual in CAPTION_COLUMNS:
        return "text"
    # A name without a suffix counts as a text, unless the column has the usual name of a column of images.
    texts = [(place, cell) for place, cell in cells if isinstance(cell, str)]
    images = [is_image_name(cell) or (usual in IMAGE_COLUMNS and " " not in cell) for _, cell in texts]
    share = sum(images) / max(len(images), 1)
    if not 1 - MOSTLY < share < MOSTLY:
        return "image" if share >= MOSTLY or usual in IMAGE_COLUMNS else "text"
    examples = [texts[images.index(is_image)] for is_image in (True, False)]
    shown = " and ".join(f"{place} has {shorten(cell)}" for place, cell in examples)
    raise UserError(
        f"{path}: column {column!r} mixes names of images and texts: {shown}; "
        f"fix the column, or set data.{choice.side}.modality to image or text"
    )


def shorten(value: Any) -> str:
    """Return a value as one short line of JSON, for messages."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError, TypeError):  # nested too deep, a number that is too long, or bytes
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
