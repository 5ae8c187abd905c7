"""Pairs of two columns: the common part of JSON lists, tables, Parquet files and datasets on disk.

A column is one side of n pairs, stored compactly. A cell is appended per pair; an item is read by its number. A row
has an x and a y, and each may be one cell or a list of cells:

- one x and k y (or the reverse): k pairs that share the x;
- k x and k y: k pairs x[i], y[i] in one group, whose x and y all belong together;
- k x and l y: max(k, l) pairs in one group; the shorter list is repeated.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nuclr.data.formats.choose import Request, recognize_modality
from nuclr.data.modalities import Folder, Modality, get_modality
from nuclr.data.modalities.base import WrongCellError, boundary, shorten
from nuclr.data.modalities.text import MAX_CHARACTERS, Texts, check_text, clean, decode_text, digest, number_distinct
from nuclr.data.modalities.vector import check_vector, is_empty, is_list_of_numbers
from nuclr.data.pairs import SIDES, Pairs, Side, SideName
from nuclr.errors import BadSample, UserError, first_line, printable

PROBED = 1000  # rows by which the modality of a column is recognized
_LONGEST_NAME = 60  # characters of a column's name that name its side
_PROBED_FILES = 100  # by which the folder is recognized


@dataclass(frozen=True)
class Heading:
    """What a column is called, and what it holds.

    Attributes:
        name: the name of its side.
        key: the name of the column; None if it has none.
        modality: what its items are.
        what: what a cell is called in the reason of a bad sample, such as "caption".

    """

    name: str
    key: str | None
    modality: Modality
    what: str


class Column(ABC):
    """One side of n pairs. A cell that several pairs of a row share is stored once.

    Args:
        heading: what the column is called, and what it holds.

    Attributes:
        bad: number of a pair -> why its cell is bad, as far as it is known without reading files.
        folder: where files that cells name are read from; None if cells do not name files.

    """

    folder: Folder | None = None

    def __init__(self, heading: Heading) -> None:
        self.heading = heading
        self.bad: dict[int, str] = {}
        self._rows = array("I")  # the stored cell of each pair

    def append(self, cell: Any) -> None:
        """Add the cell of the next pair.

        Raises:
            WrongCellError: if the column cannot hold such a cell.

        """
        row, problem = self._store(cell)
        if problem is not None:
            self.bad[len(self._rows)] = problem
        self._rows.append(row)

    def repeat(self, number: int) -> None:
        """Add the cell of pair `number` again, without storing its content again.

        If a row has one long text and a list of many cells, storing the text once per pair could fill the memory.
        """
        if number in self.bad:
            self.bad[len(self._rows)] = self.bad[number]
        self._rows.append(self._rows[number])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        """Return an item of the modality.

        Raises:
            BadSample: if it cannot be read.

        """
        return self._read(self._rows[number])

    def items(self, numbers: np.ndarray) -> Sequence[Any] | np.ndarray:
        """Return several items."""
        return [self._read(row) for row in self._stored[numbers].tolist()]

    def ids(self) -> np.ndarray:
        """Return the number of each distinct cell, (n,) int64, in order of first appearance."""
        return number_distinct(self._keys()[self._stored])

    @property
    def _stored(self) -> np.ndarray:
        return np.frombuffer(self._rows, np.uint32)

    @abstractmethod
    def fingerprint(self) -> bytes:
        """Return a hash of all cells, or bytes that determine it."""

    @abstractmethod
    def _store(self, cell: Any) -> tuple[int, str | None]:
        """Store a cell, and return its row and why it is bad."""

    @abstractmethod
    def _read(self, row: int) -> Any:
        """Return the item of a stored cell."""

    @abstractmethod
    def _keys(self) -> np.ndarray:
        """Return a key per stored cell, uint64, equal for equal cells."""

    def name(self, number: int) -> str | None:  # noqa: ARG002
        """Return the name of the file that a cell names, or None."""
        return None

    def locate(self, path: Path, root: Path | None, allow_outside: bool) -> None:  # noqa: B027
        """Find the folder that files are relative to, after all cells were added."""

    def stamp(self) -> str:
        """Return a hash that changes when the size or modification time of a file behind the cells does."""
        return ""


class TextColumn(Column):
    """Texts, with single spaces and without line breaks. Cells are texts, bytes that should be UTF-8, or None."""

    def __init__(self, heading: Heading) -> None:
        super().__init__(heading)
        self._texts: Any = Texts()

    def _store(self, cell: Any) -> tuple[int, str | None]:
        text, problem = check_text(cell, self.heading.what)
        self._texts.append(text)
        return len(self._texts) - 1, problem

    def _read(self, row: int) -> Any:
        return self._texts[row]

    def _keys(self) -> np.ndarray:
        return np.asarray(self._texts.keys())

    def fingerprint(self) -> bytes:
        """Return a hash of all texts, and of the pairs that share them."""
        shared = len(self._rows) > len(self._texts)
        return self._fingerprint(self._stored.astype(np.int64).tobytes() if shared else b"").encode()

    def _fingerprint(self, more: bytes) -> str:
        return str(self._texts.fingerprint(more))


class VectorColumn(Column):
    """Vectors of the width of the first one, float32. Cells are lists of numbers, arrays, or texts like "[0.5, 1]"."""

    def __init__(self, heading: Heading) -> None:
        super().__init__(heading)
        self._width = 0
        self._blob = bytearray()

    def _store(self, cell: Any) -> tuple[int, str | None]:
        try:
            vector = check_vector(cell, self.heading.what, self._width)
        except BadSample as bad:
            return 0, bad.reason  # nobody reads it
        self._width = len(vector)
        self._blob += vector.tobytes()
        return len(self._blob) // vector.nbytes - 1, None

    @property
    def _matrix(self) -> np.ndarray:
        return np.frombuffer(self._blob, np.float32).reshape(-1, self._width or 1)

    def _read(self, row: int) -> np.ndarray:
        return self._matrix[row].copy()

    def items(self, numbers: np.ndarray) -> np.ndarray:
        """Return vectors (b, d)."""
        return self._matrix[self._stored[numbers]]

    def ids(self) -> np.ndarray:
        """Return the number of each distinct vector; all bad cells have the same one."""
        keys = np.zeros(len(self), np.uint64)
        good = np.delete(np.arange(len(self)), list(self.bad))
        keys[good] = self._keys()[self._stored[good]]
        return number_distinct(keys)

    def _keys(self) -> np.ndarray:
        matrix = self._matrix
        return np.fromiter((digest(row.data) for row in matrix), np.uint64, len(matrix))

    def fingerprint(self) -> bytes:
        """Return a hash of all vectors."""
        hashed = hashlib.sha256(f"{self._width} ".encode())
        hashed.update(self._blob)
        hashed.update(self._rows)
        return hashed.hexdigest().encode()


class CellColumn(TextColumn):
    """Names of files, or other cells that a modality reads when they are needed: texts and lists of numbers.

    Names are relative to `root`, or to a folder in it that has the name of the list (`train/` for `train.jsonl`) or the
    name `images`. After these, the same folders next to the list are tried. A file outside of the root (of the list's
    folder, if it was found there) is a bad sample, unless `allow_outside` is True.
    """

    def __init__(self, heading: Heading) -> None:
        super().__init__(heading)
        self._are_numbers = bytearray()  # 1 for cells that are stored as float64 numbers

    def _store(self, cell: Any) -> tuple[int, str | None]:
        modality = self.heading.modality
        what = self.heading.what
        cell, problem = decode_text("" if cell is None else cell, f"{what} name")
        are_numbers = is_list_of_numbers(cell) and not modality.in_files
        if are_numbers:
            try:
                content = np.asarray(cell, np.float64).tobytes()
            except (TypeError, ValueError, OverflowError):
                problem = f"{what} is not a list of numbers"
                content = b""
        elif not isinstance(cell, str):
            needs = "a text" if modality.in_files else "a text or a list of numbers"
            raise WrongCellError(f"{what} is {shorten(cell)}; needs {needs}")
        elif len(cell) > MAX_CHARACTERS:
            problem = f"{what} name of {len(cell):,} characters; at most {MAX_CHARACTERS:,} are allowed"
            content = b""
        else:
            content = cell.encode("utf-8", "surrogatepass")
        self._texts.append_bytes(content)
        self._are_numbers.append(are_numbers)
        return len(self._are_numbers) - 1, problem or (None if content else f"no {what}")

    def _read(self, row: int) -> Any:
        cell = np.frombuffer(self._texts.get_bytes(row)) if self._are_numbers[row] else self._texts[row]
        if not len(cell):
            raise BadSample(f"no {self.heading.what}")
        return read_item(self.heading.modality, cell, self.folder)

    def name(self, number: int) -> str | None:
        """Return the name, as written in the list."""
        row = self._rows[number]
        return None if self._are_numbers[row] else self._texts[row]

    def stamp(self) -> str:
        """Return a hash that changes when the size or modification time of a file does."""
        folder = self.folder or Folder(Path(), None)
        hashed = hashlib.sha256(f"{folder.path.absolute()} {folder.inside}".encode("utf-8", "surrogateescape"))
        _, first = np.unique(self._keys(), return_index=True)
        for row in np.sort(first).tolist():
            if self._are_numbers[row]:
                continue
            try:
                status = os.stat(folder.path / self._texts[row])  # noqa: PTH116 (faster, for millions of files)
                hashed.update(b"%d,%d;" % (status.st_size, status.st_mtime_ns))
            except (OSError, ValueError):
                hashed.update(b"missing;")
        return hashed.hexdigest()

    def locate(
        self,
        path: Path,
        root: Path | None,
        allow_outside: bool,
    ) -> None:
        """Find the folder that holds most of the first files; a tie goes to the first folder.

        Raises:
            UserError: if none of the first files exists, and the modality is always in files.

        """
        tops = [path.parent] if root is None else [root, path.parent]
        names = [name for name in map(self.name, range(min(len(self), _PROBED_FILES))) if name]
        best = -1
        for top in tops:
            for folder in (top, top / path.stem, top / "images"):
                count = sum(os.path.isfile(folder / name) for name in names)  # noqa: PTH113 (False for any name)
                if count > best:
                    best = count
                    self.folder = Folder(folder, boundary(top, allow_outside))
        if self.heading.modality.in_files and names and not best:
            raise UserError(
                f"{path}: none of its first {self.heading.modality.name}s exists, for example {tops[0] / names[0]}; "
                "set data.root to the folder that their names are relative to"
            )


def make_column(heading: Heading) -> Column:
    """Return an empty column in memory."""
    columns = {"text": TextColumn, "vector": VectorColumn}
    return columns.get(heading.modality.name, CellColumn)(heading)


# -- cells -------------------------------------------------------------------------------------------------------------


def read_item(
    modality: Modality,
    cell: Any,
    folder: Folder | None,
) -> Any:
    """Return the item of a cell.

    Raises:
        BadSample: if it cannot be read. An exception that the modality of a plugin raises is assumed to come from a
            damaged file.

    """
    try:
        return modality.read(cell, folder or Folder(Path(), boundary(Path(), allow_outside=False)))
    except BadSample:
        raise
    except Exception as error:
        raise BadSample(f"cannot be read ({type(error).__name__}: {first_line(error)})") from None


def split_cell(value: Any) -> Sequence[Any]:
    """Return the cells in a value: a list holds several, unless it is a list of numbers, which is one cell.

    An empty list holds one empty cell, so its row is reported as bad and not dropped silently.
    """
    if not isinstance(value, list) or is_list_of_numbers(value):
        return (value,)
    return value or (None,)


# -- pairs -------------------------------------------------------------------------------------------------------------


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
            self.sides[name] = Side(
                heading.name,
                heading.key,
                heading.modality,
                column.ids(),
            )
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

    def identity(self, side: SideName, number: int) -> str | None:
        """Return the path of the file that holds an item, or its text."""
        column = self._columns[side]
        name = column.name(number)
        if name and column.folder is not None:
            return str((column.folder.path / name).absolute())
        return super().identity(side, number)

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
            modalities[side] = recognize_modality(
                values,
                keys[side],
                side,
                request,
            )
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
