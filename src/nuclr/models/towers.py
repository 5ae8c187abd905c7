"""Towers: map the inputs of one modality to features (b, d).

Images and texts go through a transformers model, vectors are standardized. Images are pooled globally: by the
network's own pooling if it has one, else by the mean over positions. Texts are pooled at the first token, [CLS], or by
the mean over their tokens. The text towers of CLIP and SigLIP use the pooling they were trained with. `BagOfWords` is
the mean of token embeddings alone.
"""

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from nuclr.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN_TEXT_POOLING = ("clip_text_model", "siglip_text_model")
POOLINGS = ("first", "mean")
Pooling = Literal["first", "mean"]
Vectors = Tensor | np.ndarray


class ImageTower(nn.Module):
    """Map normalized pixels (b, 3, size, size) to (b, d).

    Args:
        backbone: an image model of transformers.
        size: height and width of the images in pixels.

    """

    def __init__(self, backbone: "PreTrainedModel", size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.size = size
        # Convolutions are up to twice as fast with channels last, on CPUs and on GPUs.
        nn.Module.to(backbone, memory_format=torch.channels_last)  # type: ignore[call-overload]
        trained_at = getattr(backbone.config, "image_size", size)
        takes_other_sizes = "interpolate_pos_encoding" in inspect.signature(backbone.forward).parameters
        self.interpolates = takes_other_sizes and trained_at not in (size, [size, size], (size, size))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features (b, d)."""
        options: dict[str, Any] = {"interpolate_pos_encoding": True} if self.interpolates else {}
        output = self.backbone(pixel_values=pixels.contiguous(memory_format=torch.channels_last), **options)
        if output.get("pooler_output") is not None:
            return output.pooler_output.flatten(1)
        hidden = output.last_hidden_state  # (b, positions, d) or (b, d, h, w)
        return hidden.mean(1) if hidden.ndim == 3 else hidden.mean((2, 3))

    def __repr__(self) -> str:
        return f"ImageTower({self.backbone.config.model_type!r}, {self.size} px)"


class TextTower(nn.Module):
    """Map a tokenizer's tensors, `input_ids` (b, length) and others, to (b, d).

    Args:
        backbone: a text model of transformers.
        pooling: "first" takes the hidden state of the first token; "mean" the mean over all tokens that are not
            padding. The text towers of CLIP and SigLIP have a pooling of their own and ignore it.

    """

    def __init__(self, backbone: "PreTrainedModel", pooling: Pooling = "first") -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ValueError(f"pooling: {pooling!r}; use one of {', '.join(POOLINGS)}")
        self.backbone = backbone
        self.pooling = pooling
        self._own_pooling = backbone.config.model_type in OWN_TEXT_POOLING

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        """Return features (b, d)."""
        output = self.backbone(**tokens)
        if self._own_pooling:
            return output.pooler_output
        hidden = output.last_hidden_state
        if self.pooling == "first":
            return hidden[:, 0]
        mask = tokens.get("attention_mask")
        return hidden.mean(1) if mask is None else torch.einsum("bld,bl->bd", hidden, token_shares(mask, hidden.dtype))

    def __repr__(self) -> str:
        pooling = ", 'mean'" if self.pooling == "mean" else ""
        return f"TextTower({self.backbone.config.model_type!r}{pooling})"


class BagOfWords(nn.Module):
    """Map a tokenizer's tensors to the mean of their token embeddings, (b, width). The order of tokens is ignored.

    Args:
        vocabulary: number of tokens.
        width: number of features.

    Example:
        >>> tower = BagOfWords(vocabulary=10, width=4)
        >>> tokens = {"input_ids": torch.tensor([[1, 2, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
        >>> torch.allclose(tower(tokens), tower.embedding.weight[1:3].mean(0))
        True

    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.width = width
        self.embedding = nn.EmbeddingBag(vocabulary, width, mode="sum")

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        """Return features (b, width)."""
        shares = token_shares(tokens["attention_mask"], self.embedding.weight.dtype)
        return self.embedding(tokens["input_ids"], per_sample_weights=shares)

    def __repr__(self) -> str:
        return f"BagOfWords({self.vocabulary}, {self.width})"


def token_shares(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the share of each token in its text's mean, (b, length): 0 for padding, all 0 for an empty text."""
    return mask.to(dtype) / mask.sum(1, keepdim=True).clamp_min(1)


class VectorTower(nn.Module):
    """Standardize vectors (b, d) that another encoder computed. Until `fit` is called, they pass unchanged.

    Buffers: `mean` (d,), and `std` (), one scale for all coordinates. Their relative scales are part of what the other
    encoder has learnt: on Flickr8k's embeddings, one scale per coordinate costs a point of recall@1.

    Args:
        width: number of coordinates d.

    Example:
        >>> tower = VectorTower(2)
        >>> tower.fit(torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
        >>> tower.mean
        tensor([2., 2.])

    """

    mean: Tensor
    std: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(()))

    def forward(self, vectors: Tensor) -> Tensor:
        """Return standardized vectors (b, d)."""
        self._check(vectors)
        return (vectors.to(self.mean.dtype) - self.mean) / self.std

    @torch.no_grad()
    def fit(self, vectors: Vectors | Iterable[Vectors]) -> None:
        """Compute `mean` and `std` from training vectors (n, d), given as one array or in batches."""
        count = 0
        total = torch.zeros(1)
        squares = torch.zeros(())
        shift = torch.zeros(1)  # squares are taken about the first vector: no digits are lost if the mean is not near 0
        for array in [vectors] if isinstance(vectors, Tensor | np.ndarray) else vectors:
            batch = torch.as_tensor(array)
            self._check(batch)
            if count == 0:
                shift = batch[:1].double().sum(0)
            centered = batch.double() - shift
            count += len(batch)
            total = total + centered.sum(0)
            squares = squares + torch.linalg.vector_norm(centered).square()
        mean = total / max(count, 1)
        variance = squares / max(count, 1) / self.width - mean.square().mean()
        if variance <= 0:
            raise UserError(f"vectors: standardizing needs two different vectors; got {count}, or all are the same")
        self.mean.copy_(shift + mean)
        self.std.copy_(variance.sqrt())

    def _check(self, vectors: Tensor) -> None:
        if vectors.ndim != 2 or vectors.shape[1] != self.width:
            raise UserError(f"vectors: shape {tuple(vectors.shape)}; this model takes (n, {self.width})")

    def __repr__(self) -> str:
        return f"VectorTower({self.width})"


class RegisteredTower(nn.Module):
    """An encoder that a plugin registered, with what is needed to build it again.

    Args:
        module: a module from a batch of inputs to (b, d).
        name: the name it is registered with.
        options: the options it was built with.
        modality: the modality it is registered for.

    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        options: dict[str, Any],
        modality: str,
    ) -> None:
        super().__init__()
        self.module = module
        self.name = name
        self.options = options
        self.modality = modality

    def forward(self, inputs: Any) -> Tensor:
        """Return features (b, d)."""
        return self.module(inputs)

    def __repr__(self) -> str:
        return f"RegisteredTower({self.name!r})"
