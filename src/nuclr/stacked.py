"""Matrices in several files, read as one matrix that need not fit into memory.

`Stacked` behaves like an array of the rows of all parts: `len`, `shape` and `dtype` are known without reading, a slice
is another `Stacked` that reads nothing, and rows are read with an array of row numbers or with
`numpy.asarray(stacked[start:stop])`. What is read is always a copy.

Parts are `.npy` files. A part is mapped only while its rows are copied, so the process holds neither file descriptors
nor pages of the files.
"""

import copy
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nuclr.errors import UserError, first_line
from nuclr.files import (
    ARRAYS,
    file_stamp,
    find_cache_folder,
    open_regular,
    read_npy_header,
    readable,
    write_atomically,
)


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in a file.

    Attributes:
        source: the file.
        offset: of the first number, in bytes.
        shape: (rows, width).
        dtype: floating-point, in native byte order.
        order: "C" if it is stored row by row, "F" if column by column, as numpy.memmap calls it.

    """

    source: Path
    offset: int
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    order: Literal["C", "F"] = "C"

    def map(self) -> np.ndarray:
        """Return the matrix, memory-mapped."""
        try:
            return np.memmap(
                self.source,
                self.dtype,
                "r",
                self.offset,
                self.shape,
                self.order,
            )
        except (OSError, ValueError) as error:  # the file has been removed or has become shorter
            raise UserError(f"{self.source}: cannot be read any more ({first_line(error)})") from None


def stored_npy(path: Path) -> StoredMatrix:
    """Return where the matrix of an untrusted `.npy` file lies, after checking its header.

    Args:
        path: the file.

    Raises:
        UserError: if the file cannot be read, or does not hold floating-point numbers (rows, width).

    """
    with readable(path, ARRAYS), open_regular(path) as file:
        shape, column_major, dtype = read_npy_header(file, path.stat().st_size)
        offset = file.tell()
    if len(shape) != 2 or dtype.kind != "f" or dtype.itemsize > 8 or not dtype.isnative or shape[1] < 1:
        raise UserError(f"{path}: {dtype} of shape {shape}; needs floating-point numbers (rows, width)")
    return StoredMatrix(path, offset, (shape[0], shape[1]), dtype, "F" if column_major else "C")


def stored_copy(path: Path, name: str, read: Callable[[], Iterator[np.ndarray]]) -> StoredMatrix | None:
    """Return where a copy of a matrix lies that cannot be mapped in its own file. It is written once.

    Args:
        path: the file.
        name: the array or column in it.
        read: yields the rows in order, in matrices; all are stored in the precision of the first one.

    Returns:
        The copy in the cache folder; None if there are no rows.

    Raises:
        UserError: if the rows differ in width, or there is no folder for the copy.

    """
    folder = find_cache_folder(path.parent)
    if folder is None:
        raise UserError(f"{path}: a copy of {name!r} cannot be written; set NUCLR_CACHE to a folder for it")
    key = json.dumps([str(path.absolute()), file_stamp(path), name])
    target = folder / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"
    if not target.is_file():
        matrices = read()
        first = next(matrices, None)
        if first is None:
            return None
        rows = 0
        dtype = first.dtype.newbyteorder("=")
        header = {"descr": dtype.str, "fortran_order": False, "shape": first.shape}
        with write_atomically(target, sync=False) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for matrix in itertools.chain([first], matrices):
                if matrix.shape[1] != first.shape[1]:
                    widths = f"{first.shape[1]} and {matrix.shape[1]}"
                    raise UserError(f"{path}: rows of {name!r} have {widths} numbers; needs one width for all rows")
                file.write(np.ascontiguousarray(matrix, dtype).data)
                rows += len(matrix)
            file.seek(0)  # a header has the same length for any number of rows
            np.lib.format.write_array_header_1_0(file, header | {"shape": (rows, first.shape[1])})
    return stored_npy(target)


class Stacked:
    """The rows of several matrices in files, one after the other.

    Args:
        parts: the matrices, all of one width.

    Attributes:
        parts: the matrices, also those of which a slice has no rows.
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
        widths = {part.shape[1]: part.source for part in parts}
        if len(widths) != 1:
            named = ", ".join(map(str, widths.values()))
            raise ValueError(f"widths of the parts: {sorted(widths)} ({named}); needs matrices of one width")
        self.parts = list(parts)
        self.dtype = np.result_type(*(part.dtype for part in parts))
        self._starts = np.cumsum([0, *(part.shape[0] for part in parts)])
        self._rows = range(int(self._starts[-1]))

    def __repr__(self) -> str:
        return f"Stacked({self.shape[0]} x {self.shape[1]}, {self.dtype}, {len(self.parts)} parts)"

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, width)."""
        return len(self._rows), self.parts[0].shape[1]

    def __getitem__(self, rows: Any) -> Any:
        """Return a slice as another Stacked, which reads nothing, or the rows of an array of row numbers, (m, d)."""
        if isinstance(rows, slice):
            consecutive = copy.copy(self)
            consecutive._rows = self._rows[rows]
            return consecutive
        index = np.asarray(rows)
        if index.size and (index.dtype.kind not in "iu" or index.min() < 0 or index.max() >= len(self)):
            raise IndexError(f"{rows!r} of {len(self)} rows; give a slice, or an array of row numbers")
        index = self._rows.start + self._rows.step * index.astype(np.int64)
        out = np.empty((len(index), self.shape[1]), self.dtype)
        order = np.argsort(index, kind="stable")
        edges = np.searchsorted(index[order], self._starts)
        for part in np.flatnonzero(np.diff(edges)).tolist():
            chosen = order[edges[part] : edges[part + 1]]
            out[chosen] = self.parts[part].map()[index[chosen] - self._starts[part]]
        return out

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Read all rows."""
        if copy is False:
            raise ValueError("rows in files cannot be read without a copy")
        if self._rows.step != 1:
            return np.asarray(self[np.arange(len(self))], dtype)
        out = np.empty(self.shape, self.dtype if dtype is None else dtype)
        for part, start in zip(self.parts, (self._starts[:-1] - self._rows.start).tolist(), strict=True):
            begin = max(start, 0)
            end = min(start + part.shape[0], len(self))
            if begin < end:
                out[begin:end] = part.map()[begin - start : end - start]
        return out
