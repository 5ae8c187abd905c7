"""An existing CLIP or SigLIP as a dual encoder, with its own projections; and back, so that other tools can read it."""

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

PROJECTIONS = {"clip": ("visual_projection", "text_projection")}  # SigLIP's towers end with theirs
PROCESSORS = {"clip": "CLIPImageProcessor", "siglip": "SiglipImageProcessor"}


@dataclass(frozen=True)
class Joint:
    """What of a CLIPModel or SiglipModel belongs to neither side: its configuration, the scale and bias of its loss.

    `logits` are kept as they were: from here on the temperature is the objective's.
    """

    config: "PreTrainedConfig"
    logits: dict[str, Tensor]

    @property
    def width(self) -> int:
        """Of the space that its projections share."""
        config = self.config
        return config.projection_dim if config.model_type == "clip" else config.text_config.projection_size

    @property
    def temperature(self) -> float:
        """What its training ended with, to go on from."""
        return float(torch.exp(-self.logits["logit_scale"]))


def open_joint(
    folder: Path, key: str, size: int | None, max_length: int | None
) -> tuple[list[Encoder], ImageFormat, Tokenizer, Joint]:
    """Both sides of the model in a folder of someone else's, how their inputs are prepared, and the rest of it."""
    images = read_image_format(folder)
    images = replace(images, size=size or images.size)
    sides, joint = read_joint(folder, key, images.size)
    texts = tokenizer_for(joint.config.text_config, load_tokenizer(folder, key), max_length)
    return sides, images, texts, joint


def read_joint(folder: Path, key: str, size: int) -> tuple[list[Encoder], Joint]:
    """Both sides, for images of `size`, and the rest."""
    model: Any = load_joint(folder, key)
    heads = [getattr(model, name) for name in PROJECTIONS.get(model.config.model_type, ())] or [None, None]
    towers = (ImageTower(model.vision_model, size), TextTower(model.text_model))
    sides = [Encoder(tower, head) for tower, head in zip(towers, heads, strict=True)]
    logits = {name: value.detach().clone() for name, value in model.named_parameters(recurse=False)}
    return sides, Joint(model.config, logits)


def write_joint(joint: Joint, folder: Path, x: Encoder, y: Encoder, images: ImageFormat) -> None:
    """Write the CLIPModel or SiglipModel that it was, with the encoders' weights."""
    kind = joint.config.model_type
    with torch.device("meta"):
        shell = class_of(joint.config)(joint.config)
    shell.vision_model, shell.text_model = x.tower.backbone, y.tower.backbone
    for name, encoder in zip(PROJECTIONS.get(kind, ()), (x, y), strict=False):
        setattr(shell, name, encoder.head)
    for name, value in joint.logits.items():
        setattr(shell, name, nn.Parameter(value))
    with quiet():
        shell.save_pretrained(folder)
    write_image_format(images, folder, PROCESSORS[kind])
