"""How the raw items of a side become the tensors that its tower takes: the base class `Inputs`, and vectors.

`Encoder.inputs` is one of these: `ImageFormat` (images), `Tokenizer` (texts), `VectorFormat` (vectors), or a class of
your own for another modality. A model is saved with its inputs, so items are always prepared in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nuclr.errors import UserError

Vectors = Tensor | np.ndarray


class Inputs:
    """Prepare the items of one modality for a tower. Subclasses set `modality` and define `prepare`.

    Example:
        >>> class Waveforms(Inputs):
        ...     modality = "waveform"
        ...     def prepare(self, items):
        ...         return torch.stack([torch.as_tensor(item) for item in items])
        >>> Waveforms().prepare([[0.0, 1.0], [1.0, 0.0]]).shape
        torch.Size([2, 2])

    """

    modality: ClassVar[str]

    def batch(self, items: Any) -> Any:
        """Return one item or several as something that has a length and can be sliced."""
        return items if isinstance(items, Tensor | np.ndarray | Sequence) else list(items)

    def prepare(self, items: Any) -> Any:
        """Return the tensor, or the dict of tensors, that the tower takes for a batch of items."""
        raise NotImplementedError(f"{type(self).__name__} needs a method prepare(items)")


@dataclass(frozen=True)
class VectorFormat(Inputs):
    """Prepare vectors that another encoder computed: stack them to a tensor (n, width).

    Args:
        width: number of coordinates.

    Example:
        >>> VectorFormat(2).prepare(np.ones((3, 2))).shape
        torch.Size([3, 2])

    """

    modality: ClassVar[str] = "vector"

    width: int

    def batch(self, items: Any) -> Any:
        """Return vectors as an array or tensor (n, d); a single vector (d,) becomes (1, d)."""
        return number_batch(items, "vectors")

    def prepare(self, items: Any) -> Tensor:
        """Return vectors as a tensor (n, d).

        Raises:
            UserError: if `items` are not numbers. The tower checks the number of coordinates.

        """
        return number_tensor(items, "vectors")


def number_batch(items: Any, name: str) -> Tensor | np.ndarray:
    """Return numbers as an array or tensor (n, ...); a single row (d,) becomes (1, d)."""
    if not isinstance(items, Tensor | np.ndarray):
        try:
            rows: list[Any] = list(items)
            items = torch.stack(rows) if rows and isinstance(rows[0], Tensor) else np.asarray(rows)
        except (TypeError, ValueError, RuntimeError):  # not iterable, or rows of different shapes
            items = np.asarray(None)
    numeric = isinstance(items, Tensor) or items.dtype.kind in "biuf"
    if not numeric or items.ndim == 0:
        raise UserError(f"{name}: this side of the model takes numbers; needs an array or tensor (n, d)")
    return items[None] if items.ndim == 1 and len(items) else items


def number_tensor(items: Any, name: str) -> Tensor:
    """Return numbers as a tensor of floats (n, ...), see `number_batch`."""
    numbers = torch.as_tensor(number_batch(items, name))
    return numbers if numbers.is_floating_point() else numbers.float()
