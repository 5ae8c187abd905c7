"""Build a dual encoder: `build_model`.

Each side is named by a preset, a folder, a name on the Hugging Face hub, "vectors", a registered encoder, or a module.
Any modality can be on either side, and one encoder can serve both.
"""

from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from nuclr.errors import UserError
from nuclr.models.backbones import PART, load_backbone, locate, make_backbone, probe, read_config, read_json
from nuclr.models.dual_encoder import DualEncoder
from nuclr.models.encoder import Encoder, EncoderSide, EncoderSource, Head, Inputs, Name, VectorFormat
from nuclr.models.image_format import IMAGENET_MEAN, IMAGENET_STD, NORMALIZATIONS, ImageFormat, read_image_format
from nuclr.models.presets import (
    IMAGE_PRESETS,
    MODALITIES,
    REGISTERED,
    TEXT_PRESETS,
    build_registered,
    default_encoder,
    encoder_names,
)
from nuclr.models.pretrained import open_pretrained
from nuclr.models.tokenizer import MAX_LENGTH, Tokenizer, load_tokenizer, tokenizer_for, train_tokenizer
from nuclr.models.towers import OWN_TEXT_POOLING, POOLINGS, ImageTower, Pooling, TextTower, VectorTower

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WIDTH = 256
DEFAULT_MODALITIES = {"x": "image", "y": "text"}
APPLIES_TO = {
    "image_size": "image",
    "image_normalization": "image",
    "max_length": "text",
    "tokenizer": "text",
    "pooling": "text",
}
SENTENCE_TRANSFORMERS_POOLINGS: dict[Pooling, tuple[str | list[str], ...]] = {
    "first": ("cls", ["cls"], ["cls_token"]),
    "mean": ("mean", ["mean"], ["mean_tokens"]),
}
Built = tuple[nn.Module, Inputs | None, int | None]  # tower, inputs, number of features (None: no head)


def build_model(
    x: EncoderSource | EncoderSide | None = None,
    y: EncoderSource | EncoderSide | None = None,
    *,
    shared: bool = False,
    pretrained: Name | None = None,
    width: int | None = None,
) -> DualEncoder:
    """Build a dual encoder in train mode. Random weights are drawn from torch's global generator.

    Args:
        x: the encoder of side x: its name, a folder, a module, or an `EncoderSide` with more options. Default:
            "tiny_resnet".
        y: the encoder of side y. Default: "tiny_text", or that of side x if it is `shared`.
        shared: use one encoder, with one head, for both sides. The options of side x apply.
        pretrained: a CLIP, a SigLIP or a dual encoder saved by nuclr, as a folder or hub name. It has its own
            encoders, heads, tokenizers and pooling, which cannot be set with it.
        width: number of features in the shared space. Default: 256, or the width of `pretrained`.

    Returns:
        The model: `model(x, y)` gives unit-norm features of both sides.

    Raises:
        UserError: if an argument is not usable. The message names it by its settings key, such as `model.x.encoder`.

    Example:
        >>> from nuclr.models import EncoderSide, build_model
        >>> texts = ["a red circle", "two green squares"]
        >>> model = build_model("tiny_resnet", EncoderSide("tiny_text", texts=texts), width=64)
        >>> model.encode_texts("a red square").shape
        torch.Size([1, 64])
        >>> build_model(EncoderSide("tiny_text", texts=texts), shared=True, width=64).shared
        True

    """
    sides = {name: side if isinstance(side, EncoderSide) else EncoderSide(side) for name, side in (("x", x), ("y", y))}
    if pretrained is not None:
        return open_pretrained(pretrained, sides, shared, width).train()
    if shared:
        sides = {"x": _merge(sides["x"], sides["y"])}
    resolved = {name: resolve(side, name) for name, side in sides.items()}
    trained = _train_tokenizer(resolved)
    encoders = [_build_encoder(side, f"model.{name}", width or WIDTH, trained) for name, side in resolved.items()]
    return DualEncoder(encoders[0], encoders[-1]).train()


def _merge(x: EncoderSide, y: EncoderSide) -> EncoderSide:
    """Return the one side of a shared encoder, with the texts of both; refuse options of y that differ from x's."""
    for field in fields(EncoderSide):
        value = getattr(x, field.name)
        other = getattr(y, field.name)
        unknown = value is None and field.name in ("modality", "width")
        if field.name != "texts" and other not in (field.default, value) and not unknown:
            raise UserError(
                f"model.y.{field.name}: {other} differs from side x ({value}); one encoder cannot serve both: leave it "
                "out, or set model.shared=false"
            )
    texts = [side.texts for side in (x, y) if side.texts is not None]
    return replace(
        x,
        texts=chain.from_iterable(texts) if texts else None,
        modality=x.modality or y.modality,
        width=x.width or y.width,
    )


def resolve(side: EncoderSide, name: str) -> EncoderSide:
    """Return the side with its encoder and modality filled in, and check that its options apply to that.

    Args:
        side: what to build.
        name: "x" or "y".

    Returns:
        The side whose `encoder` is a module, the name of a preset or registered encoder, or the `Path` of a folder.

    Raises:
        UserError: if the encoder does not exist, takes another modality, or does not have an option that is set.

    """
    if isinstance(side.encoder, nn.Module):
        return side
    key = f"model.{name}"
    encoder = side.encoder or default_encoder(side.modality or DEFAULT_MODALITIES[name], key)
    takes = MODALITIES.get(str(encoder))
    if takes is None:
        encoder = locate(encoder, f"{key}.encoder", encoder_names(side.modality))
        config = read_config(encoder, f"{key}.encoder")
        takes = "text" if getattr(config, "vocab_size", None) else "image"
        if side.modality in PART:
            takes = side.modality
        elif hasattr(config, "vision_config"):  # a model of both, such as a CLIP: each side takes its usual tower
            takes = DEFAULT_MODALITIES[name]
    if side.modality not in (None, takes):
        known = ", ".join(encoder_names(side.modality)) or "none is registered"
        raise UserError(
            f"{key}.encoder: {str(encoder)!r} takes {takes}s, but side {name} holds {side.modality}s; "
            f"encoders of {side.modality}s: {known}"
        )
    for option, modality in APPLIES_TO.items():
        if encoder not in REGISTERED and modality != takes and getattr(side, option) is not None:
            raise UserError(f"{key}.{option}: is for {modality}s, but side {name} takes {takes}s")
    return replace(
        side,
        encoder=encoder,
        modality=takes,
    )


def _train_tokenizer(sides: dict[str, EncoderSide]) -> "PreTrainedTokenizerBase | None":
    """Train one tokenizer on the texts of all sides that need one: presets of texts without `tokenizer`."""
    texts = []
    vocabularies = []
    for name, side in sides.items():
        if side.encoder in TEXT_PRESETS and side.tokenizer is None:
            if side.texts is None:
                raise UserError(
                    f"model.{name}.encoder: {side.encoder!r} has no tokenizer; pass EncoderSide(texts=...) to train "
                    f"one, or set model.{name}.tokenizer to a folder"
                )
            texts.append(side.texts)
            vocabularies.append(TEXT_PRESETS[side.encoder].vocabulary)
    return train_tokenizer(chain.from_iterable(texts), max(vocabularies)) if texts else None


# -- the encoder of one side -------------------------------------------------------------------------------------------


def _build_encoder(
    side: EncoderSide,
    key: str,
    width: int,
    trained: "PreTrainedTokenizerBase | None",
) -> Encoder:
    """Return the encoder of a side that `resolve` returned; `trained` is the tokenizer of text presets."""
    if isinstance(side.encoder, nn.Module):
        built = _from_module(side, side.encoder, key)
    elif side.encoder in REGISTERED:
        built = _from_plugin(side, key)
    elif side.modality == "image":
        built = _image_tower(side, key)
    elif side.modality == "text":
        built = _text_tower(side, key, trained)
    elif side.width is None:
        raise UserError(f"{key}.width: missing; 'vectors' needs the number of coordinates of the vectors")
    else:
        built = (VectorTower(side.width), VectorFormat(side.width), side.width)
    tower, inputs, tower_width = built
    if tower_width is None:
        return Encoder(tower, None, side.frozen, inputs)
    if side.head == "none" and tower_width != width:
        raise UserError(
            f"{key}.head: 'none' keeps the tower's {tower_width} features, but model.width is {width}; "
            f"set model.width={tower_width}, or use 'linear'"
        )
    return Encoder(
        tower,
        Head(side.head, tower_width, width),
        side.frozen,
        inputs,
    )


def _image_tower(side: EncoderSide, key: str) -> Built:
    if isinstance(side.encoder, Path):
        backbone = load_backbone(side.encoder, f"{key}.encoder", "image")
        image_format = read_image_format(side.encoder)
        image_format = replace(image_format, size=side.image_size or image_format.size)
    else:
        preset = IMAGE_PRESETS[str(side.encoder)]
        image_format = ImageFormat(side.image_size or preset.size, IMAGENET_MEAN, IMAGENET_STD)
        backbone = make_backbone(preset.config(image_format.size))
    if side.image_normalization is not None:
        mean, std = NORMALIZATIONS[side.image_normalization]
        image_format = replace(
            image_format,
            mean=mean,
            std=std,
        )
    tower = ImageTower(backbone, image_format.size)
    return tower, image_format, probe(tower, image_format, f"{key}.encoder", side.encoder)


def _text_tower(
    side: EncoderSide,
    key: str,
    trained: "PreTrainedTokenizerBase | None",
) -> Built:
    max_length = side.max_length
    own = None if side.tokenizer is None else load_tokenizer(side.tokenizer, f"{key}.tokenizer", hub=True)
    if isinstance(side.encoder, Path):
        tower: nn.Module = TextTower(load_backbone(side.encoder, f"{key}.encoder", "text"))
        own = own or load_tokenizer(side.encoder, f"{key}.encoder")
    else:
        preset = TEXT_PRESETS[str(side.encoder)]
        max_length = max_length or preset.max_length
        own = own or trained
        assert own is not None  # _train_tokenizer has refused a preset without one
        tower = preset.tower(len(own), max_length)
    if isinstance(tower, TextTower):
        tower = TextTower(tower.backbone, _pooling(side, key, tower))
        tokenizer = tokenizer_for(
            tower.backbone.config,
            own,
            max_length,
            key,
        )
    else:
        tokenizer = Tokenizer(own, max_length or MAX_LENGTH)
    return tower, tokenizer, probe(tower, tokenizer, f"{key}.encoder", side.encoder)


def _pooling(
    side: EncoderSide,
    key: str,
    tower: TextTower,
) -> Pooling:
    """Return the pooling that is set, else that of a sentence-transformers folder, else "first"."""
    if side.pooling is not None and tower.backbone.config.model_type in OWN_TEXT_POOLING:
        raise UserError(f"{key}.pooling: {side.encoder} has a pooling of its own; leave it out")
    path = Path(str(side.encoder)) / "1_Pooling" / "config.json"
    if side.pooling is not None or not path.is_file():
        return side.pooling or "first"  # type: ignore[return-value]
    content = read_json(path)
    # Older versions write one flag per mode (pooling_mode_mean_tokens), newer ones the name (pooling_mode).
    modes = [name.removeprefix("pooling_mode_") for name, on in content.items() if on is True and "_mode_" in name]
    mode = content.get("pooling_mode") or modes
    for pooling, names in SENTENCE_TRANSFORMERS_POOLINGS.items():
        if mode in names:
            return pooling
    raise UserError(f"{key}.pooling: {path} asks for {str(mode)[:80]}; set one of {', '.join(POOLINGS)} instead")


def _from_module(
    side: EncoderSide,
    module: nn.Module,
    key: str,
) -> Built:
    """Return a module of the user's; `image_size` or `tokenizer` say how its items are prepared."""
    inputs: Inputs | None = None
    if side.image_size is not None:
        inputs = ImageFormat(side.image_size, IMAGENET_MEAN, IMAGENET_STD)
    elif side.tokenizer is not None:
        tokenizer = load_tokenizer(side.tokenizer, f"{key}.tokenizer", hub=True)
        inputs = Tokenizer(tokenizer, side.max_length or MAX_LENGTH)
    return module, inputs, side.width


def _from_plugin(side: EncoderSide, key: str) -> Built:
    options = {
        "image_size": side.image_size,
        "max_length": side.max_length,
        "in_width": side.width,
        "pooling": side.pooling,
    }
    options = {name: value for name, value in options.items() if value is not None}
    tower, inputs = build_registered(str(side.encoder), options, key)
    return tower, inputs, int(tower.module.width)  # type: ignore[arg-type]
