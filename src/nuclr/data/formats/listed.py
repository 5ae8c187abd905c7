"""Pairs of two columns: the common part of JSON lists, tables, Parquet files and datasets on disk.

A row has an x and a y, and each may be one cell or a list of cells:

- one x and k y (or the reverse): k pairs that share the x;
- k x and k y: k pairs x[i], y[i] in one group, whose x and y all belong together;
- k x and l y: max(k, l) pairs in one group; the shorter list is repeated.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nuclr.data.formats.choose import Choice, SideChoice, recognize_kind, shorten
from nuclr.data.formats.columns import Column, WrongCellError, is_empty, make_column, split_cell
from nuclr.data.pairs import BadSample, Checkable
from nuclr.data.texts import clean
from nuclr.errors import UserError, printable

Row = tuple[Any, Any, str | None, int]  # x, y, why the row is bad or None, number of the line or row

_PROBED = 1000  # rows by which the modality of a column is recognized
_LONGEST_NAME = 60  # characters of a column's name that name its side


class ListedPairs(Checkable):
    """Pairs of two columns of any modalities.

    Args:
        rows: (x, y, reason, place) per row, in the order of the list. The reason is None unless the row is already
            known to be bad. The place is the number of the line or row, for messages.
        x: the empty column of x, to which the cells are added.
        y: the same for y.
        path: the list.
        root: the folder that names of files are relative to (setting `data.root`); by default that of the list.
        allow_outside: read files outside of the root as well (setting `data.allow_outside`). A name leaves the root if
            it is absolute, contains `..`, or leads through a symbolic link.
        x_name: the name of side x.
        y_name: the name of side y.
        x_key: the column of x, for messages.
        y_key: the column of y, for messages.
        place: what the rows' places are: "line" or "row".

    Raises:
        UserError: if there are no rows, a cell has a wrong type, or none of the first images exists.

    """

    def __init__(
        self,
        rows: Iterable[Row],
        x: Column,
        y: Column,
        path: Path,
        root: Path | None = None,
        allow_outside: bool = False,
        x_name: str = "image",
        y_name: str = "text",
        x_key: str | None = None,
        y_key: str | None = None,
        place: str = "line",
    ) -> None:
        self.known_bad: dict[int, str] = {}
        self.label = path.name or str(path)
        self.x_kind, self.y_kind, self.x_name, self.y_name = x.kind, y.kind, x_name, y_name
        self.x_key, self.y_key = x_key, y_key
        self._x, self._y, self._place, self._places = x, y, place, array("q")
        self._add_rows(rows, path)
        if not len(x):
            raise UserError(f"{path}: holds no pairs")
        self.x_id, self.y_id = x.ids(), y.ids()
        hashed = hashlib.sha256(x.fingerprint() + y.fingerprint())
        if self.group is not None:
            hashed.update(self.group.tobytes())
        self.fingerprint = hashed.hexdigest()
        for column in (x, y):
            column.locate(path, root, allow_outside)
        folders = [column.folder.path for column in (x, y) if column.folder is not None]
        self.folder = folders[0] if folders else path.parent

    def _add_rows(self, rows: Iterable[Row], path: Path) -> None:
        group, grouped, places = array("q"), False, self._places
        for row, (x_value, y_value, reason, place) in enumerate(rows):
            x_cells, y_cells = split_cell(x_value), split_cell(y_value)
            k, m, first = len(x_cells), len(y_cells), len(places)
            grouped = grouped or (k > 1 and m > 1)
            x_problems = self._add_cells(self._x, x_cells, first, max(k, m), self.x_key or self.x_name, path, place)
            y_problems = self._add_cells(self._y, y_cells, first, max(k, m), self.y_key or self.y_name, path, place)
            for i in range(max(k, m)):
                if problem := reason or x_problems[i % k] or y_problems[i % m]:
                    self.known_bad[first + i] = problem
                places.append(place)
                group.append(row)
        if grouped:
            self.group = np.array(group, np.int64)

    def _add_cells(
        self, column: Column, cells: Sequence[Any], first: int, count: int, key: str, path: Path, place: int
    ) -> list[str | None]:
        """Add `count` pairs to a column, in which the cells are repeated; return what is wrong with each cell."""
        problems = []
        for cell in cells:
            try:
                problems.append(column.append(cell))
            except WrongCellError as error:
                location = f"{path}, {self._place} {place}"
                raise UserError(f"{location}: {key!r} is {shorten(cell)}; needs {error}") from None
        for i in range(len(cells), count):
            column.repeat(first + i - len(cells))
        return problems

    def __len__(self) -> int:
        return len(self._places)

    def x(self, number: int) -> Any:
        """Return the x of a pair; an image is not decoded yet."""
        return self._item(self._x, number)

    def y(self, number: int) -> Any:
        """Return the y of a pair; an image is not decoded yet."""
        return self._item(self._y, number)

    def _item(self, column: Column, number: int) -> Any:
        # An image can be read even if the pair is bad for another reason; texts and vectors of bad pairs are empty.
        if number in self.known_bad and column.folder is None:
            raise BadSample(self.known_bad[number])
        return column[number]

    def items(self, side: Literal["x", "y"], numbers: np.ndarray) -> Sequence[Any] | np.ndarray:
        """Return one side of several pairs."""
        column = self._x if side == "x" else self._y
        if column.folder is not None:
            return super().items(side, numbers)
        for number in numbers.tolist() if self.known_bad else ():
            if number in self.known_bad:
                raise BadSample(self.known_bad[number])
        return column.items(numbers)

    def name(self, number: int) -> str:
        """Return the name of the pair's file, as written in the list; without a file the line or row."""
        return self._x.name(number) or self._y.name(number) or f"{self._place} {self._places[number]}"

    def item_name(self, side: Literal["x", "y"], number: int) -> str | None:
        """Return the name of the item's file, as written in the list; an x without a file has the pair's name."""
        return self._y.name(number) if side == "y" else self._x.name(number) or self.name(number)

    def file(self, side: Literal["x", "y"], number: int) -> Path | None:
        """Return the path of the file that holds an item; None if it is not in a file of its own."""
        column = self._x if side == "x" else self._y
        name = column.name(number)
        return column.folder.path / name if name and column.folder is not None else None

    def stamp(self) -> str:
        """Return a hash that changes when the size or modification time of a file behind the pairs does."""
        stamps = self._x.stamp(self.x_id) + self._y.stamp(self.y_id)
        return hashlib.sha256(stamps.encode()).hexdigest()


ColumnMaker = Callable[[str, str, Sequence[Any]], Column]  # kind, what, first cells


def open_listed(
    rows: Iterator[Row],
    path: Path,
    root: Path | None,
    allow_outside: bool,
    choice: Choice,
    keys: tuple[str | None, str | None],
    place: str = "line",
    kinds: tuple[str | None, str | None] = (None, None),
    makers: tuple[ColumnMaker, ColumnMaker] = (make_column, make_column),
) -> ListedPairs:
    """Recognize the modalities of two columns and return their pairs.

    Args:
        rows: as for `ListedPairs`.
        path: the list.
        root: the folder that names of files are relative to.
        allow_outside: read files outside of the root as well.
        choice: the settings of both sides.
        keys: the columns of x and y, if they have names.
        place: what the rows' places are: "line" or "row".
        kinds: the modalities, if the format knows them.
        makers: make the columns.

    """
    first = list(islice(rows, _PROBED))
    cells = [
        [(f"{place} {row[3]}", cell) for row in first for cell in split_cell(row[side]) if not is_empty(cell)]
        if makers[side] is make_column
        else []
        for side in (0, 1)
    ]
    sides = (choice.x, choice.y)
    x_kind, y_kind = (kinds[side] or recognize_kind(cells[side], keys[side], sides[side], path) for side in (0, 1))
    x_name, y_name = name_sides((x_kind, y_kind), keys, sides)
    x, y = (
        maker(kind, _what(kind, other, name), [cell for _, cell in own])
        for maker, kind, other, name, own in (
            (makers[0], x_kind, y_kind, x_name, cells[0]),
            (makers[1], y_kind, x_kind, y_name, cells[1]),
        )
    )
    return ListedPairs(chain(first, rows), x, y, path, root, allow_outside, x_name, y_name, *keys, place)


def name_sides(
    kinds: tuple[str, str], keys: tuple[str | None, str | None], sides: tuple[SideChoice, SideChoice]
) -> tuple[str, str]:
    """Return the names of both sides: as set, otherwise "image" and "text" for these two, otherwise the columns'."""
    if set(kinds) == {"image", "text"}:
        default: tuple[str, str] = kinds
    else:
        default = (_side_name(keys[0]) or "x", _side_name(keys[1]) or "y")
        if default[0] == default[1]:
            default = (f"{default[0]} x", f"{default[1]} y")
    return sides[0].name or default[0], sides[1].name or default[1]


def _side_name(column: str | None) -> str:
    """Return the name of a column as one short line; names come from the file and are printed to terminals."""
    return clean(printable(column or ""))[:_LONGEST_NAME]


def _what(kind: str, other: str, name: str) -> str:
    """Return what a cell is called in the reason of a bad sample."""
    if kind == "image":
        return "image"
    return "caption" if kind == "text" and other == "image" else name
