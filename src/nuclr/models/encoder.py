"""One side of the dual encoder: inputs -> tower -> head -> unit-norm features."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize


def unit_norm(features: Tensor) -> Tensor:
    """Rows of length one, computed in at least float32: under autocast, bf16 would cost the scores two digits."""
    return normalize(features if features.dtype == torch.float64 else features.float(), dim=1)


class Encoder(nn.Module):
    """`tower` maps inputs to (b, d), `head` (b, d) to (b, width); the features have unit norm.

    A frozen tower gets no gradient and stays in eval mode, so that its batch statistics and dropout do not move either.
    """

    def __init__(self, tower: nn.Module, head: nn.Module | None = None, frozen: bool = False) -> None:
        super().__init__()
        self.tower, self.head = tower, nn.Identity() if head is None else head
        self.frozen = False
        if frozen:
            self.freeze()

    def freeze(self) -> None:
        """Freeze the tower; the head stays free."""
        self.frozen = True
        self.tower.requires_grad_(False).eval()

    def forward(self, inputs: Any) -> Tensor:
        """Features (b, width)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            features = self.tower(inputs)
        return unit_norm(self.head(features))

    def train(self, mode: bool = True) -> "Encoder":
        """As for any module, but for the frozen tower."""
        super().train(mode)
        if self.frozen:
            self.tower.eval()
        return self
