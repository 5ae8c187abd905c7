"""Pairs of precomputed vectors, from an embedding file."""

import hashlib
from pathlib import Path

import numpy as np

from nuclr.data.formats.embeddings import read_embeddings


class VectorPairs:
    """Pair j is (x[y_to_x[j]], y[j]); y_id is j itself: equal vectors do not tell whether the captions were."""

    x_kind = "vector"
    y_kind = "vector"

    def __init__(self, path: Path) -> None:
        found = read_embeddings(path)
        self._x, self._y, self.x_id = found.x.numpy(), found.y.numpy(), found.y_to_x.numpy()
        self.y_id = np.arange(len(self._y))
        self._name = path.name
        hashed = hashlib.sha256()
        for array in (self._x, self._y, self.x_id):
            hashed.update(str(array.shape).encode())
            hashed.update(np.ascontiguousarray(array).data)
        self.fingerprint = hashed.hexdigest()

    def __len__(self) -> int:
        return len(self._y)

    def x(self, number: int) -> np.ndarray:
        """The row of x that belongs to this pair, (d_x,)."""
        return np.asarray(self._x[self.x_id[number]])

    def y(self, number: int) -> np.ndarray:
        """Row `number` of y, (d_y,)."""
        return np.asarray(self._y[number])

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All x (b, d_x) and y (b, d_y) of these pairs at once."""
        return self._x[self.x_id[numbers]], self._y[numbers]

    def name(self, number: int) -> str:
        """The file and the row of x."""
        return f"{self._name}, x row {self.x_id[number]}"
