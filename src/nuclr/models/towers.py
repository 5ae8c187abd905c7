"""Towers: one modality's inputs -> features (b, d). Images and texts through transformers; vectors as they are.

An image is pooled globally, by the network's own pooling where it has one, else as the mean over its positions. A text
is pooled at its first token, [CLS], except by the text towers of CLIP and SigLIP, which were trained with a pooling of
their own.
"""

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nuclr.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN_TEXT_POOLING = ("clip_text_model", "siglip_text_model")


class ImageTower(nn.Module):
    """Normalized pixels (b, 3, size, size) -> (b, d)."""

    def __init__(self, backbone: "PreTrainedModel", size: int) -> None:
        super().__init__()
        # Convolutions run up to twice as fast with the channels last, on CPUs as on GPUs.
        self.backbone = backbone
        nn.Module.to(backbone, memory_format=torch.channels_last)  # type: ignore[call-overload]
        trained_at = getattr(backbone.config, "image_size", size)
        takes_other_sizes = "interpolate_pos_encoding" in inspect.signature(backbone.forward).parameters
        self._interpolate = takes_other_sizes and trained_at not in (size, [size, size], (size, size))

    def forward(self, pixels: Tensor) -> Tensor:
        """Features (b, d)."""
        options: dict[str, Any] = {"interpolate_pos_encoding": True} if self._interpolate else {}
        output = self.backbone(pixel_values=pixels.contiguous(memory_format=torch.channels_last), **options)
        if output.get("pooler_output") is not None:
            return output.pooler_output.flatten(1)
        hidden = output.last_hidden_state  # (b, positions, d) or (b, d, h, w)
        return hidden.mean(1) if hidden.ndim == 3 else hidden.mean((2, 3))


class TextTower(nn.Module):
    """A tokenizer's tensors, `input_ids` (b, length) among them -> (b, d)."""

    def __init__(self, backbone: "PreTrainedModel") -> None:
        super().__init__()
        self.backbone = backbone
        self._own_pooling = backbone.config.model_type in OWN_TEXT_POOLING

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        """Features (b, d)."""
        output = self.backbone(**tokens)
        return output.pooler_output if self._own_pooling else output.last_hidden_state[:, 0]


class VectorTower(nn.Module):
    """Vectors of some other encoder (b, d), centered and scaled as `fit` found; before it, unchanged.

    Buffers: `mean` (d,) and `std` (), one for all coordinates: that they vary by more or less is part of what the other
    encoder learnt (on Flickr8k's embeddings, a scale for each costs a point of recall@1).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(()))

    def forward(self, vectors: Tensor) -> Tensor:
        """Standardized vectors (b, d)."""
        self._check(vectors)
        return (vectors.to(self.mean.dtype) - self.mean) / self.std

    @torch.no_grad()
    def fit(self, vectors: Tensor | Iterable[Tensor]) -> None:
        """Take both from the training vectors (n, d), whole or in batches."""
        count, total, squares = 0, torch.zeros(1), torch.zeros(())
        shift = None  # squares about a point of the data lose no digits where the mean is far from zero
        for batch in [vectors] if isinstance(vectors, Tensor) else vectors:
            self._check(batch)
            if shift is None:
                shift = batch[0].double()
            centered = batch.double() - shift
            count, total = count + len(batch), total + centered.sum(0)
            squares = squares + torch.linalg.vector_norm(centered).square()
        if shift is None or count < 2:
            raise UserError(f"standardizing needs at least two vectors; got {count}")
        mean = total / count
        variance = squares / count / len(shift) - mean.square().mean()
        if variance <= 0:
            raise UserError("standardizing needs vectors that differ; all are the same")
        self.mean.copy_(shift + mean)
        self.std.copy_(variance.sqrt())

    def _check(self, vectors: Tensor) -> None:
        if vectors.ndim != 2 or vectors.shape[1] != len(self.mean):
            raise UserError(f"vectors of shape {tuple(vectors.shape)}; this model takes (n, {len(self.mean)})")
