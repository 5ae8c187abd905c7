"""The dual encoder: two sides that map their inputs to unit-norm features in one space.

model = build_model("tiny_resnet", EncoderSide("tiny_text", texts=texts))
fx, fy = model(model.prepare_x(images), model.prepare_y(texts))     # training, with gradients
model.encode_x(images) @ model.encode_y(texts).T                    # inference
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nuclr.errors import UserError
from nuclr.models.encoder import Encoder, describe_tower, number_tensor
from nuclr.models.image_format import ImageLike

if TYPE_CHECKING:
    from nuclr.models.pretrained import Joint


class DualEncoder(nn.Module):
    """Map pairs to unit-norm features of both sides.

    `model(x, y)` returns two tensors (b, width), float32 (float64 for a float64 model). `build_model` makes one from
    the names of presets or folders.

    Args:
        x: an `Encoder`, or any module from a batch of inputs to (b, width).
        y: the same for side y. If it is the same object as `x`, both sides share one encoder: `model.y is model.x`,
            and `state_dict` holds its weights once, under "x.".
        joint: if x and y are the towers of a CLIP or SigLIP, its other parts.

    Example:
        >>> model = DualEncoder(nn.Linear(5, 4), nn.Linear(7, 4))
        >>> fx, fy = model(torch.randn(3, 5), torch.randn(3, 7))
        >>> (fx @ fy.T).shape
        torch.Size([3, 3])

    """

    x: Encoder
    y: Encoder

    def __init__(
        self,
        x: nn.Module,
        y: nn.Module,
        *,
        joint: "Joint | None" = None,
    ) -> None:
        super().__init__()
        self.x = x if isinstance(x, Encoder) else Encoder(x)
        if y is x:
            # Not registered as a submodule, so that weights appear once in state_dict.
            object.__setattr__(self, "y", self.x)
        else:
            self.y = y if isinstance(y, Encoder) else Encoder(y)
        self.joint = joint

    @property
    def shared(self) -> bool:
        """Whether one encoder serves both sides."""
        return self.y is self.x

    @property
    def width(self) -> int | None:
        """Number of features in the shared space; None if side x is a module without a head."""
        return self.joint.width if self.joint else getattr(self.x.head, "width", None)

    def forward(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Return the features of both sides.

        Args:
            x: prepared inputs of side x: normalized pixels (b, 3, size, size), tokens, or vectors (b, d).
            y: the same for side y.

        Returns:
            Unit-norm features of x and of y, (b, width) each.

        Raises:
            UserError: if the two sides have different numbers of features.

        """
        fx = self.x(x)
        fy = self.y(y)
        if fx.shape[1] != fy.shape[1]:
            raise UserError(f"x has {fx.shape[1]} features and y {fy.shape[1]}; give both sides heads of one width")
        return fx, fy

    # -- preparing items -----------------------------------------------------------------------------------------------

    def prepare_x(self, items: Any) -> Any:
        """Return what the tower of side x takes, without augmentation. See `encode_x` for `items`."""
        return _prepare(self.x, items)

    def prepare_y(self, items: Any) -> Any:
        """Return what the tower of side y takes, without augmentation. See `encode_x` for `items`."""
        return _prepare(self.y, items)

    # -- encoding items ------------------------------------------------------------------------------------------------

    def encode_x(
        self,
        items: Any,
        batch_size: int = 256,
        head: bool = True,
    ) -> Tensor:
        """Return features of items of side x, in eval mode and without gradients.

        Args:
            items: one item or several. Images: a path, a PIL image, a numpy array (height, width, 3) uint8, a tensor
                (3, height, width) uint8; a list of these; an array (n, height, width, 3) or a tensor (n, 3, height,
                width) of uint8. Texts: a string or a list of strings. Vectors: an array or tensor (n, d) or (d,).
            batch_size: number of items that are encoded at once.
            head: False leaves out the projection head and returns the tower's own features.

        Returns:
            Unit-norm features (n, width) on the model's device. A single item gives n = 1.

        Raises:
            UserError: if an item cannot be read, or `items` is empty or has a type or shape that is not allowed.

        Example:
            >>> from nuclr.models import EncoderSide, build_model
            >>> side = EncoderSide("bag_of_words", texts=["a red circle", "ein roter Kreis"])
            >>> model = build_model(side, shared=True, width=64)
            >>> model.encode_x(["a red circle", "two"]).shape
            torch.Size([2, 64])

        """
        return _encode(self.x, items, batch_size, head)

    def encode_y(
        self,
        items: Any,
        batch_size: int = 256,
        head: bool = True,
    ) -> Tensor:
        """Return features of items of side y, in eval mode and without gradients. See `encode_x`."""
        return _encode(self.y, items, batch_size, head)

    def encode_images(self, images: ImageLike | Iterable[ImageLike], batch_size: int = 256) -> Tensor:
        """Return features of images, by the side that takes images. See `encode_x` for what is allowed.

        Raises:
            UserError: if neither side takes images, or both do with encoders of their own.

        Example:
            >>> import numpy as np
            >>> from nuclr.models import EncoderSide, build_model
            >>> model = build_model(y=EncoderSide(texts=["a red circle"]), width=64)
            >>> model.encode_images(np.zeros((40, 40, 3), dtype=np.uint8)).shape
            torch.Size([1, 64])

        """
        return _encode(self._side("image"), images, batch_size)

    def encode_texts(self, texts: str | Iterable[str], batch_size: int = 256) -> Tensor:
        """Return features of texts, by the side that takes texts. `texts` is a string or a list of strings.

        Raises:
            UserError: if neither side takes texts, or both do with encoders of their own.

        Example:
            >>> from nuclr.models import EncoderSide, build_model
            >>> model = build_model(y=EncoderSide(texts=["a red circle"]), width=64)
            >>> model.encode_texts(["a dog", "two cats"]).shape
            torch.Size([2, 64])

        """
        return _encode(self._side("text"), texts, batch_size)

    @property
    def sides(self) -> list[tuple[str, Encoder]]:
        """The encoders with the names of their sides; a shared one once, as "x"."""
        return [("x", self.x)] if self.shared else [("x", self.x), ("y", self.y)]

    def takes(self, modality: str) -> bool:
        """Return whether a side takes this modality ("image", "text", "vector", or a plugin's)."""
        return modality in (self.x.modality, self.y.modality)

    def _side(self, modality: str) -> Encoder:
        """Return the one encoder that takes a modality."""
        encoders = [encoder for _, encoder in self.sides if encoder.modality == modality]
        if len(encoders) != 1:
            takes = " and ".join(f"{encoder.modality or 'tensor'}s on side {name}" for name, encoder in self.sides)
            raise UserError(f"{modality}s: this model takes {takes}; use encode_x or encode_y")
        return encoders[0]

    # -- saving, repr --------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Save the model to a folder: weights as safetensors, the rest as JSON. See `nuclr.models.saving`.

        Args:
            folder: the folder to create. A model that is already there is replaced once the new one is written.

        Raises:
            UserError: if the folder cannot be written.

        """
        from nuclr.models.saving import save

        save(self, Path(folder))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        x: nn.Module | None = None,
        y: nn.Module | None = None,
    ) -> "DualEncoder":
        """Load a model that `save_pretrained` wrote, in eval mode.

        Args:
            folder: the folder of the model. The model of a run is in RUN/model.
            x: if side x was a module of your own, a module of the same structure, to load the weights into.
            y: the same for side y. Not needed if both sides share the module.

        Returns:
            The model, on the CPU, in float32.

        Raises:
            UserError: if the folder is not that of a saved dual encoder, or its files do not fit together.

        Example:
            >>> import tempfile
            >>> model = DualEncoder(nn.Linear(5, 4), nn.Linear(7, 4))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     model.save_pretrained(folder)
            ...     loaded = DualEncoder.from_pretrained(folder, x=nn.Linear(5, 4), y=nn.Linear(7, 4))
            >>> torch.equal(loaded.x.tower.weight, model.x.tower.weight)
            True

        """
        from nuclr.models.saving import load

        return load(Path(folder), x, y)

    def __repr__(self) -> str:
        parts = []
        for name, side in self.sides:
            label = "x=y" if self.shared else name
            parts.append(f"{label}={describe_tower(side.tower)}{' frozen' if side.frozen else ''}")
        if self.width is not None:
            parts.append(f"width={self.width}")
        count = sum(parameter.numel() for parameter in self.parameters())
        trainable = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        parts.append(f"{count:,} parameters" + (f", {trainable:,} trainable" if trainable != count else ""))
        return f"DualEncoder({', '.join(parts)})"


def _prepare(side: Encoder, items: Any) -> Any:
    return number_tensor(items, "items") if side.inputs is None else side.inputs.prepare(items)


def _encode(
    side: Encoder,
    items: Any,
    batch_size: int,
    head: bool = True,
) -> Tensor:
    inputs = number_tensor(items, "items") if side.inputs is None else side.inputs.batch(items)
    if len(inputs) == 0:
        raise UserError(f"{side.modality or 'item'}s: empty; needs at least one item to encode")
    weight = next((tensor for tensor in (*side.parameters(), *side.buffers())), torch.empty(0))
    was_training = side.training
    side.eval()
    try:
        with torch.inference_mode():
            batches = (inputs[start : start + batch_size] for start in range(0, len(inputs), batch_size))
            features = [side.features(_to_like(weight, _prepare(side, batch)), head) for batch in batches]
    finally:
        side.train(was_training)
    return torch.cat(features)  # outside inference mode: an ordinary tensor, which autograd can use


def _to_like(weight: Tensor, inputs: Any) -> Any:
    """Move a tensor or a dict of tensors to the weight's device, and floating-point tensors to its dtype."""
    if isinstance(inputs, dict):
        return {name: _to_like(weight, tensor) for name, tensor in inputs.items()}
    return inputs.to(weight) if inputs.is_floating_point() else inputs.to(weight.device)
