"""Build the encoder of one side, from a preset, a folder, a registered encoder, "vectors" or a module.

The towers of transformers models are run once on a small input, which gives the number of their features and shows at
once whether they fit their inputs.
"""

import inspect
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nuclr.errors import UserError
from nuclr.models.backbones import first_line, load_backbone, locate, make_backbone, read_config, read_json
from nuclr.models.encoder import Encoder, make_head
from nuclr.models.image_format import IMAGENET_MEAN, IMAGENET_STD, NORMALIZATIONS, ImageFormat, read_image_format
from nuclr.models.inputs import Inputs, VectorFormat
from nuclr.models.presets import (
    IMAGE_PRESETS,
    REGISTERED,
    TEXT_PRESETS,
    encoder_names,
    modality_of,
)
from nuclr.models.tokenizer import MAX_LENGTH, Tokenizer, load_tokenizer, tokenizer_for, train_tokenizer
from nuclr.models.towers import (
    OWN_TEXT_POOLING,
    POOLINGS,
    ImageTower,
    RegisteredTower,
    TextTower,
    VectorTower,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Name = str | os.PathLike[str]
EncoderSource = Name | nn.Module


@dataclass(frozen=True)
class Side:
    """The arguments of `build_model` for one side; `name` is "x" or "y". `resolve` fills in `modality`."""

    name: str
    source: EncoderSource
    head: str
    frozen: bool
    image_size: int | None
    max_length: int | None
    in_width: int | None
    texts: Iterable[str] | None
    tokenizer: Name | None
    pooling: str | None
    modality: str | None
    image_normalization: str | None = None
    folder: Path | None = None

    @property
    def key(self) -> str:
        """The settings key of the side, to name in messages."""
        return f"model.{self.name}"

    @property
    def preset(self) -> str:
        """The encoder's name if it is a preset or registered, else an empty string."""
        return str(self.source) if not self.is_module and modality_of(str(self.source)) else ""

    @property
    def is_module(self) -> bool:
        """Whether the encoder is a module of the user's."""
        return isinstance(self.source, nn.Module)


def resolve(side: Side) -> Side:
    """Return the side with its folder, if it has one, and its modality, and check that its options apply to that.

    Raises:
        UserError: if the encoder does not exist, takes another modality, or does not have an option that is set.

    """
    key = f"{side.key}.encoder"
    if side.is_module:
        return side
    if side.preset:
        takes = modality_of(side.preset)
    else:
        folder = locate(side.source, key, encoder_names(side.modality))  # type: ignore[arg-type]
        side = replace(side, folder=folder)
        takes = side.modality or _modality_of_folder(folder, key, default="image" if side.name == "x" else "text")
        if takes not in ("image", "text"):
            raise UserError(f"{key}: {side.source} is a transformers model, but side {side.name} holds {takes}s")
    if side.modality not in (None, takes):
        known = ", ".join(encoder_names(side.modality)) or "none is registered"
        raise UserError(
            f"{key}: {str(side.source)!r} takes {takes}s, but side {side.name} holds {side.modality}s; "
            f"encoders of {side.modality}s: {known}"
        )
    if side.preset not in REGISTERED:
        of_texts = {"max_length": side.max_length, "tokenizer": side.tokenizer, "pooling": side.pooling}
        of_images = {"image_size": side.image_size, "image_normalization": side.image_normalization}
        applies = dict.fromkeys(of_images, "image") | dict.fromkeys(of_texts, "text")
        for option, value in {**of_images, **of_texts}.items():
            if value is not None and applies[option] != takes:
                raise UserError(f"{side.key}.{option}: is for {applies[option]}s, but side {side.name} takes {takes}s")
    return replace(side, modality=takes)


def _modality_of_folder(folder: Path, key: str, default: str) -> str:
    """Return what a transformers model takes. For a model of both, such as a CLIP, return the side's default."""
    config = read_config(folder, key)
    if hasattr(config, "vision_config"):
        return default
    return "text" if getattr(config, "vocab_size", None) else "image"


def build_side(side: Side, width: int, trained: "PreTrainedTokenizerBase | None" = None) -> Encoder:
    """Return the encoder of a side that `resolve` returned.

    Args:
        side: what to build.
        width: number of features in the shared space.
        trained: the tokenizer that `train_tokenizers` returned for this side.

    """
    if side.is_module:
        return _module_side(side, width)
    if side.preset in REGISTERED:
        return _registered_side(side, width)
    build = {"image": _image_side, "text": _text_side, "vector": _vector_side}[str(side.modality)]
    tower, inputs, tower_width = build(side, trained)
    return Encoder(tower, make_head(side.head, tower_width, width, f"{side.key}.head"), side.frozen, inputs)


Built = tuple[nn.Module, Inputs, int]


def _image_side(side: Side, _trained: Any) -> Built:
    key, size = f"{side.key}.encoder", side.image_size
    if side.folder is None:
        preset = IMAGE_PRESETS[side.preset]
        image_format = ImageFormat(size or preset.size, IMAGENET_MEAN, IMAGENET_STD)
        backbone = make_backbone(preset.config(image_format.size))
    else:
        backbone = load_backbone(side.folder, key, "image")
        image_format = read_image_format(side.folder)
        image_format = replace(image_format, size=size or image_format.size)
    if side.image_normalization is not None:
        mean, std = NORMALIZATIONS[side.image_normalization]
        image_format = replace(image_format, mean=mean, std=std)
    tower = ImageTower(backbone, image_format.size)
    return tower, image_format, probe(tower, image_format, key, side.source)


def _vector_side(side: Side, _trained: Any) -> Built:
    if side.in_width is None:
        raise UserError(
            f"{side.name}_width: missing; {side.name}='vectors' needs the number of coordinates of the vectors"
        )
    return VectorTower(side.in_width), VectorFormat(side.in_width), side.in_width


# -- texts -------------------------------------------------------------------------------------------------------------


def train_tokenizers(sides: list[Side]) -> "dict[str, PreTrainedTokenizerBase]":
    """Train one tokenizer on the texts of all sides that need one: presets of texts without `tokenizer`.

    Args:
        sides: the resolved sides; one side if both share an encoder, with the texts of both.

    Returns:
        The tokenizer per side, under the side's name.

    Raises:
        UserError: if a side's texts are missing.

    """
    needed = [side for side in sides if side.preset in TEXT_PRESETS and side.tokenizer is None]
    for side in needed:
        if side.texts is None:
            raise UserError(
                f"{side.key}.encoder: {side.preset!r} has no tokenizer; pass {side.name}_texts= to train one, "
                f"or set {side.key}.tokenizer to a folder"
            )
    if not needed:
        return {}
    vocabulary = max(TEXT_PRESETS[side.preset].vocabulary for side in needed)
    tokenizer = train_tokenizer(chain.from_iterable(side.texts or () for side in needed), vocabulary)
    return {side.name: tokenizer for side in needed}


def _text_side(side: Side, trained: "PreTrainedTokenizerBase | None") -> Built:
    key = f"{side.key}.encoder"
    own = load_tokenizer(side.tokenizer, f"{side.key}.tokenizer", hub=True) if side.tokenizer is not None else trained
    if side.folder is None:
        preset = TEXT_PRESETS[side.preset]
        assert own is not None  # train_tokenizers has refused a preset without one
        side = replace(side, max_length=side.max_length or preset.max_length)
        tower = preset.tower(len(own), side.max_length or preset.max_length)
    else:
        tower = TextTower(load_backbone(side.folder, key, "text"))
        own = own or load_tokenizer(side.folder, key)
    if isinstance(tower, TextTower):
        tower.pooling = _pooling(side, tower)
        tokenizer = tokenizer_for(tower.backbone.config, own, side.max_length, side.key)
    else:
        if side.pooling == "first":
            raise UserError(f"{side.key}.pooling: {side.preset!r} is a mean over tokens; leave it out")
        tokenizer = Tokenizer(own, side.max_length or MAX_LENGTH)
    return tower, tokenizer, probe(tower, tokenizer, key, side.source)


def _pooling(side: Side, tower: TextTower) -> Any:
    """Return the pooling that is set, else that of a sentence-transformers folder, else "first"."""
    if side.pooling is not None:
        if side.pooling not in POOLINGS:
            raise UserError(f"{side.key}.pooling: {side.pooling!r} is not allowed; use one of {', '.join(POOLINGS)}")
        if tower.backbone.config.model_type in OWN_TEXT_POOLING:
            raise UserError(f"{side.key}.pooling: {side.source} has a pooling of its own; leave it out")
        return side.pooling
    path = None if side.folder is None else side.folder / "1_Pooling" / "config.json"
    return "first" if path is None or not path.is_file() else read_pooling(path, side.key)


def read_pooling(path: Path, key: str) -> str:
    """Return the pooling that sentence-transformers has written to 1_Pooling/config.json.

    Args:
        path: the file.
        key: the settings key of the side, to name in messages.

    Raises:
        UserError: if it is another pooling than the first token or the mean.

    """
    content = read_json(path)
    modes = [name.removeprefix("pooling_mode_") for name, on in content.items() if on is True and "_mode_" in name]
    mode = content.get("pooling_mode") or modes
    names = {"cls": "first", "cls_token": "first", "mean": "mean", "mean_tokens": "mean"}
    found = [names.get(str(name)) for name in (mode if isinstance(mode, list) else [mode])]
    if len(found) != 1 or found[0] is None:
        raise UserError(f"{key}.pooling: {path} asks for {str(mode)[:80]}; set one of {', '.join(POOLINGS)} instead")
    return found[0]


# -- encoders from elsewhere -------------------------------------------------------------------------------------------


def _module_side(side: Side, width: int) -> Encoder:
    """Return an encoder around a module; `image_size` or `tokenizer` say how its items are prepared."""
    inputs: Inputs | None = None
    if side.image_size is not None:
        inputs = ImageFormat(side.image_size, IMAGENET_MEAN, IMAGENET_STD)
    elif side.tokenizer is not None:
        own = load_tokenizer(side.tokenizer, f"{side.key}.tokenizer", hub=True)
        inputs = Tokenizer(own, side.max_length or MAX_LENGTH)
    head = None if side.in_width is None else make_head(side.head, side.in_width, width, f"{side.key}.head")
    return Encoder(side.source, head, side.frozen, inputs)  # type: ignore[arg-type]


def _registered_side(side: Side, width: int) -> Encoder:
    options = {
        "image_size": side.image_size,
        "max_length": side.max_length,
        "in_width": side.in_width,
        "pooling": side.pooling,
    }
    options = {name: value for name, value in options.items() if value is not None}
    tower, inputs = build_registered(side.preset, options, side.key)
    tower_width = getattr(tower.module, "width", None)
    if not isinstance(tower_width, int):
        raise UserError(
            f"{side.key}.encoder: the module that {side.preset!r} builds needs the attribute width, "
            "its number of output features"
        )
    return Encoder(tower, make_head(side.head, tower_width, width, f"{side.key}.head"), side.frozen, inputs)


def build_registered(name: str, options: dict[str, Any], key: str) -> tuple[RegisteredTower, Inputs | None]:
    """Return the tower and the inputs of a registered encoder.

    Raises:
        UserError: if it is not registered, or does not have an option.

    """
    if name not in REGISTERED:
        raise UserError(f"{key}.encoder: {name!r} is not registered; load its plugin first (the setting `plugins`)")
    build = REGISTERED[name].build
    parameters = inspect.signature(build).parameters
    for option in options:
        if option not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            raise UserError(f"{key}.{option}: the encoder {name!r} does not have this option; leave it out")
    module, inputs = build(**options)
    return RegisteredTower(module, name, options, REGISTERED[name].modality), inputs


# -- probes ------------------------------------------------------------------------------------------------------------


def probe(encoder: nn.Module, inputs: Inputs, key: str, source: object) -> int:
    """Return the number of features of a tower or an encoder, found by encoding one image or two texts.

    Args:
        encoder: it takes images or texts.
        inputs: how its items are prepared.
        key: the settings key to name in messages.
        source: where the encoder comes from, to name in messages.

    Raises:
        UserError: if the encoder does not take its inputs, or gives all texts the same features.

    """
    if isinstance(inputs, ImageFormat):
        items, what = torch.zeros(1, 3, inputs.size, inputs.size), f"{inputs.size}-pixel images"
    else:
        items, what = inputs.prepare(["one dog", "two white cats"]), "its tokenizer's output"
    try:
        features = _probe(encoder, items)
    except Exception as error:  # a network from elsewhere may raise anything
        raise UserError(f"{key}: {source} does not accept {what} ({first_line(error)})") from None
    if isinstance(items, dict) and torch.equal(*features) and not torch.equal(*items["input_ids"]):
        raise UserError(
            f"{key}: {source} is a decoder: its first token does not attend to the others; use an encoder such as "
            f"BERT, or set {key.removesuffix('.encoder')}.pooling to mean"
        )
    return features.shape[1]


def _probe(encoder: nn.Module, inputs: Any) -> Tensor:
    """Return features in eval mode, and turn off the gradient of parameters that they do not depend on.

    Mask tokens and unused poolers are such parameters: DistributedDataParallel would wait for their gradients.
    """
    was_training = encoder.training
    encoder.eval()
    with torch.enable_grad():
        features: Tensor = encoder(inputs)
        parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(features.sum(), parameters, allow_unused=True) if parameters else ()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)
    encoder.train(was_training)
    return features.detach()
