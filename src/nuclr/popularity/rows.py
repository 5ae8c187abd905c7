"""Features that are read a few rows at a time, so that arrays on disk (np.memmap, Stacked) need not fit into memory."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nuclr.norms import rescale_extreme_rows
from nuclr.stacked import Stacked

READ = 2**16  # rows to read at a time


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix, converted and, if asked for, scaled to unit norm when they are read.

    Args:
        stored: (n, d), in any floating-point precision; may be backed by a file.
        dtype: Precision of what is read.
        unit: Scale each row to unit norm.

    Example:
        >>> Rows(torch.tensor([[3.0, 4.0]], dtype=torch.float16), torch.float32, unit=True)[:1]
        tensor([[0.6000, 0.8000]])

    """

    stored: Tensor | Stacked
    dtype: torch.dtype
    unit: bool = False

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.stored)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Return some rows, (m, d)."""
        if isinstance(self.stored, Stacked):
            picked = torch.from_numpy(np.asarray(self.stored[rows]))
        else:
            picked = self.stored.index_select(0, rows) if isinstance(rows, Tensor) else self.stored[rows]
        part = picked.to(self.dtype)
        return torch.nn.functional.normalize(rescale_extreme_rows(part), dim=1) if self.unit else part

    @property
    def shape(self) -> torch.Size:
        """The shape, (n, d)."""
        return torch.Size(self.stored.shape)

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.stored.device if isinstance(self.stored, Tensor) else torch.device("cpu")

    def to(self, dtype: torch.dtype) -> "Rows":
        """Return the same rows, read in another precision."""
        return replace(self, dtype=dtype)

    def part(self, rows: slice) -> "Rows":
        """Return consecutive rows without reading them."""
        return replace(self, stored=self.stored[rows])

    def tiles(self, height: int) -> list[slice]:
        """Return slices of at most `height` rows that cover all rows."""
        return [slice(start, min(start + height, len(self))) for start in range(0, len(self), height)]
