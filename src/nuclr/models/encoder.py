"""One side of a dual encoder: items -> inputs -> tower -> head -> unit-norm features.

`EncoderSide` says what to build, `Inputs` prepares items for a tower (`ImageFormat`, `Tokenizer`, `VectorFormat`, or a
class of your own for another modality), and `Encoder` is the result.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nuclr.arrays import rescale_extreme_rows
from nuclr.errors import UserError

Name = str | os.PathLike[str]
EncoderSource = Name | nn.Module


@dataclass(frozen=True)
class EncoderSide:
    """What `build_model` builds for one side.

    Args:
        encoder: a preset (`IMAGE_PRESETS`, `TEXT_PRESETS`), a folder or hub name of a transformers model, "vectors"
            (inputs are embeddings already), the name of a registered encoder, or any module from a batch of inputs to
            (b, d). Default: the preset of the modality, see `default_encoder`.
        head: what maps the tower's features to the shared space: "linear", "mlp" or "none".
        frozen: keep the tower fixed and train only its head.
        image_size: height and width of images in pixels. Default: the size the tower was made for.
        image_normalization: mean and standard deviation of the pixels: "clip" or "imagenet". Default: those of the
            encoder, which are ImageNet's for presets.
        max_length: largest number of tokens per text. Default: 32 for tiny_text, the full length for CLIP and SigLIP,
            otherwise at most 64.
        tokenizer: a folder or hub name of a tokenizer to use instead of the text tower's own.
        pooling: how a text encoder pools its tokens: "first" or "mean". Default: what the folder says if
            sentence-transformers wrote it (1_Pooling/config.json), otherwise "first".
        modality: what the side holds, such as "image" or "text". Default: what the encoder takes; of a CLIP, side x
            takes the image tower and side y the text tower.
        width: number of coordinates of the vectors, or of the output of a module. A module without it gets no head.
        texts: texts to train the tokenizer of a text preset on. If both sides are text presets, one tokenizer is
            trained on the texts of both.

    Example:
        >>> EncoderSide("tiny_text", max_length=16).max_length
        16

    """

    encoder: EncoderSource | None = None
    head: str = "linear"
    frozen: bool = False
    image_size: int | None = None
    image_normalization: str | None = None
    max_length: int | None = None
    tokenizer: Name | None = None
    pooling: str | None = None
    modality: str | None = None
    width: int | None = None
    texts: Iterable[str] | None = None


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

    def save(self, folder: Path) -> None:
        """Write files from which other tools prepare items in the same way. By default, nothing is written."""


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

    def batch(self, items: Any) -> Tensor:
        """Return vectors as a tensor (n, d); a single vector (d,) becomes (1, d).

        Raises:
            UserError: if `items` are not numbers. The tower checks the number of coordinates.

        """
        return number_tensor(items, "vectors")

    prepare = batch


def number_tensor(items: Any, name: str) -> Tensor:
    """Return numbers as a tensor of floats (n, ...); a single row (d,) becomes (1, d)."""
    try:
        if not isinstance(items, Tensor | np.ndarray):
            rows: list[Any] = list(items)
            items = torch.stack(rows) if rows and isinstance(rows[0], Tensor) else np.asarray(rows)
        numbers = torch.as_tensor(items)
    except (TypeError, ValueError, RuntimeError):  # not numbers, or rows of different shapes
        numbers = torch.tensor(0)
    if numbers.ndim == 0:
        raise UserError(f"{name}: this side of the model takes numbers; needs an array or tensor (n, d)")
    numbers = numbers if numbers.is_floating_point() else numbers.float()
    return numbers[None] if numbers.ndim == 1 and len(numbers) else numbers


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

    def __init__(
        self,
        kind: str,
        in_width: int,
        width: int,
    ) -> None:
        # The layers of all kinds are made, so that the same random numbers are drawn whatever the kind.
        layers: dict[str, tuple[nn.Module, ...]] = {
            "linear": (nn.Linear(in_width, width),),
            "mlp": (nn.Linear(in_width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
            "none": (),
        }
        super().__init__(*layers[kind])
        self.kind = kind
        self.in_width = in_width
        self.width = width

    def __repr__(self) -> str:
        return f"Head({self.kind!r}, {self.in_width} -> {self.width})"


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
        self,
        tower: nn.Module,
        head: nn.Module | None = None,
        frozen: bool = False,
        inputs: Inputs | None = None,
    ) -> None:
        super().__init__()
        self.tower = tower
        self.head = nn.Identity() if head is None else head
        self.inputs = inputs
        self.frozen = False
        if frozen:
            self.freeze()

    @property
    def modality(self) -> str | None:
        """What this side takes ("image", "text", "vector", or a plugin's); None for tensors of a module of your own."""
        if self.inputs is not None:
            return self.inputs.modality
        return getattr(self.tower, "modality", None)

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
