"""Open whole dual encoders: a CLIP or SigLIP with its own projections, or a model that nuclr saved."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nuclr.errors import UserError
from nuclr.models.backbones import class_of, load_model, locate, probe, quiet, read_config, read_json
from nuclr.models.dual_encoder import DualEncoder
from nuclr.models.encoder import Encoder, EncoderSide, Inputs, Name
from nuclr.models.image_format import ImageFormat, read_image_format
from nuclr.models.tokenizer import Tokenizer, load_tokenizer, tokenizer_for
from nuclr.models.towers import ImageTower, TextTower

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEY = "model.pretrained"
JOINT = ("clip", "siglip")
PROJECTIONS: dict[type, str] = {ImageTower: "visual_projection", TextTower: "text_projection"}


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

    def with_temperature(self, temperature: float, bias: float | None = None) -> "Joint":
        """Return the same parts with another temperature, and with another bias if the model has one.

        Args:
            temperature: the divisor of the scores, as in the objectives.
            bias: the bias that a SigLIP adds to its logits; None to keep it.

        """
        values = {"logit_scale": -math.log(temperature)} | ({} if bias is None else {"logit_bias": bias})
        logits = {name: torch.full_like(old, values.get(name, old.item())) for name, old in self.logits.items()}
        return replace(self, logits=logits)


def open_pretrained(
    source: Name,
    sides: dict[str, EncoderSide],
    shared: bool,
    width: int | None,
) -> DualEncoder:
    """Open a whole dual encoder, see `build_model`.

    Args:
        source: a folder or hub name.
        sides: what is asked of sides "x" and "y".
        shared: whether one encoder must serve both sides.
        width: the number of features that it must have; None for any.

    Raises:
        UserError: if the model has no such sides, or an option is set that belongs to the model.

    """
    folder = locate(source, KEY)
    own = ["encoder", "head", "tokenizer", "pooling", "image_normalization"]
    ours = "nuclr" in read_json(folder / "config.json")
    if ours:
        own += ["image_size", "max_length"]
    for name, side in sides.items():
        for option in own:
            if getattr(side, option) != getattr(EncoderSide, option):
                raise UserError(f"model.{name}.{option}: cannot be set together with {KEY}={source}, which has its own")
    model = DualEncoder.from_pretrained(folder) if ours else _open_joint(folder, sides)
    for name, side in sides.items():
        encoder = getattr(model, name)
        if side.modality is not None and encoder.modality != side.modality:
            takes = f"{encoder.modality or 'tensor'}s"
            raise UserError(f"{KEY}: {folder} takes {takes} on side {name}, but the data hold {side.modality}s")
        if isinstance(encoder.inputs, ImageFormat | Tokenizer):
            probe(encoder, encoder.inputs, KEY, folder)
        if side.frozen:
            encoder.freeze()
    if (shared and not model.shared) or width not in (None, model.width):
        has = f"shared={model.shared} and width={model.width}"
        raise UserError(f"model.shared: {shared}, model.width: {width}, but {folder} has {has}; leave them out")
    return model


def _open_joint(folder: Path, sides: dict[str, EncoderSide]) -> DualEncoder:
    """Open a CLIP or SigLIP as transformers saves it; images are on side x, unless side x holds texts and y images."""
    swapped = sides["x"].modality == "text" and sides["y"].modality == "image"
    image_name, text_name = ("y", "x") if swapped else ("x", "y")
    for option, name in (("image_size", text_name), ("max_length", image_name)):
        if getattr(sides[name], option) is not None:
            raise UserError(f"model.{name}.{option}: does not apply to side {name} of {folder}; leave it out")
    image_format = read_image_format(folder)
    config = read_config(folder, KEY)
    texts = getattr(config, "text_config", config)
    inputs = {
        image_name: replace(image_format, size=sides[image_name].image_size or image_format.size),
        text_name: tokenizer_for(texts, load_tokenizer(folder, KEY), sides[text_name].max_length, f"model.{text_name}"),
    }
    return read_joint(folder, KEY, inputs)


def read_joint(
    folder: Path,
    key: str,
    inputs: Mapping[str, Inputs | None],
) -> DualEncoder:
    """Return a CLIP or SigLIP whose side "x" or "y" takes images as its inputs say; `key` is for messages."""
    config = read_config(folder, key)
    if config.model_type not in JOINT:
        raise UserError(f"{key}: {folder} holds a {config.model_type!r} model; needs one of {', '.join(JOINT)}")
    model: Any = load_model(
        class_of(config),
        folder,
        key,
        config=config,
    )
    sides = {}
    for name, prepared in inputs.items():
        if isinstance(prepared, ImageFormat):
            tower: nn.Module = ImageTower(model.vision_model, prepared.size)
        else:
            tower = TextTower(model.text_model)
        # SigLIP's projections are part of its towers.
        head = getattr(model, PROJECTIONS[type(tower)], None)
        sides[name] = Encoder(tower, head, inputs=prepared)
    logits = {name: value.detach().clone() for name, value in model.named_parameters(recurse=False)}
    return DualEncoder(sides["x"], sides["y"], joint=Joint(model.config, logits))


def write_joint(
    joint: Joint,
    folder: Path,
    images: Encoder,
    texts: Encoder,
) -> None:
    """Save the encoders of images and of texts as the CLIPModel or SiglipModel that they came from."""
    with torch.device("meta"):
        model: Any = class_of(joint.config)(joint.config)
    model.vision_model = images.tower.backbone
    model.text_model = texts.tower.backbone
    for encoder in (images, texts):
        if joint.config.model_type == "clip":
            setattr(model, PROJECTIONS[type(encoder.tower)], encoder.head)
    for name, value in joint.logits.items():
        setattr(model, name, nn.Parameter(value))
    with quiet():
        model.save_pretrained(folder)
