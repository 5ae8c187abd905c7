"""Embedding files: pairs that some encoders have already turned into vectors.

A `.npz` or `.safetensors` file with `x` (N_x, d_x), `y` (N_y, d_y) and optionally `y_to_x` (N_y,), the number of the x
that each y belongs to; without it y_j belongs to x_j. Pair number j is (x[y_to_x[j]], y[j]).
"""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nuclr.errors import UserError

SUFFIXES = (".npz", ".safetensors")


@dataclass(frozen=True)
class Embeddings:
    """`x` (N_x, d_x) and `y` (N_y, d_y), finite, float32 or float64; `y_to_x` (N_y,), int64, in [0, N_x)."""

    x: Tensor
    y: Tensor
    y_to_x: Tensor


def read_embeddings(path: Path) -> Embeddings:
    """Read and check an embedding file; UserError names what is wrong and where."""
    arrays = _load(path)
    for key in ("x", "y"):
        if key not in arrays:
            found = ", ".join(sorted(arrays)) or "nothing"
            raise UserError(f"{path}: no array named {key!r}; needs x and y, and optionally y_to_x (found: {found})")
    x, y = (_features(path, key, arrays[key]) for key in ("x", "y"))
    if "y_to_x" in arrays:
        y_to_x = _links(path, arrays["y_to_x"], len(x), len(y))
    elif len(x) == len(y):
        y_to_x = torch.arange(len(y))
    else:
        raise UserError(f"{path}: x has {len(x)} rows and y {len(y)}; add y_to_x, the number of the x of each y")
    return Embeddings(x=x, y=y, y_to_x=y_to_x)


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


def unit_rows(features: Tensor, name: str) -> Tensor:
    """Rows scaled to unit norm; a row of zeros has no direction and is refused."""
    norms: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    _refuse_rows(f"{name}: row", norms.squeeze(1) == 0, "is all zeros and has no direction; remove it")
    return features / norms


def _load(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path}: {'a folder, not a file' if path.is_dir() else 'no such file'}")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: unknown kind of embedding file; allowed: {', '.join(SUFFIXES)}")
    return _load_npz(path) if path.suffix == ".npz" else _load_safetensors(path)


def _load_npz(path: Path) -> dict[str, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            # Other arrays may be of any kind, text among them: only ours are read.
            arrays = {key: archive[key] if key in ("x", "y", "y_to_x") else np.empty(0) for key in archive.files}
        return {key: torch.from_numpy(array) for key, array in arrays.items()}
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read as .npz with numeric arrays ({error})") from None


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        import safetensors
    except ImportError:
        raise UserError(f"{path}: reading it needs the safetensors package (pip install safetensors)") from None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is not a mapping)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as .safetensors ({error})") from None


def _features(path: Path, key: str, array: Tensor) -> Tensor:
    shape = tuple(array.shape)
    if not array.is_floating_point():
        raise UserError(f"{path}: {key} holds {_dtype(array)}; needs floating-point numbers")
    if array.ndim != 2 or shape[0] < 2 or shape[1] < 1:
        raise UserError(f"{path}: {key} has shape {shape}; needs (samples, width) with at least two samples")
    features = array if array.dtype == torch.float64 else array.float()
    _refuse_rows(f"{path}: {key} row", ~features.isfinite().all(dim=1), "holds a NaN or an infinity; mend or remove it")
    return features


def _links(path: Path, y_to_x: Tensor, n_x: int, n_y: int) -> Tensor:
    if y_to_x.is_floating_point() or y_to_x.is_complex() or y_to_x.dtype == torch.bool:
        raise UserError(f"{path}: y_to_x holds {_dtype(y_to_x)}; needs whole numbers")
    if tuple(y_to_x.shape) != (n_y,):
        raise UserError(f"{path}: y_to_x has shape {tuple(y_to_x.shape)}; needs ({n_y},), one number for each y")
    links = y_to_x.long()
    outside = ((links < 0) | (links >= n_x)).nonzero().flatten()
    if len(outside):
        row = int(outside[0])
        raise UserError(f"{path}: y_to_x[{row}] is {int(links[row])}; allowed: 0 to {n_x - 1}, the numbers of x")
    return links


def _refuse_rows(name: str, bad: Tensor, why: str) -> None:
    rows = bad.nonzero().flatten()
    if len(rows):
        more = f" ({len(rows)} such rows)" if len(rows) > 1 else ""
        raise UserError(f"{name} {int(rows[0])} {why}{more}")


def _dtype(array: Tensor) -> str:
    return str(array.dtype).removeprefix("torch.")
