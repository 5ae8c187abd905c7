"""Pairs of two columns: the common part of JSON lists, tables, Parquet files and datasets on disk.

A row has an x and a y, and each may be one cell or a list of cells:

- one x and k y (or the reverse): k pairs that share the x;
- k x and k y: k pairs x[i], y[i] in one group, whose x and y all belong together;
- k x and l y: max(k, l) pairs in one group; the shorter list is repeated.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nuclr.data.formats.choose import Request, recognize_modality
from nuclr.data.formats.columns import Column, Heading, make_column, split_cell
from nuclr.data.modalities import get_modality
from nuclr.data.modalities.base import WrongCellError
from nuclr.data.modalities.text import clean
from nuclr.data.modalities.vector import is_empty
from nuclr.data.pairs import SIDES, BadSample, Pairs, Side, SideName
from nuclr.errors import UserError, printable

PROBED = 1000  # rows by which the modality of a column is recognized
_LONGEST_NAME = 60  # characters of a column's name that name its side


class Row(NamedTuple):
    """One row of a list.

    Attributes:
        x: the cell of x, or a list of cells.
        y: the same for y.
        place: the number of the line or row, for messages.
        problem: why the row is bad; None if it is not known to be bad.

    """

    x: Any
    y: Any
    place: int
    problem: str | None = None


class ListedPairs(Pairs):
    """Pairs of two columns of any modalities.

    Args:
        request: the list, the folder that names of files are relative to, and whether they may leave it. A name leaves
            the folder if it is absolute, contains `..`, or leads through a symbolic link.
        columns: the two sides. Columns that hold cells already are complete, and there are no rows to add.
        rows: the rows, in the order of the list.
        place: what the rows' places are: "line" or "row".

    Raises:
        UserError: if there are no rows, a cell has a wrong type, or none of the first images exists.

    """

    def __init__(
        self,
        request: Request,
        columns: Mapping[SideName, Column],
        rows: Iterable[Row],
        place: str = "line",
    ) -> None:
        self.label = request.path.name or str(request.path)
        self._columns = columns
        self._place = place
        self._places = array("q", range(len(columns["x"])))
        bad = self._add_rows(rows, request.path)
        self.known_bad = dict(sorted((columns["y"].bad | columns["x"].bad | bad).items()))
        if not len(self):
            raise UserError(f"{request.path}: holds no pairs")
        self.sides = {}
        hashed = hashlib.sha256()
        for name, column in columns.items():
            heading = column.heading
            self.sides[name] = Side(heading.name, heading.key, heading.modality, column.ids())
            hashed.update(column.fingerprint())
            column.locate(request.path, request.root, request.allow_outside)
        if self.group is not None:
            hashed.update(self.group.tobytes())
        self.fingerprint = hashed.hexdigest()
        folders = [column.folder.path for column in columns.values() if column.folder is not None]
        self.folder = folders[0] if folders else request.path.parent

    def _add_rows(self, rows: Iterable[Row], path: Path) -> dict[int, str]:
        """Add the cells of the rows to the columns, and return number -> reason for bad rows."""
        x = self._columns["x"]
        y = self._columns["y"]
        bad: dict[int, str] = {}
        begins = bytearray()  # 1 for the first pair of a row
        grouped = False
        row = None
        try:
            for row in rows:
                first = len(self._places)
                cells = (split_cell(row.x), split_cell(row.y))
                # k x and m y in one row give max(k, m) pairs; the shorter list repeats.
                for column, own, others in ((x, cells[0], cells[1]), (y, cells[1], cells[0])):
                    for cell in own:
                        column.append(cell)
                    for pair in range(len(others) - len(own)):
                        column.repeat(first + pair)
                grouped = grouped or (len(cells[0]) > 1 and len(cells[1]) > 1)
                begins.append(1)
                self._places.append(row.place)
                for _ in range(first + 1, len(x)):
                    begins.append(0)
                    self._places.append(row.place)
                if row.problem is not None:
                    bad |= dict.fromkeys(range(first, len(x)), row.problem)
        except WrongCellError as error:
            raise UserError(f"{path}, {self._place} {row.place if row else 0}: {error}") from None
        if grouped:
            self.group = np.cumsum(np.frombuffer(begins, np.uint8), dtype=np.int64) - 1
        return bad

    def __len__(self) -> int:
        return len(self._places)

    def item(self, side: SideName, number: int) -> Any:
        """Return one item of a pair; an image is not decoded yet."""
        column = self._columns[side]
        # An image can be read even if the pair is bad for another reason; texts and vectors of bad pairs are empty.
        if number in self.known_bad and column.folder is None:
            raise BadSample(self.known_bad[number])
        return column[number]

    def items(self, side: SideName, numbers: np.ndarray) -> Sequence[Any] | np.ndarray:
        """Return one side of several pairs."""
        column = self._columns[side]
        if column.folder is None:
            for number in numbers.tolist() if self.known_bad else ():
                if number in self.known_bad:
                    raise BadSample(self.known_bad[number])
        return column.items(numbers)

    def name(self, number: int) -> str:
        """Return the name of the pair's file, as written in the list; without a file the line or row."""
        names = (column.name(number) for column in self._columns.values())
        return next(filter(None, names), f"{self._place} {self._places[number]}")

    def item_name(self, side: SideName, number: int) -> str | None:
        """Return the name of the item's file, as written in the list; an x without a file has the pair's name."""
        own = self._columns[side].name(number)
        return own if side == "y" else own or self.name(number)

    def file(self, side: SideName, number: int) -> Path | None:
        """Return the path of the file that holds an item; None if it is not in a file of its own."""
        column = self._columns[side]
        name = column.name(number)
        return column.folder.path / name if name and column.folder is not None else None

    def stamp(self) -> str:
        """Return a hash that changes when the size or modification time of a file behind the pairs does."""
        return hashlib.sha256("".join(column.stamp() for column in self._columns.values()).encode()).hexdigest()


def open_listed(
    request: Request,
    keys: Mapping[SideName, str | None],
    rows: Iterator[Row],
    known: Mapping[SideName, str] | None = None,
) -> ListedPairs:
    """Recognize the modalities of two columns from their first rows, and return their pairs.

    Args:
        request: what is asked for.
        keys: the columns of x and y, if they have names.
        rows: as for `ListedPairs`; their places are lines.
        known: the modalities, if the format knows them.

    """
    first = list(islice(rows, PROBED))
    cells: dict[SideName, list[Any]] = {"x": [], "y": []}
    for row in first:
        cells["x"] += split_cell(row.x)
        cells["y"] += split_cell(row.y)
    headings = head_columns(request, keys, cells, known or {})
    columns = {side: make_column(heading) for side, heading in headings.items()}
    return ListedPairs(request, columns, chain(first, rows))


def head_columns(
    request: Request,
    keys: Mapping[SideName, str | None],
    cells: Mapping[SideName, Sequence[Any]],
    known: Mapping[SideName, str],
) -> dict[SideName, Heading]:
    """Return the headings of both columns.

    Sides are called as set, otherwise "image" and "text" if they hold these two, otherwise as the columns.

    Args:
        request: what is asked for.
        keys: the columns of x and y, if they have names.
        cells: the first cells, by which a modality is recognized that is not known.
        known: the modalities, if the format knows them.

    """
    modalities = {}
    for side in SIDES:
        if side in known:
            modalities[side] = get_modality(known[side])
        else:
            values = [cell for cell in cells[side] if not is_empty(cell)]
            modalities[side] = recognize_modality(values, keys[side], side, request)
    names = {side: modality.name for side, modality in modalities.items()}
    if set(names.values()) != {"image", "text"}:
        # Names of columns come from the file and are printed to terminals: one short line.
        names = {side: clean(printable(keys[side] or ""))[:_LONGEST_NAME] or side for side in SIDES}
        if names["x"] == names["y"]:
            names = {side: f"{name} {side}" for side, name in names.items()}
    with_images = any(modality.in_files for modality in modalities.values())
    headings: dict[SideName, Heading] = {}
    for side, modality in modalities.items():
        name = request.sides[side].name or names[side]
        what = modality.name if modality.in_files else name
        if with_images and modality.name == "text":
            what = "caption"
        headings[side] = Heading(name, keys[side], modality, what)
    return headings
