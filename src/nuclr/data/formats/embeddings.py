"""Pairs of vectors that encoders have already computed: embedding files, and folders of clip-retrieval.

An embedding file is a `.npz` or `.safetensors` file with `x` (n_x, d_x), `y` (n_y, d_y) and optionally `y_to_x` (n_y,),
the row of x that each row of y belongs to: pair j is (x[y_to_x[j]], y[j]). Without it, row j belongs to row j.

A folder of clip-retrieval has the embeddings of images in `img_emb/*.npy` and of their texts in `text_emb/*.npy`. Row j
of all parts, in the order of their names, is pair j. Its embeddings are not read when it is opened (`nuclr.stacked`).
Vectors may have any norm.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.modalities import get_modality
from nuclr.data.pairs import SIDES, Pairs, Side, SideName
from nuclr.data.vectors import checked_rows, open_sides, pair_rows
from nuclr.errors import UserError
from nuclr.stacked import Stacked

_SAMPLED = 1024  # rows in the fingerprint of a folder


class VectorPairs(Pairs):
    """Pairs of an embedding file or folder: pair j is (x[y_to_x[j]], y[j]).

    The id of y is j: equal vectors do not imply equal texts.

    Args:
        path: the embedding file, which is read into memory, or the folder, whose rows are read when they are needed.

    Raises:
        UserError: if the file cannot be read or an array is missing, has a wrong type or shape, or is not finite.

    """

    def __init__(self, path: Path) -> None:
        x, y = open_sides(str(path))
        y_to_x = pair_rows(x, y)
        vector = get_modality("vector")
        self.sides = {}
        self._rows: dict[SideName, Any] = {}
        hashed = hashlib.sha256()
        for side, vectors in zip(SIDES, (x, y), strict=True):
            rows = checked_rows(vectors.name, vectors.rows, "any")
            if len(vectors) < 2:
                raise UserError(f"{vectors.name}: {len(vectors)} row; needs at least two samples")
            self._rows[side] = vectors.rows if path.is_dir() else np.asarray(rows[:])
            ids = y_to_x if side == "x" else np.arange(len(vectors))
            self.sides[side] = Side(side, None, vector, ids)
            _hash_rows(hashed, self._rows[side])
        if not path.is_dir():
            _hash_rows(hashed, y_to_x)
        self.label = path.name
        self.fingerprint = hashed.hexdigest()

    def __len__(self) -> int:
        return len(self._rows["y"])

    def item(self, side: SideName, number: int) -> np.ndarray:
        """Return a row of x, (d_x,), or of y, (d_y,)."""
        return np.asarray(self.items(side, np.array([number]))[0])

    def items(self, side: SideName, numbers: np.ndarray) -> np.ndarray:
        """Return the x (b, d_x) or the y (b, d_y) of several pairs."""
        rows = np.asarray(self._rows[side][self.sides[side].ids[numbers]])
        return rows.astype(np.float32) if rows.dtype == np.float16 else rows

    def name(self, number: int) -> str:
        """Return the file and the row of x."""
        return f"{self.label}, x row {self.sides['x'].ids[number]}"


def _hash_rows(hashed: Any, rows: Any) -> None:
    """Add an array, or some rows of arrays in files, to a hash."""
    if isinstance(rows, Stacked):
        hashed.update(f"{rows.shape} {rows.dtype}".encode())
        rows = rows[np.linspace(0, len(rows) - 1, min(_SAMPLED, len(rows))).astype(np.int64)]
    else:
        hashed.update(str(rows.shape).encode())
    hashed.update(np.ascontiguousarray(rows).data)
