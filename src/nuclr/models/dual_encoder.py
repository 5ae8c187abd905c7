"""The dual encoder: two sides that map their inputs to unit-norm features in one space.

model = build_model("tiny_resnet", "tiny_text", texts=texts)
fx, fy = model(model.prepare_images(images), model.prepare_texts(texts))     # training, with gradients
model.encode_images(images) @ model.encode_texts(texts).T                    # inference
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nuclr.errors import UserError
from nuclr.models.encoder import Encoder, describe_tower
from nuclr.models.image_format import ImageFormat, ImageLike, image_batch
from nuclr.models.pretrained import Joint
from nuclr.models.tokenizer import Tokenizer, text_batch
from nuclr.models.towers import Vectors, VectorTower


class DualEncoder(nn.Module):
    """Map pairs to unit-norm features of both sides.

    `model(x, y)` returns two tensors (b, width), float32 (float64 for a float64 model). `build_model` makes one from
    the names of presets or folders.

    Args:
        x: an `Encoder`, or any module from a batch of inputs to (b, width).
        y: the same for side y.
        images: how images are prepared for side x; None if side x does not take images.
        tokenizer: how texts are prepared for side y; None if side y does not take texts.
        joint: if x and y are the towers of a CLIP or SigLIP, its other parts.

    Example:
        >>> model = DualEncoder(nn.Linear(5, 4), nn.Linear(7, 4))
        >>> fx, fy = model(torch.randn(3, 5), torch.randn(3, 7))
        >>> (fx @ fy.T).shape
        torch.Size([3, 3])

    """

    def __init__(
        self,
        x: nn.Module,
        y: nn.Module,
        *,
        images: ImageFormat | None = None,
        tokenizer: Tokenizer | None = None,
        joint: Joint | None = None,
    ) -> None:
        super().__init__()
        self.x, self.y = (side if isinstance(side, Encoder) else Encoder(side) for side in (x, y))
        self.images, self.tokenizer, self.joint = images, tokenizer, joint

    @property
    def width(self) -> int | None:
        """Number of features in the shared space; None if side x is a module without a head."""
        return self.joint.width if self.joint else getattr(self.x.head, "width", None)

    def forward(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Return the features of both sides.

        Args:
            x: normalized pixels (b, 3, size, size) from `prepare_images`, or vectors (b, d).
            y: tokens from `prepare_texts`, or vectors (b, d).

        Returns:
            Unit-norm features of x and of y, (b, width) each.

        Raises:
            UserError: if the two sides have different numbers of features.

        """
        fx, fy = self.x(x), self.y(y)
        if fx.shape[1] != fy.shape[1]:
            raise UserError(f"x has {fx.shape[1]} features and y {fy.shape[1]}; give both sides heads of one width")
        return fx, fy

    def prepare_images(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """Return normalized pixels (n, 3, size, size), without augmentation. See `encode_images` for `images`."""
        if self.images is None:
            raise UserError("images: side x of this model does not take images")
        return self.images.prepare(images)

    def prepare_texts(self, texts: str | Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors that the text tower takes. `texts` is a string or a list of strings."""
        if self.tokenizer is None:
            raise UserError("texts: side y of this model does not take texts")
        return self.tokenizer(texts)

    def encode_images(self, images: ImageLike | Iterable[ImageLike], batch_size: int = 256) -> Tensor:
        """Return features of side x, in eval mode and without gradients.

        Args:
            images: a path, a PIL image, a numpy array (height, width, 3) uint8, a tensor (3, height, width) uint8; a
                list of these; an array (n, height, width, 3) or a tensor (n, 3, height, width) of uint8. If side x
                takes vectors: an array or tensor (n, d) or (d,).
            batch_size: number of images that are encoded at once.

        Returns:
            Unit-norm features (n, width) on the model's device. A single image gives n = 1.

        Raises:
            UserError: if an image cannot be read, or `images` is empty or has a type or shape that is not allowed.

        Example:
            >>> from nuclr.models import build_model
            >>> model = build_model(texts=["a red circle"], width=64)
            >>> model.encode_images(np.zeros((40, 40, 3), dtype=np.uint8)).shape
            torch.Size([1, 64])

        """
        if self.images is None:
            return self._encode(self.x, torch.as_tensor, _vector_batch(images, "images", "x"), "images", batch_size)
        return self._encode(self.x, self.images.prepare, image_batch(images), "images", batch_size)

    def encode_texts(self, texts: str | Iterable[str] | Vectors, batch_size: int = 256) -> Tensor:
        """Return features of side y, in eval mode and without gradients.

        Args:
            texts: a string or a list of strings. If side y takes vectors: an array or tensor (n, d) or (d,).
            batch_size: number of texts that are encoded at once.

        Returns:
            Unit-norm features (n, width) on the model's device. A single text gives n = 1.

        Raises:
            UserError: if `texts` is empty or has a type or shape that is not allowed.

        Example:
            >>> from nuclr.models import build_model
            >>> model = build_model(texts=["a red circle"], width=64)
            >>> model.encode_texts(["a dog", "two cats"]).shape
            torch.Size([2, 64])

        """
        if self.tokenizer is None:
            return self._encode(self.y, torch.as_tensor, _vector_batch(texts, "texts", "y"), "texts", batch_size)
        return self._encode(self.y, self.tokenizer, text_batch(texts), "texts", batch_size)

    def fit_vectors(
        self, x: Vectors | Iterable[Vectors] | None = None, y: Vectors | Iterable[Vectors] | None = None
    ) -> None:
        """Standardize vector inputs by the training vectors, see `VectorTower`.

        Args:
            x: training vectors (n, d) of side x, as one array or in batches; None to leave the side as it is.
            y: the same for side y.

        Raises:
            UserError: if a side does not take vectors, or fewer than two distinct vectors are given.

        Example:
            >>> from nuclr.models import build_model
            >>> model = build_model("vectors", "vectors", x_width=2, y_width=3)
            >>> model.fit_vectors(x=np.array([[0.0, 1.0], [2.0, 1.0]]))
            >>> model.x.tower.mean
            tensor([1., 1.])

        """
        for name, side, vectors in (("x", self.x, x), ("y", self.y, y)):
            if vectors is not None:
                if not isinstance(side.tower, VectorTower):
                    raise UserError(f"{name}: this side does not take vectors; build the model with {name}='vectors'")
                side.tower.fit(vectors)

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
        cls, folder: str | os.PathLike[str], *, x: nn.Module | None = None, y: nn.Module | None = None
    ) -> "DualEncoder":
        """Load a model that `save_pretrained` wrote, in eval mode.

        Args:
            folder: the folder of the model. The model of a run is in RUN/model.
            x: if side x was a module of your own, a module of the same structure, to load the weights into.
            y: the same for side y.

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
        sides = (("x", self.x), ("y", self.y))
        parts = [f"{name}={describe_tower(side.tower)}{' frozen' if side.frozen else ''}" for name, side in sides]
        if self.width is not None:
            parts.append(f"width={self.width}")
        count = sum(parameter.numel() for parameter in self.parameters())
        trainable = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        parts.append(f"{count:,} parameters" + (f", {trainable:,} trainable" if trainable != count else ""))
        return f"DualEncoder({', '.join(parts)})"

    def _encode(self, side: Encoder, prepare: Callable[[Any], Any], inputs: Any, name: str, batch_size: int) -> Tensor:
        if batch_size < 1:
            raise UserError(f"batch_size: {batch_size}; needs a positive number")
        if len(inputs) == 0:
            raise UserError(f"{name}: empty; needs at least one item to encode")
        weight = next((tensor for tensor in (*side.parameters(), *side.buffers())), torch.empty(0))
        was_training = side.training
        side.eval()
        try:
            with torch.inference_mode():
                batches = (inputs[start : start + batch_size] for start in range(0, len(inputs), batch_size))
                features = [side(_to_like(weight, prepare(batch))) for batch in batches]
        finally:
            side.train(was_training)
        return torch.cat(features)  # outside inference mode: an ordinary tensor, which autograd can use


def _vector_batch(vectors: Any, name: str, side: str) -> Tensor | np.ndarray:
    """Return vectors as an array or tensor (n, ...); a single vector (d,) becomes (1, d)."""
    if not isinstance(vectors, Tensor | np.ndarray):
        try:
            rows: list[Any] = list(vectors)
            vectors = torch.stack(rows) if rows and isinstance(rows[0], Tensor) else np.asarray(rows)
        except (TypeError, ValueError, RuntimeError):  # not iterable, or rows of different shapes
            vectors = np.asarray(None)
    numeric = isinstance(vectors, Tensor) or vectors.dtype.kind in "biuf"
    if not numeric or vectors.ndim == 0:
        raise UserError(f"{name}: side {side} of this model takes vectors; needs an array or tensor (n, d) of numbers")
    return vectors[None] if vectors.ndim == 1 and len(vectors) else vectors


def _to_like(weight: Tensor, inputs: Any) -> Any:
    """Move inputs to the weight's device, and to its dtype unless they are tokens."""
    if isinstance(inputs, dict):
        return {name: tensor.to(weight.device) for name, tensor in inputs.items()}
    return inputs.to(weight)
