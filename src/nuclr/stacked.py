"""Matrices in several files, read as one matrix that need not fit into memory.

`Stacked` behaves like a memory-mapped array of the rows of all parts: `len`, `shape` and `dtype` are known without
reading, a slice is another `Stacked` that reads nothing, and a few rows are read with an array of row numbers or with
`numpy.asarray(stacked[start:stop])`. What is read is always a copy.

Parts are `.npy` files, or members of `.npz` files that are stored without compression. They are mapped when they are
needed, at most `MAPS` at a time, because each mapping holds a file descriptor. Pages that were read are given back
after `RESIDENT` bytes: otherwise the process would seem to need as much memory as the files have, and a limit on its
size would end it.
"""

import contextlib
import math
import mmap
import os
import struct
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from nuclr.errors import UserError, printable

MAPS = 256  # files that are mapped at a time
RESIDENT = 2**28  # bytes that may be read before their pages are given back
GATHERED = 2**16  # bytes that reading a single row may map: Linux maps the pages around it as well


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in a file.

    Attributes:
        source: the file, or an open temporary file.
        offset: of the first number, in bytes.
        shape: (rows, width).
        dtype: floating-point, in native byte order.

    """

    source: Path | IO[bytes]
    offset: int
    shape: tuple[int, int]
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        """The name of the file."""
        return str(self.source) if isinstance(self.source, Path) else "a temporary file"


def stored_npy(path: Path) -> StoredMatrix:
    """Return where the matrix of an untrusted `.npy` file lies, after checking its header.

    Args:
        path: the file.

    Raises:
        UserError: if the file cannot be read, or does not hold floating-point numbers (rows, width) row by row.

    """
    try:
        with path.open("rb") as file:
            return _read_header(path, file, 0, os.fstat(file.fileno()).st_size)
    except Exception as error:  # numpy raises many types for damaged files
        raise UserError(f"{path}: cannot be read as .npy with numbers ({_reason(error)})") from None


def stored_npz(path: Path, name: str) -> StoredMatrix | None:
    """Return where an array of an untrusted `.npz` file lies; None if it is compressed.

    Args:
        path: the file.
        name: the array.

    Raises:
        UserError: if the file cannot be read, or the array is missing or not a matrix as for `stored_npy`.

    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            names = [member.filename.removesuffix(".npy") for member in archive.infolist()]
            if name not in names:
                raise ValueError(f"no array named {name!r}; found: {', '.join(names[:20]) or 'nothing'}")
            member = archive.infolist()[names.index(name)]
            if member.compress_type != zipfile.ZIP_STORED:
                return None
            file.seek(member.header_offset)
            header = struct.unpack("<4s5H3I2H", file.read(30))
            if header[0] != b"PK\x03\x04" or header[2] & 1:
                raise ValueError(f"{name} is encrypted or damaged")
            # The name and the extra field follow the local header.
            return _read_header(path, file, member.header_offset + 30 + header[-2] + header[-1], member.file_size)
    except Exception as error:  # zipfile and numpy raise many types for damaged files
        raise UserError(f"{path}: cannot be read as .npz with numbers ({_reason(error)})") from None


def _read_header(path: Path, file: IO[bytes], start: int, size: int) -> StoredMatrix:
    """Read the header of an array of `size` bytes, header included, that starts at a position of the file."""
    file.seek(start)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, column_major, dtype = read_header(file)
    if len(shape) != 2 or dtype.kind != "f" or dtype.itemsize > 8 or not dtype.isnative:
        raise ValueError(f"{dtype} of shape {shape}; needs floating-point numbers (rows, width)")
    if column_major and min(shape) > 1:
        raise ValueError("stored column by column; save it with numpy.ascontiguousarray")
    if shape[0] < 0 or shape[1] < 1:
        raise ValueError(f"shape {shape}; needs at least one column")
    offset, end = file.seek(0, os.SEEK_CUR), file.seek(0, os.SEEK_END)
    if math.prod(shape) * dtype.itemsize > min(start + size, end) - offset:
        raise ValueError(f"truncated: shape {shape} of {dtype} does not fit into {size} bytes")
    return StoredMatrix(path, offset, (int(shape[0]), int(shape[1])), dtype)


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return printable(text.splitlines()[0][:200])


class Stacked:
    """The rows of several matrices in files, one after the other.

    Args:
        parts: the matrices, all of one width.

    Attributes:
        shape: (rows, width).
        dtype: of what is read; the widest of the parts.

    Raises:
        ValueError: if there is no part, or the widths differ.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     paths = [Path(folder, f"{part}.npy") for part in range(2)]
        ...     for part, path in enumerate(paths):
        ...         np.save(path, np.full((3, 2), part, "float16"))
        ...     stacked = Stacked([stored_npy(path) for path in paths])
        ...     stacked, np.asarray(stacked[2:4]).tolist(), stacked[[5, 0]].tolist()
        (Stacked(6 x 2, float16, 2 parts), [[0.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [0.0, 0.0]])

    """

    ndim = 2

    def __init__(self, parts: Sequence[StoredMatrix]) -> None:
        if not parts:
            raise ValueError("no matrices to stack")
        widths = {part.shape[1] for part in parts}
        if len(widths) > 1:
            raise ValueError(f"the widths of the parts differ: {', '.join(map(str, sorted(widths)))}")
        self.dtype = np.result_type(*(part.dtype for part in parts))
        self._parts = _Parts(parts)
        self._rows = range(int(self._parts.starts[-1]))

    def __repr__(self) -> str:
        """Return one line with the size."""
        return f"Stacked({self.shape[0]} x {self.shape[1]}, {self.dtype}, {len(self._parts.matrices)} parts)"

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    @property
    def parts(self) -> list[StoredMatrix]:
        """The matrices, also those of which a slice has no rows."""
        return self._parts.matrices

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, width)."""
        return len(self._rows), self._parts.matrices[0].shape[1]

    def __getitem__(self, rows: Any) -> Any:
        """Return a slice as another Stacked, which reads nothing; one row, (d,); or the rows of an array, (m, d)."""
        if isinstance(rows, slice):
            part = object.__new__(type(self))
            part.dtype, part._parts, part._rows = self.dtype, self._parts, self._rows[rows]
            return part
        index = np.asarray(rows)
        if index.dtype.kind not in "iu" and index.size:
            raise TypeError(f"rows are {index.dtype}; give a slice, a whole number or an array of whole numbers")
        if index.ndim == 0:
            return self[index[None]][0]
        index = index.astype(np.int64)
        index = np.where(index < 0, index + len(self), index)
        if index.size and (index.min() < 0 or index.max() >= len(self)):
            raise IndexError(f"row {rows!r} of {len(self)}")
        return self._parts.gather(self._rows.start + self._rows.step * index, self.dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Read all rows."""
        if copy is False:
            raise ValueError("rows in files cannot be read without a copy")
        rows, wanted = self._rows, np.dtype(self.dtype if dtype is None else dtype)
        if rows.step == 1:
            return self._parts.read(rows.start, rows.stop, wanted)
        return self._parts.gather(np.arange(rows.start, rows.stop, rows.step), wanted)


class _Parts:
    """The files of a Stacked and all its slices, and their mappings."""

    def __init__(self, matrices: Sequence[StoredMatrix]) -> None:
        self.matrices = list(matrices)
        self.starts = np.cumsum([0, *(matrix.shape[0] for matrix in matrices)])
        self._maps: OrderedDict[int, tuple[mmap.mmap, np.ndarray]] = OrderedDict()
        self._touched = 0
        self._lock = threading.Lock()

    def read(self, start: int, stop: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return rows start to stop, as a copy."""
        out = np.empty((max(stop - start, 0), self.matrices[0].shape[1]), dtype)
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        while start < stop:
            begin, end = int(self.starts[first]), int(self.starts[first + 1])
            last = min(stop, end)
            if last > start:
                target = out[len(out) - (stop - start) : len(out) - (stop - last)]
                with self._lock:
                    target[:] = self._map(first)[start - begin : last - begin]
                    self._release(target.nbytes)
            start, first = max(start, last), first + 1
        return out

    def gather(self, index: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        """Return the rows of an array of row numbers, as a copy."""
        out = np.empty((len(index), self.matrices[0].shape[1]), dtype)
        order = np.argsort(index, kind="stable")
        row = index[order]
        edges = np.searchsorted(row, self.starts)
        for part in np.flatnonzero(np.diff(edges)).tolist():
            chosen = slice(edges[part], edges[part + 1])
            with self._lock:
                out[order[chosen]] = self._map(part)[row[chosen] - self.starts[part]]
                self._release((chosen.stop - chosen.start) * GATHERED)
        return out

    def _map(self, part: int) -> np.ndarray:
        """Return the mapped matrix of a part."""
        if part in self._maps:
            self._maps.move_to_end(part)
            return self._maps[part][1]
        matrix = self.matrices[part]
        count = math.prod(matrix.shape)
        try:
            with contextlib.ExitStack() as stack:
                file = matrix.source
                if isinstance(file, Path):
                    file = stack.enter_context(file.open("rb"))
                length = matrix.offset + count * matrix.dtype.itemsize
                mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # the file has been removed or has become shorter
            raise UserError(f"{matrix.name}: cannot be read any more ({_reason(error)})") from None
        array = np.frombuffer(mapped, matrix.dtype, count, matrix.offset).reshape(matrix.shape)
        self._maps[part] = mapped, array
        if len(self._maps) > MAPS:
            self._maps.popitem(last=False)
        return array

    def _release(self, touched: int) -> None:
        """Give pages back once enough have been read. They stay in the system's cache of files."""
        self._touched += touched
        if self._touched > RESIDENT and hasattr(mmap, "MADV_DONTNEED"):
            for mapped, _ in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)
            self._touched = 0
