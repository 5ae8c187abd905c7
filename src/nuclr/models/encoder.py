"""One side of a dual encoder: inputs -> tower -> head -> unit-norm features."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nuclr.errors import UserError
from nuclr.models.inputs import Inputs
from nuclr.models.towers import RegisteredTower
from nuclr.norms import rescale_extreme_rows

HEADS = ("linear", "mlp", "none")


def unit_norm(features: Tensor) -> Tensor:
    """Scale rows to unit norm, in float32 or float64: in bfloat16, under autocast, scores would lose two digits."""
    features = features if features.dtype == torch.float64 else features.float()
    return normalize(rescale_extreme_rows(features, small=False), dim=1)


class Head(nn.Sequential):
    """Map a tower's features (b, in_width) to the shared space (b, width).

    Args:
        kind: "linear"; "mlp", which has one hidden layer of 2 `width` units with GELU; or "none", which needs
            in_width = width.
        in_width: number of features of the tower.
        width: number of features in the shared space.

    """

    def __init__(self, kind: str, in_width: int, width: int) -> None:
        layers: dict[str, tuple[nn.Module, ...]] = {
            "linear": (nn.Linear(in_width, width),),
            "mlp": (nn.Linear(in_width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
            "none": (),
        }
        super().__init__(*layers[kind])
        self.kind, self.in_width, self.width = kind, in_width, width

    def __repr__(self) -> str:
        return f"Head({self.kind!r}, {self.in_width} -> {self.width})"


def make_head(kind: str, in_width: int, width: int, key: str) -> Head:
    """Make a head after checking that `kind` is allowed; `key` is the settings key to name in messages."""
    if kind not in HEADS:
        raise UserError(f"{key}: {kind!r} is not allowed; use one of {', '.join(HEADS)}")
    if kind == "none" and in_width != width:
        raise UserError(
            f"{key}: 'none' keeps the tower's {in_width} features, but model.width is {width}; "
            f"set model.width={in_width}, or use 'linear'"
        )
    return Head(kind, in_width, width)


class Encoder(nn.Module):
    """Map a batch of inputs to unit-norm features (b, width).

    A frozen tower gets no gradient and stays in eval mode, which also fixes its batch statistics and its dropout.

    Args:
        tower: a module from a batch of inputs to (b, d).
        head: a module from (b, d) to (b, width), or None to use the tower's features.
        frozen: whether to freeze the tower.
        inputs: how raw items are prepared for the tower (`ImageFormat`, `Tokenizer`, `VectorFormat` or your own);
            None if the tower takes the tensors of the data as they are.

    Example:
        >>> encoder = Encoder(nn.Linear(5, 3), Head("linear", 3, 2), frozen=True)
        >>> encoder
        Encoder(Linear(in_features=5, out_features=3, bias=True), Head('linear', 3 -> 2), frozen)
        >>> encoder(torch.randn(4, 5)).shape
        torch.Size([4, 2])

    """

    def __init__(
        self, tower: nn.Module, head: nn.Module | None = None, frozen: bool = False, inputs: Inputs | None = None
    ) -> None:
        super().__init__()
        self.tower, self.head, self.inputs = tower, nn.Identity() if head is None else head, inputs
        self.frozen = False
        if frozen:
            self.freeze()

    @property
    def modality(self) -> str | None:
        """What this side takes ("image", "text", "vector", or a plugin's); None for tensors of a module of your own."""
        if self.inputs is not None:
            return self.inputs.modality
        return self.tower.modality if isinstance(self.tower, RegisteredTower) else None

    def freeze(self) -> None:
        """Freeze the tower. The head can still be trained."""
        self.frozen = True
        self.tower.requires_grad_(False).eval()

    def forward(self, inputs: Any) -> Tensor:
        """Return unit-norm features (b, width)."""
        return self.features(inputs)

    def features(self, inputs: Any, head: bool = True) -> Tensor:
        """Return unit-norm features.

        Args:
            inputs: a batch of prepared inputs.
            head: False leaves out the head: the tower's own features (b, d).

        Returns:
            (b, width), or (b, d) without the head.

        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            features = self.tower(inputs)
        return unit_norm(self.head(features) if head else features)

    def train(self, mode: bool = True) -> "Encoder":
        """Set train or eval mode; a frozen tower stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.tower.eval()
        return self

    def __repr__(self) -> str:
        head = repr(self.head) if isinstance(self.head, Head) else type(self.head).__name__
        return f"Encoder({describe_tower(self.tower)}, {head}{', frozen' if self.frozen else ''})"


def describe_tower(tower: nn.Module) -> str:
    """Return a tower's `repr` if it fits on one line, else the name of its class."""
    text = repr(tower)
    return type(tower).__name__ if "\n" in text else text
