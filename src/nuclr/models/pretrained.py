"""Load a CLIP or SigLIP as a dual encoder with its own projections, and save it so that other tools can read it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nuclr.models.backbones import class_of, load_joint, quiet
from nuclr.models.encoder import Encoder
from nuclr.models.image_format import ImageFormat, read_image_format, write_image_format
from nuclr.models.tokenizer import Tokenizer, load_tokenizer, tokenizer_for
from nuclr.models.towers import ImageTower, TextTower

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROJECTIONS = {"clip": ("visual_projection", "text_projection")}  # SigLIP's projections are part of its towers
PROCESSORS = {"clip": "CLIPImageProcessor", "siglip": "SiglipImageProcessor"}


@dataclass(frozen=True)
class Joint:
    """The parts of a CLIPModel or SiglipModel that belong to neither side.

    Args:
        config: its configuration.
        logits: scale and bias of its loss. They are kept unchanged: in training, the objective has the temperature.

    """

    config: "PreTrainedConfig"
    logits: dict[str, Tensor]

    @property
    def width(self) -> int:
        """Number of features in the shared space."""
        config = self.config
        return config.projection_dim if config.model_type == "clip" else config.text_config.projection_size

    @property
    def temperature(self) -> float:
        """The temperature at the end of its pretraining."""
        return float(torch.exp(-self.logits["logit_scale"]))


def open_joint(
    folder: Path, key: str, size: int | None, max_length: int | None
) -> tuple[list[Encoder], ImageFormat, Tokenizer, Joint]:
    """Open a CLIP or SigLIP as transformers saves it.

    Args:
        folder: the folder of the model.
        key: the settings key to name in messages.
        size: height and width of images in pixels. Default: the model's own.
        max_length: largest number of tokens per text. Default: the model's own.

    Returns:
        Both encoders, the image format, the tokenizer, and the parts that belong to neither side.

    """
    image_format = read_image_format(folder)
    image_format = replace(image_format, size=size or image_format.size)
    sides, joint = read_joint(folder, key, image_format.size)
    tokenizer = tokenizer_for(joint.config.text_config, load_tokenizer(folder, key), max_length)
    return sides, image_format, tokenizer, joint


def read_joint(folder: Path, key: str, size: int) -> tuple[list[Encoder], Joint]:
    """Return both encoders of a CLIP or SigLIP, for images of `size`, and the parts that belong to neither."""
    model: Any = load_joint(folder, key)
    heads = [getattr(model, name) for name in PROJECTIONS.get(model.config.model_type, ())] or [None, None]
    towers = (ImageTower(model.vision_model, size), TextTower(model.text_model))
    sides = [Encoder(tower, head) for tower, head in zip(towers, heads, strict=True)]
    logits = {name: value.detach().clone() for name, value in model.named_parameters(recurse=False)}
    return sides, Joint(model.config, logits)


def write_joint(joint: Joint, folder: Path, x: Encoder, y: Encoder, image_format: ImageFormat) -> None:
    """Save two encoders as the CLIPModel or SiglipModel that they came from."""
    model_type = joint.config.model_type
    with torch.device("meta"):
        model = class_of(joint.config)(joint.config)
    model.vision_model, model.text_model = x.tower.backbone, y.tower.backbone
    for name, encoder in zip(PROJECTIONS.get(model_type, ()), (x, y), strict=False):
        setattr(model, name, encoder.head)
    for name, value in joint.logits.items():
        setattr(model, name, nn.Parameter(value))
    with quiet():
        model.save_pretrained(folder)
    write_image_format(image_format, folder, PROCESSORS[model_type])
