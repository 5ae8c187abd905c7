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
        vector = parse_vector(cell)
        self.check(vector)
        return vector

    def check(self, item: np.ndarray) -> None:
        """Refuse vectors that hold a NaN or an infinity.

        Raises:
            BadSample: if it does.

        """
        if not np.isfinite(item).all():
            raise BadSample("a NaN or an infinity")

    def collate(self, items: Sequence[Any] | np.ndarray, options: Any = None) -> Tensor:  # noqa: ARG002
        """Return a tensor (b, d)."""
        return torch.from_numpy(items if isinstance(items, np.ndarray) else np.stack(items))

    def width(self, item: np.ndarray) -> int:
        """Return the number of coordinates."""
        return len(item)

    def recognize(self, cells: Sequence[Any]) -> bool:
        """Return whether all cells are lists of numbers, or texts of such lists in JSON."""
        return bool(cells) and all(_is_vector(cell) for cell in cells)


def parse_vector(cell: Any) -> np.ndarray:
    """Return the vector (d,) float32 of a list of numbers, an array, or a text such as "[0.5, 1]".

    Raises:
        BadSample: if it is not a list of numbers.

    """
    try:
        value = parse_json(cell) if isinstance(cell, str) else cell
        if is_list_of_numbers(value):
            with np.errstate(over="ignore"):
                vector = np.asarray(value, np.float32)
            if vector.ndim == 1:
                return vector
    except (TypeError, ValueError, OverflowError):  # not JSON, nested lists, texts among numbers
        pass
    raise BadSample("not a list of numbers")


def is_list_of_numbers(value: Any) -> bool:
    """Return whether a value is an array, or a list that starts with a number."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], int | float) and not isinstance(value[0], bool)
    )


def _is_vector(cell: Any) -> bool:
    if isinstance(cell, str):
        if not cell.lstrip().startswith("["):
            return False
        try:
            parse_vector(cell)
        except BadSample:
            return False
        return True
    return is_list_of_numbers(cell)
