"""Load a CLIP or SigLIP as a dual encoder with its own projections, and save it so that other tools can read it."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nuclr.models.backbones import class_of, load_joint, quiet
from nuclr.models.encoder import Encoder
from nuclr.models.image_format import ImageFormat, read_image_format, write_image_format
from nuclr.models.tokenizer import load_tokenizer, tokenizer_for
from nuclr.models.towers import ImageTower, TextTower

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROJECTIONS = {"clip": ("visual_projection", "text_projection")}  # SigLIP's projections are part of its towers


@dataclass(frozen=True)
class Joint:
    """The parts of a CLIPModel or SiglipModel that belong to neither side.

    Args:
        config: its configuration.
        logits: scale and bias of its loss. In training the objective has the temperature; `with_temperature` sets the
            scale afterwards.

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
        """The temperature at the end of its last training."""
        return float(torch.exp(-self.logits["logit_scale"]))

    def with_temperature(self, temperature: float, bias: float | None = None) -> "Joint":
        """Return the same parts with another temperature, and with another bias if the model has one.

        Args:
            temperature: the divisor of the scores, as in the objectives.
            bias: the bias that a SigLIP adds to its logits; None to keep it.

        """
        values = {"logit_scale": -math.log(temperature)} | ({} if bias is None else {"logit_bias": bias})
        logits = {name: torch.full_like(old, values.get(name, old.item())) for name, old in self.logits.items()}
        return replace(self, logits=logits)


def open_joint(
    folder: Path, key: str, size: int | None, max_length: int | None, text_key: str
) -> tuple[Encoder, Encoder, Joint]:
    """Open a CLIP or SigLIP as transformers saves it.

    Args:
        folder: the folder of the model.
        key: the settings key to name in messages.
        size: height and width of images in pixels. Default: the model's own.
        max_length: largest number of tokens per text. Default: the model's own.
        text_key: the settings key of the side that takes texts ("model.y").

    Returns:
        The encoder of images, the encoder of texts, and the parts that belong to neither.

    """
    image_format = read_image_format(folder)
    image_format = replace(image_format, size=size or image_format.size)
    images, texts, joint = read_joint(folder, key, image_format.size)
    images.inputs = image_format
    texts.inputs = tokenizer_for(joint.config.text_config, load_tokenizer(folder, key), max_length, text_key)
    return images, texts, joint


def read_joint(folder: Path, key: str, size: int) -> tuple[Encoder, Encoder, Joint]:
    """Return both encoders of a CLIP or SigLIP, for images of `size` and for texts, and the parts of neither."""
    model: Any = load_joint(folder, key)
    heads = [getattr(model, name) for name in PROJECTIONS.get(model.config.model_type, ())] or [None, None]
    towers = (ImageTower(model.vision_model, size), TextTower(model.text_model))
    images, texts = (Encoder(tower, head) for tower, head in zip(towers, heads, strict=True))
    logits = {name: value.detach().clone() for name, value in model.named_parameters(recurse=False)}
    return images, texts, Joint(model.config, logits)


def write_joint(joint: Joint, folder: Path, images: Encoder, texts: Encoder) -> None:
    """Save the encoders of images and of texts as the CLIPModel or SiglipModel that they came from."""
    model_type = joint.config.model_type
    with torch.device("meta"):
        model = class_of(joint.config)(joint.config)
    model.vision_model, model.text_model = images.tower.backbone, texts.tower.backbone
    for name, encoder in zip(PROJECTIONS.get(model_type, ()), (images, texts), strict=False):
        setattr(model, name, encoder.head)
    for name, value in joint.logits.items():
        setattr(model, name, nn.Parameter(value))
    with quiet():
        model.save_pretrained(folder)
    if isinstance(images.inputs, ImageFormat):
        write_image_format(images.inputs, folder)
