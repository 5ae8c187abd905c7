"""Large matrices of features, such as memory-mapped files, read in blocks of rows."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nuclr.popularity.problem import NORMALIZE, Array, as_features, as_matrix, as_tensor
from nuclr.stacked import Stacked

ROWS = 2**16  # of a block: 96 MiB for 384 columns of float32


def matrix_size(name: str, value: Array) -> tuple[int, int]:
    """Return (rows, columns) of a floating-point matrix without reading it.

    Raises:
        ValueError: If `value` is not such a matrix, or has no rows.

    """
    if not isinstance(value, (Tensor, np.ndarray, Stacked)):
        as_tensor(name, value)  # names the wrong type
    if value.ndim != 2:
        as_matrix(name, value)  # names the wrong shape
    as_matrix(name, value[:1])
    if not len(value):
        raise ValueError(f"{name} has no rows")
    return int(value.shape[0]), int(value.shape[1])


def feature_tiles(
    name: str, value: Array, normalize: bool, rows: int | None = None, hint: str = NORMALIZE
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows as unit-norm features of at least float32, each with its slice.

    Args:
        name: Name of the argument, for messages. A wrong row of a later block is named by the block, such as
            `gallery[65536:131072]: row 5`.
        value: Tensor or numpy array, also memory-mapped, or Stacked, (n, d).
        normalize: Scale the rows to unit norm instead of refusing other norms.
        rows: Number of rows per block. None: `ROWS`.
        hint: How the caller's user asks for normalized features, for the message.

    Yields:
        The slice of the rows, and the features.

    Raises:
        ValueError: If rows are not finite or do not have unit norm.

    """
    total, _ = matrix_size(name, value)
    rows = ROWS if rows is None else rows
    for start in range(0, total, rows):
        part = slice(start, min(start + rows, total))
        block = name if total <= rows else f"{name}[{part.start}:{part.stop}]"
        features = as_matrix(block, value[part])
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        yield part, as_features(block, features, normalize, hint)


def evenly_spaced(total: int, size: int) -> Tensor:
    """Return at most `size` row numbers of `total`, (min(total, size),) int64."""
    return torch.linspace(0, total - 1, min(size, total), dtype=torch.float64).round().long()


def sample_rows(name: str, value: Array, size: int, normalize: bool, hint: str = NORMALIZE) -> tuple[Tensor, Tensor]:
    """Check all rows and return at most `size` of them, evenly spaced, as features; arguments as of `feature_tiles`.

    Returns:
        The features, (min(n, size), d), and their rows in `value`.

    Raises:
        ValueError: If rows are not finite or do not have unit norm.

    """
    total, _ = matrix_size(name, value)
    chosen = evenly_spaced(total, size)
    parts = []
    for part, features in feature_tiles(name, value, normalize, hint=hint):
        own = chosen[(chosen >= part.start) & (chosen < part.stop)] - part.start
        parts.append(features if len(own) == len(features) else features[own.to(features.device)])
    return torch.cat(parts) if len(parts) > 1 else parts[0], chosen
