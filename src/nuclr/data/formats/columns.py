"""Columns: one side of n pairs, stored compactly. A cell is appended per pair; an item is read by its number."""

import hashlib
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.modalities import Folder, get_modality
from nuclr.data.modalities.base import boundary
from nuclr.data.modalities.vector import is_list_of_numbers, parse_vector
from nuclr.data.pairs import BadSample
from nuclr.data.texts import MAX_CHARACTERS, Texts, clean, digest, number_distinct, text_problem
from nuclr.errors import UserError

_PROBED = 100  # files by which the folder is recognized


class WrongCellError(Exception):
    """A cell of a type that the column cannot hold. Its argument says what the column needs."""


class Column(ABC):
    """One side of n pairs.

    Attributes:
        kind: the name of the modality.
        folder: where files that cells name are read from; None if cells do not name files.

    """

    kind: str
    folder: Folder | None = None

    @abstractmethod
    def append(self, cell: Any) -> str | None:
        """Add the cell of the next pair and return why it is bad, or None if it is not known to be bad.

        Raises:
            WrongCellError: if the column cannot hold such a cell.

        """

    @abstractmethod
    def repeat(self, number: int) -> None:
        """Add the cell of pair `number` again, without storing its content again.

        If a row has one long text and a list of many cells, storing the text once per pair could fill the memory.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of cells."""

    @abstractmethod
    def __getitem__(self, number: int) -> Any:
        """Return an item of the modality.

        Raises:
            BadSample: if it cannot be read.

        """

    @abstractmethod
    def ids(self) -> np.ndarray:
        """Return the number of each distinct cell, (n,) int64, in order of first appearance."""

    @abstractmethod
    def fingerprint(self) -> bytes:
        """Return a hash of all cells, or bytes that determine it."""

    def name(self, number: int) -> str | None:  # noqa: ARG002
        """Return the name of the file that a cell names, or None."""
        return None

    def items(self, numbers: np.ndarray) -> Sequence[Any] | np.ndarray:
        """Return several items."""
        return [self[number] for number in numbers.tolist()]

    def locate(self, path: Path, root: Path | None, allow_outside: bool) -> None:  # noqa: B027
        """Find the folder that files are relative to, after all cells were added."""

    def stamp(self, ids: np.ndarray) -> str:  # noqa: ARG002
        """Return a hash that changes when the size or modification time of a file behind the cells does."""
        return ""


class TextColumn(Column):
    """Texts, with single spaces and without line breaks.

    Args:
        what: what a text is called in the reason of a bad sample, such as "answer".

    """

    kind = "text"

    def __init__(self, what: str) -> None:
        self._what, self._texts = what, Texts()

    def append(self, cell: Any) -> str | None:
        """Add a text, bytes that should be UTF-8, or None."""
        text, problem = decode_text("" if cell is None else cell, self._what)
        if not isinstance(text, str):
            raise WrongCellError("a text")
        problem = problem or text_problem(text, self._what)
        self._texts.append("" if problem else clean(text))
        return problem

    def repeat(self, number: int) -> None:
        """Add the text of pair `number` again."""
        self._texts.repeat(number)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, number: int) -> str:
        return self._texts[number]

    def ids(self) -> np.ndarray:
        """Return the number of each distinct text."""
        return self._texts.ids()

    def fingerprint(self) -> bytes:
        """Return a hash of all texts."""
        return self._texts.fingerprint().encode()


class VectorColumn(Column):
    """Vectors of one width, float32.

    Args:
        what: what a vector is called in the reason of a bad sample.
        width: the number of numbers; vectors of another width are bad samples.

    """

    kind = "vector"

    def __init__(self, what: str, width: int) -> None:
        self._what, self._width = what, width
        self._blob, self._rows = bytearray(), array("q")
        self._zeros = -1  # the stored vector of all bad cells; -1 until there is one

    def append(self, cell: Any) -> str | None:
        """Add a list of numbers, an array, a text such as "[0.5, 1]", or None."""
        try:
            row = self._store(self._parse(cell))
        except BadSample as bad:
            # Zeros for every bad cell would let one wide vector and many empty cells fill the memory.
            row = self._zeros = self._zeros if self._zeros >= 0 else self._store(np.zeros(self._width, np.float32))
            self._rows.append(row)
            return bad.reason
        self._rows.append(row)
        return None

    def repeat(self, number: int) -> None:
        """Add the vector of pair `number` again."""
        self._rows.append(self._rows[number])

    def _store(self, vector: np.ndarray) -> int:
        """Store a vector and return its row."""
        self._blob += vector.tobytes()
        return len(self._blob) // (4 * self._width) - 1

    def _parse(self, cell: Any) -> np.ndarray:
        if cell is None or (isinstance(cell, str) and not cell.strip()):
            raise BadSample(f"no {self._what}")
        try:
            vector = parse_vector(cell)
        except BadSample as bad:
            raise BadSample(f"{self._what} is {bad.reason}") from None
        if len(vector) != self._width:
            raise BadSample(f"{self._what} has {len(vector)} numbers; the first rows have {self._width}")
        if not np.isfinite(vector).all():
            raise BadSample(f"{self._what} holds a NaN or an infinity")
        return vector

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def _matrix(self) -> np.ndarray:
        return np.frombuffer(self._blob, np.float32).reshape(-1, self._width)

    def __getitem__(self, number: int) -> np.ndarray:
        return self._matrix[self._rows[number]].copy()

    def items(self, numbers: np.ndarray) -> np.ndarray:
        """Return vectors (b, d)."""
        return self._matrix[np.frombuffer(self._rows, np.int64)[numbers]]

    def ids(self) -> np.ndarray:
        """Return the number of each distinct vector."""
        matrix = self._matrix
        keys = np.fromiter((digest(row.data) for row in matrix), np.uint64, len(matrix))
        return number_distinct(keys[np.frombuffer(self._rows, np.int64)])

    def fingerprint(self) -> bytes:
        """Return a hash of all vectors."""
        hashed = hashlib.sha256(f"{self._width} ".encode())
        hashed.update(self._blob)
        hashed.update(self._rows)
        return hashed.hexdigest().encode()


class CellColumn(Column):
    """Names of files, or other cells that a modality reads when they are needed: texts and lists of numbers.

    Names are relative to `root`, or to a folder in it that has the name of the list (`train/` for `train.jsonl`) or the
    name `images`. After these, the same folders next to the list are tried. A file outside of the root (of the list's
    folder, if it was found there) is a bad sample, unless `allow_outside` is True.

    Args:
        kind: the modality.
        what: what a cell is called in the reason of a bad sample.

    """

    def __init__(self, kind: str, what: str) -> None:
        self.kind, self._what = kind, what
        self._cells = Texts()
        self._are_numbers = bytearray()  # 1 for cells that are stored as float64 numbers

    def append(self, cell: Any) -> str | None:
        """Add a name or another text, a list of numbers, or None."""
        cell, problem = decode_text("" if cell is None else cell, f"{self._what} name")
        numbers = self.kind != "image" and is_list_of_numbers(cell)
        if not numbers and not isinstance(cell, str):
            raise WrongCellError("a text" if self.kind == "image" else "a text or a list of numbers")
        if numbers:
            try:
                self._cells.append_bytes(np.asarray(cell, np.float64).tobytes())
            except (TypeError, ValueError, OverflowError):
                numbers, problem = False, f"{self._what} is not a list of numbers"
                self._cells.append("")
        else:
            if len(cell) > MAX_CHARACTERS:
                problem = f"{self._what} name of {len(cell):,} characters; at most {MAX_CHARACTERS:,} are allowed"
                cell = ""
            self._cells.append(cell)
        self._are_numbers.append(numbers)
        return problem or (None if numbers or cell else self._nothing)

    def repeat(self, number: int) -> None:
        """Add the cell of pair `number` again."""
        self._cells.repeat(number)
        self._are_numbers.append(self._are_numbers[number])

    @property
    def _nothing(self) -> str:
        return "no image named" if self.kind == "image" else f"no {self._what}"

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, number: int) -> Any:
        if self._are_numbers[number]:
            return read_cell(self.kind, np.frombuffer(self._cells.get_bytes(number), np.float64), self.folder)
        name = self._cells[number]
        if not name:
            raise BadSample(self._nothing)
        return read_cell(self.kind, name, self.folder)

    def ids(self) -> np.ndarray:
        """Return the number of each distinct cell."""
        return self._cells.ids()

    def fingerprint(self) -> bytes:
        """Return a hash of all cells."""
        return self._cells.fingerprint().encode()

    def name(self, number: int) -> str | None:
        """Return the name, as written in the list."""
        return None if self._are_numbers[number] else self._cells[number]

    def stamp(self, ids: np.ndarray) -> str:
        """Return a hash that changes when the size or modification time of a file does."""
        folder = self.folder or Folder(Path(), None)
        hashed = hashlib.sha256(f"{folder.path.absolute()} {folder.inside}".encode("utf-8", "surrogateescape"))
        _, first = np.unique(ids, return_index=True)
        for number in first.tolist():
            if self._are_numbers[number]:
                continue
            try:
                status = os.stat(folder.path / self._cells[number])  # noqa: PTH116 (faster, for millions of files)
                hashed.update(b"%d,%d;" % (status.st_size, status.st_mtime_ns))
            except (OSError, ValueError):
                hashed.update(b"missing;")
        return hashed.hexdigest()

    def locate(self, path: Path, root: Path | None, allow_outside: bool) -> None:
        """Find the folder that holds most of the first files; a tie goes to the first folder.

        Raises:
            UserError: if none of the first images exists.

        """
        tops = [path.parent] if root is None else [root, path.parent]
        candidates = [(folder, top) for top in tops for folder in (top, top / path.stem, top / "images")]
        names = [name for name in map(self.name, range(min(len(self), _PROBED))) if name]
        # Path.is_file would raise an error for names that are too long.
        counts = [sum(_is_file(folder / name) for name in names) for folder, _ in candidates]
        if self.kind == "image" and names and not any(counts):
            raise UserError(
                f"{path}: none of its first images exists, for example {candidates[0][0] / names[0]}; "
                "set data.root to the folder that their names are relative to"
            )
        folder, top = candidates[counts.index(max(counts))]
        self.folder = Folder(folder, boundary(top, allow_outside))


def _is_file(path: Path) -> bool:
    try:
        return os.path.isfile(path)  # noqa: PTH113
    except ValueError:
        return False


def read_cell(kind: str, cell: Any, folder: Folder | None) -> Any:
    """Return the item of a cell.

    Raises:
        BadSample: if it cannot be read. An exception that a plugin's modality raises is assumed to come from a damaged
            file and is converted to a BadSample.

    """
    folder = folder or Folder(Path(), boundary(Path(), allow_outside=False))
    if kind == "image":
        return get_modality(kind).read(cell, folder)
    try:
        return get_modality(kind).read(cell, folder)
    except BadSample:
        raise
    except Exception as error:
        raise BadSample(f"cannot be read ({type(error).__name__}: {first_line(error)})") from None


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def decode_text(cell: Any, what: str) -> tuple[Any, str | None]:
    """Decode a cell of bytes as UTF-8; cells of other types are returned unchanged.

    Returns:
        The cell and None. If the bytes are not UTF-8, the text with invalid bytes replaced, and why it cannot be used.

    """
    if not isinstance(cell, bytes):
        return cell, None
    try:
        return cell.decode(), None
    except UnicodeDecodeError:
        return cell.decode(errors="replace"), f"{what} is not UTF-8 text"


def make_column(kind: str, what: str, cells: Sequence[Any]) -> Column:
    """Return an empty column of a modality.

    Args:
        kind: the modality.
        what: what a cell is called in the reason of a bad sample.
        cells: the first cells, by which the width of vectors is found.

    """
    if kind == "text":
        return TextColumn(what)
    if kind == "vector":
        return VectorColumn(what, _common_width(cells))
    return CellColumn(kind, what)


def _common_width(cells: Sequence[Any]) -> int:
    widths = []
    for cell in cells:
        try:
            widths.append(len(parse_vector(cell)))
        except BadSample:
            continue
    return max(set(widths), key=widths.count) if widths else 1


def split_cell(value: Any) -> Sequence[Any]:
    """Return the cells in a value: a list holds several, unless it is a list of numbers, which is one cell.

    An empty list holds one empty cell, so its row is reported as bad and not dropped silently.
    """
    if not isinstance(value, list) or is_list_of_numbers(value):
        return (value,)
    return value or (None,)


def is_empty(cell: Any) -> bool:
    """Return whether a cell is missing or an empty text."""
    return cell is None or (isinstance(cell, str | bytes) and not cell.strip())
