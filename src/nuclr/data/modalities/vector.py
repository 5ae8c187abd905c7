"""Vectors of fixed width: cells are lists of numbers, or their text in JSON; batches are (b, d)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr.data.modalities.base import Folder, Modality
from nuclr.errors import BadSample
from nuclr.files import parse_json


class VectorModality(Modality):
    """Vectors, for example embeddings that another program has computed."""

    name = "vector"
    decodes = False
    in_memory = True

    def read(self, cell: Any, folder: Folder) -> np.ndarray:  # noqa: ARG002
        """Return the vector (d,), float32."""
        return check_vector(cell, "vector")

    def collate(self, items: Sequence[Any] | np.ndarray, options: Any = None) -> Tensor:  # noqa: ARG002
        """Return a tensor (b, d)."""
        return torch.from_numpy(items if isinstance(items, np.ndarray) else np.stack(items))

    def width(self, item: np.ndarray) -> int:
        """Return the number of coordinates."""
        return len(item)

    def recognize(self, cells: Sequence[Any]) -> bool:
        """Return whether all cells are lists of numbers, or texts of such lists in JSON."""
        return bool(cells) and all(_is_vector(cell) for cell in cells)


def check_vector(
    cell: Any,
    what: str,
    width: int = 0,
) -> np.ndarray:
    """Return the vector of a cell, (d,) float32.

    Args:
        cell: a list of numbers, an array, a text such as "[0.5, 1]", or None.
        what: what the vector is called in the reason of a bad sample.
        width: the numbers that it needs to have; 0 for any.

    Raises:
        BadSample: if the cell is not such a vector, or is not finite.

    """
    if is_empty(cell):
        raise BadSample(f"no {what}")
    vector = _parse(cell)
    if vector is None:
        raise BadSample(f"{what} is not a list of numbers")
    if len(vector) != (width or max(len(vector), 1)):
        raise BadSample(f"{what} has {len(vector)} numbers; the first one has {width}")
    if not np.isfinite(vector).all():
        raise BadSample(f"{what} holds a NaN or an infinity")
    return vector


def _parse(cell: Any) -> np.ndarray | None:
    """Return the vector of a cell, (d,) float32; None if it is not a list of numbers."""
    try:
        value = parse_json(cell) if isinstance(cell, str) else cell
        with np.errstate(over="ignore"):
            vector = np.asarray(value, np.float32) if is_list_of_numbers(value) else np.empty((0, 0))
    except (TypeError, ValueError, OverflowError):  # not JSON, nested lists, texts among numbers
        return None
    return vector if vector.ndim == 1 else None


def is_empty(cell: Any) -> bool:
    """Return whether a cell is missing or an empty text."""
    return cell is None or (isinstance(cell, str | bytes) and not cell.strip())


def is_list_of_numbers(value: Any) -> bool:
    """Return whether a value is an array, or a list that starts with a number."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], int | float) and not isinstance(value[0], bool)
    )


def _is_vector(cell: Any) -> bool:
    if isinstance(cell, str):
        return cell.lstrip().startswith("[") and _parse(cell) is not None
    return is_list_of_numbers(cell)
