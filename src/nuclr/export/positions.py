"""Image backbones at the size they were trained with.

An image tower of nuclr interpolates the position embeddings of a transformer that was made for images of another size.
Other tools do this only on request. An export stores the interpolated embeddings, which gives the same features.
"""

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch

from nuclr.errors import UserError
from nuclr.models.towers import ImageTower

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-5  # relative to the largest feature
NAMES = ("embeddings.position_embedding.weight", "embeddings.position_embeddings")


def at_own_size(tower: ImageTower, target: str) -> "PreTrainedModel":
    """Return the backbone of an image tower so that it takes images of the tower's size without further options.

    Args:
        tower: the image tower.
        target: the value of `--to`, to name in messages.

    Returns:
        The backbone itself, or a copy with interpolated position embeddings.

    Raises:
        UserError: if the position embeddings of this architecture cannot be stored at another size.

    """
    backbone, size = tower.backbone, tower.size
    if not tower.interpolates:
        return backbone
    refusal = UserError(
        f"--to {target}: the image encoder ({backbone.config.model_type}) was made for images of "
        f"{backbone.config.image_size} pixels, and cannot be stored for {size} pixels; use --to onnx instead"
    )
    state = backbone.state_dict()
    name = next((name for name in NAMES if name in state), None)
    if name is None:
        raise refusal
    config = copy.deepcopy(backbone.config)
    config.image_size = size
    has_pooler = "add_pooling_layer" in inspect.signature(type(backbone)).parameters
    options = {"add_pooling_layer": False} if has_pooler else {}
    resized = type(backbone)(config, **options).eval()
    places = torch.empty(1, resized.state_dict()[name].numel() // state[name].shape[-1], state[name].shape[-1])
    embeddings: Any = backbone.embeddings
    state[name] = embeddings.interpolate_pos_encoding(places, size, size)
    state[name] = state[name].reshape(resized.state_dict()[name].shape)
    resized.load_state_dict(state)
    resized.requires_grad_(False)
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    before, after = (ImageTower(model, size)(pixels) for model in (backbone, resized))
    if (before - after).abs().max() > TOLERANCE * before.abs().max():
        raise refusal
    return resized
