"""The dual encoder: two sides, each from its inputs to unit-norm features in one space.

model = build_model(image="tiny_resnet", text="tiny_text", captions=captions)
fx, fy = model(model.prepare_images(images), model.prepare_texts(texts))     # to train, with gradients
model.encode_images(images) @ model.encode_texts(texts).T                    # to use
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from nuclr.errors import UserError
from nuclr.models.encoder import Encoder
from nuclr.models.image_format import ImageFormat
from nuclr.models.pretrained import Joint
from nuclr.models.tokenizer import Tokenizer
from nuclr.models.towers import VectorTower


class DualEncoder(nn.Module):
    """`model(x, y)` -> unit-norm features (b, width) of both sides, float32 (float64 for a float64 model).

    Args:
        x: an Encoder, or any module from a batch of inputs to (b, width).
        y: the same for the other side.
        images: how pictures are prepared for x; None where x takes no pictures.
        tokenizer: how texts are prepared for y; None where y takes no texts.
        joint: where x and y are the halves of a CLIP or SigLIP.

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
        """Of the shared space; None where the sides are modules that were not asked for it."""
        return self.joint.width if self.joint else getattr(self.x.head, "width", None)

    def forward(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Features of normalized pixels or vectors x, and of tokens or vectors y."""
        fx, fy = self.x(x), self.y(y)
        if fx.shape[1] != fy.shape[1]:
            raise UserError(f"x has {fx.shape[1]} features and y {fy.shape[1]}; give both sides heads of one width")
        return fx, fy

    def prepare_images(self, images: Sequence[Image.Image] | Tensor) -> Tensor:
        """PIL images or uint8 (b, 3, h, w) -> normalized pixels, without augmentation."""
        if self.images is None:
            raise UserError("this model takes no pictures on its x side")
        return self.images.prepare(images)

    def prepare_texts(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Texts -> the tensors that the text tower takes."""
        if self.tokenizer is None:
            raise UserError("this model takes no texts on its y side")
        return self.tokenizer(texts)

    def encode_images(self, images: Sequence[Image.Image] | Tensor, batch_size: int = 256) -> Tensor:
        """Features (n, width) of PIL images, of uint8 images (n, 3, h, w), or of what a vector tower takes (n, d)."""
        prepare = self.prepare_images if self.images else _vectors
        return self._encode(self.x, prepare, images, batch_size)

    def encode_texts(self, texts: Sequence[str] | Tensor, batch_size: int = 256) -> Tensor:
        """Features (n, width) of texts, or of what a vector tower takes (n, d)."""
        prepare = self.prepare_texts if self.tokenizer else _vectors
        return self._encode(self.y, prepare, texts, batch_size)

    def fit_vectors(
        self, x: Tensor | Iterable[Tensor] | None = None, y: Tensor | Iterable[Tensor] | None = None
    ) -> None:
        """Standardize vector inputs by the training vectors (n, d), whole or in batches, of either or both sides."""
        for name, side, vectors in (("x", self.x, x), ("y", self.y, y)):
            if vectors is not None:
                if not isinstance(side.tower, VectorTower):
                    raise UserError(f"{name}: takes no vectors; build the model with 'vectors' on that side")
                side.tower.fit(vectors)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write everything to a folder: weights as safetensors, the rest as JSON. See `nuclr.models.saving`."""
        from nuclr.models.saving import save

        save(self, Path(folder))

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *, x: nn.Module | None = None, y: nn.Module | None = None
    ) -> "DualEncoder":
        """Read what `save_pretrained` wrote, in eval mode; `x`, `y`: modules to fill, for sides that were such."""
        from nuclr.models.saving import load

        return load(Path(folder), x, y)

    def _encode(self, side: Encoder, prepare: Callable[[Any], Any], inputs: Any, batch_size: int) -> Tensor:
        like = next((tensor for tensor in (*side.parameters(), *side.buffers())), torch.empty(0))
        was_training = side.training
        side.eval()
        try:
            with torch.inference_mode():
                batches = (inputs[start : start + batch_size] for start in range(0, len(inputs), batch_size))
                features = [side(_to(like, prepare(batch))) for batch in batches]
        finally:
            side.train(was_training)
        if not features:
            raise UserError("nothing to encode: an empty list")
        return torch.cat(features)


def _vectors(batch: Any) -> Tensor:
    return torch.as_tensor(batch)


def _to(like: Tensor, inputs: Any) -> Any:
    """To the device of the model's weights, and to their kind of numbers; tokens stay whole numbers."""
    if isinstance(inputs, dict):
        return {name: tensor.to(like.device) for name, tensor in inputs.items()}
    return inputs.to(like)
