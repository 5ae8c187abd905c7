"""Columns: one side of n pairs, stored compactly. A cell is appended per pair; an item is read by its number."""

import hashlib
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.modalities import Folder, Modality
from nuclr.data.modalities.base import WrongCellError, boundary, shorten
from nuclr.data.modalities.text import MAX_CHARACTERS, Texts, check_text, decode_text, digest, number_distinct
from nuclr.data.modalities.vector import check_vector, is_list_of_numbers
from nuclr.errors import BadSample, UserError

_PROBED = 100  # files by which the folder is recognized


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

    def items(self, numbers: np.ndarray) -> list[str]:
        """Return several texts."""
        return list(map(self._texts.__getitem__, self._stored[numbers].tolist()))

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

    def items(self, numbers: np.ndarray) -> list[Any]:
        """Return several items."""
        return [self._read(row) for row in self._stored[numbers].tolist()]

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
        names = [name for name in map(self.name, range(min(len(self), _PROBED))) if name]
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


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def split_cell(value: Any) -> Sequence[Any]:
    """Return the cells in a value: a list holds several, unless it is a list of numbers, which is one cell.

    An empty list holds one empty cell, so its row is reported as bad and not dropped silently.
    """
    if not isinstance(value, list) or is_list_of_numbers(value):
        return (value,)
    return value or (None,)
