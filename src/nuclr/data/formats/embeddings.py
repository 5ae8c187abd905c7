"""Embedding files: pairs of vectors that encoders have already computed.

A `.npz` or `.safetensors` file with `x` (n_x, d_x), `y` (n_y, d_y) and optionally `y_to_x` (n_y,), the row of x that
each row of y belongs to. Without it, row j of y belongs to row j of x. Pair number j is (x[y_to_x[j]], y[j]).

Vectors may have any norm: files are read as they are, and `unit_rows` scales rows to unit norm for code that needs it,
such as objectives and the popularity solver.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors
import torch
from torch import Tensor

from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.files import read_npz
from nuclr.norms import rescale_extreme_rows
from nuclr.remote import is_url, local_copy, show_urls
from nuclr.stacked import Stacked

SUFFIXES = (".npz", ".safetensors")


@dataclass(frozen=True, repr=False)
class Embeddings:
    """The content of an embedding file.

    Attributes:
        x: (n_x, d_x), finite, float32 or float64, of any norm; Stacked if it is read in parts.
        y: (n_y, d_y), the same.
        y_to_x: (n_y,) int64, in [0, n_x): the row of x that each row of y belongs to.

    """

    x: Tensor | Stacked
    y: Tensor | Stacked
    y_to_x: Tensor

    def __repr__(self) -> str:
        x, y = (f"{tuple(side.shape)} {_dtype(side)}" for side in (self.x, self.y))
        return f"Embeddings(x={x}, y={y})"


def read_embeddings(path: str | Path) -> Embeddings:
    """Read and check an embedding file.

    Norms are not changed; see `unit_rows`. float16 and bfloat16 become float32.

    Args:
        path: a `.npz` or `.safetensors` file with `x`, `y` and optionally `y_to_x`, or the URL of one.

    Returns:
        The arrays, as CPU tensors.

    Raises:
        UserError: if the file cannot be read or an array is missing, has a wrong type or shape, or is not finite.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "pairs.npz")
        ...     np.savez(path, x=np.eye(2), y=np.eye(3), y_to_x=[0, 0, 1])
        ...     read_embeddings(path)
        Embeddings(x=(2, 2) float64, y=(3, 3) float64)

    """
    with show_urls():
        return _read(local_copy(str(path)) if is_url(path) else Path(path))


def _read(path: Path) -> Embeddings:
    arrays = _load(path)
    for key in ("x", "y"):
        if key not in arrays:
            names = ", ".join(sorted(arrays)) or "nothing"
            raise UserError(f"{path}: no array named {key!r}; needs x and y, and optionally y_to_x (found: {names})")
    x, y = (_features(path, key, arrays[key]) for key in ("x", "y"))
    if "y_to_x" in arrays:
        y_to_x = _check_y_to_x(path, arrays["y_to_x"], len(x), len(y))
    elif len(x) == len(y):
        y_to_x = torch.arange(len(y))
    else:
        raise UserError(f"{path}: x has {len(x)} rows and y {len(y)}; add y_to_x, the row of x for each row of y")
    return Embeddings(x=x, y=y, y_to_x=y_to_x)


class VectorPairs(Pairs):
    """Pairs of an embedding file: pair j is (x[y_to_x[j]], y[j]).

    `y_id` is j: equal vectors do not imply equal texts.

    Args:
        path: the embedding file.

    Raises:
        UserError: as `read_embeddings`.

    """

    x_kind = "vector"
    y_kind = "vector"

    def __init__(self, path: Path) -> None:
        embeddings = read_embeddings(path)
        self._x, self._y = np.asarray(embeddings.x), np.asarray(embeddings.y)
        self.x_id = embeddings.y_to_x.numpy()
        self.y_id = np.arange(len(self._y))
        self.label = path.name
        hashed = hashlib.sha256()
        for array in (self._x, self._y, self.x_id):
            hashed.update(str(array.shape).encode())
            hashed.update(np.ascontiguousarray(array).data)
        self.fingerprint = hashed.hexdigest()

    def __len__(self) -> int:
        return len(self._y)

    def x(self, number: int) -> np.ndarray:
        """Return the row of x of this pair, (d_x,)."""
        return np.asarray(self._x[self.x_id[number]])

    def y(self, number: int) -> np.ndarray:
        """Return row `number` of y, (d_y,)."""
        return np.asarray(self._y[number])

    def items(self, side: Literal["x", "y"], numbers: np.ndarray) -> np.ndarray:
        """Return the x (b, d_x) or the y (b, d_y) of several pairs."""
        return np.asarray(self._x[self.x_id[numbers]] if side == "x" else self._y[numbers])

    def name(self, number: int) -> str:
        """Return the file and the row of x."""
        return f"{self.label}, x row {self.x_id[number]}"


def unit_rows(features: Tensor | np.ndarray, name: str) -> Tensor:
    """Scale every row to unit norm.

    Embedding files may hold vectors of any norm, but scores are cosine similarities: objectives, the popularity solver
    and corrections need unit-norm features.

    Args:
        features: (n, d).
        name: the file or array, for messages.

    Returns:
        (n, d), each row divided by its Euclidean norm.

    Raises:
        UserError: if `features` is not (n, d), or a row is all zeros and therefore has no direction.

    Example:
        >>> unit_rows(torch.tensor([[3.0, 4.0]]), "x")
        tensor([[0.6000, 0.8000]])

    """
    features = torch.as_tensor(features)
    if features.ndim != 2 or not features.is_floating_point():
        raise UserError(f"{name}: {_dtype(features)} of shape {tuple(features.shape)}; needs floats of shape (n, d)")
    dtype = features.dtype
    # In float16 the norm of a row overflows above 65504.
    features = rescale_extreme_rows(features if dtype.itemsize >= 4 else features.float())
    norms: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    _refuse_rows(f"{name}: row", norms.squeeze(1) == 0, "is all zeros and has no direction; remove it")
    return (features / norms).to(dtype)


def _load(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path}: {'a folder, not a file' if path.is_dir() else 'no such file'}")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: not an embedding file; needs {' or '.join(SUFFIXES)} with the arrays x and y")
    return _load_npz(path) if path.suffix == ".npz" else _load_safetensors(path)


def _load_npz(path: Path) -> dict[str, Tensor]:
    arrays = read_npz(path, ("x", "y", "y_to_x"))
    try:
        return {key: torch.from_numpy(array) for key, array in arrays.items()}
    except (TypeError, ValueError) as error:  # for example float128, or big-endian numbers
        raise UserError(f"{path}: cannot be read as .npz with numeric arrays ({error})") from None


def _load_safetensors(path: Path) -> dict[str, Tensor]:
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
    _refuse_rows(f"{path}: {key} row", ~features.isfinite().all(dim=1), "holds a NaN or an infinity; fix or remove it")
    return features


def _check_y_to_x(path: Path, y_to_x: Tensor, n_x: int, n_y: int) -> Tensor:
    if y_to_x.is_floating_point() or y_to_x.is_complex() or y_to_x.dtype == torch.bool:
        raise UserError(f"{path}: y_to_x holds {_dtype(y_to_x)}; needs whole numbers")
    if tuple(y_to_x.shape) != (n_y,):
        raise UserError(f"{path}: y_to_x has shape {tuple(y_to_x.shape)}; needs ({n_y},), one number per row of y")
    rows = y_to_x.long()
    outside = ((rows < 0) | (rows >= n_x)).nonzero().flatten()
    if len(outside):
        j = int(outside[0])
        raise UserError(f"{path}: y_to_x[{j}] is {int(rows[j])}; allowed: 0 to {n_x - 1}, the rows of x")
    return rows


def _refuse_rows(name: str, bad: Tensor, why: str) -> None:
    rows = bad.nonzero().flatten()
    if len(rows):
        more = f" ({len(rows)} such rows)" if len(rows) > 1 else ""
        raise UserError(f"{name} {int(rows[0])} {why}{more}")


def _dtype(array: Tensor | Stacked) -> str:
    return str(array.dtype).removeprefix("torch.")
