"""Build a dual encoder from a few flat arguments: `build_model`.

Each side is named by a preset, a folder, a name on the Hugging Face hub, "vectors", or a module. The towers are run
once on a small input, which gives the number of their features and shows at once whether they fit their inputs.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nuclr.errors import UserError
from nuclr.models.backbones import (
    IMAGE_PRESETS,
    TEXT_PRESETS,
    first_line,
    load_backbone,
    locate,
    make_backbone,
    read_json,
)
from nuclr.models.dual_encoder import DualEncoder
from nuclr.models.encoder import Encoder, make_head
from nuclr.models.image_format import IMAGENET_MEAN, IMAGENET_STD, ImageFormat, read_image_format
from nuclr.models.pretrained import open_joint
from nuclr.models.saving import load
from nuclr.models.tokenizer import MAX_LENGTH, Tokenizer, load_tokenizer, tokenizer_for, train_tokenizer
from nuclr.models.towers import ImageTower, TextTower, VectorTower

WIDTH = 256
IMAGE_ENCODER, TEXT_ENCODER, HEAD = "tiny_resnet", "tiny_text", "linear"
VECTORS = "vectors"
Name = str | os.PathLike[str]
EncoderSource = Name | nn.Module


def build_model(
    x: EncoderSource = IMAGE_ENCODER,
    y: EncoderSource = TEXT_ENCODER,
    *,
    pretrained: Name | None = None,
    width: int | None = None,
    x_head: str = HEAD,
    y_head: str = HEAD,
    x_frozen: bool = False,
    y_frozen: bool = False,
    image_size: int | None = None,
    max_length: int | None = None,
    x_width: int | None = None,
    y_width: int | None = None,
    texts: Iterable[str] | None = None,
    tokenizer: Name | None = None,
) -> DualEncoder:
    """Build a dual encoder in train mode. Random weights are drawn from torch's global generator.

    Args:
        x: the encoder of side x: an image preset (`IMAGE_PRESETS`), a folder or hub name of a transformers model,
            "vectors" (inputs are embeddings already), or any module from a batch of inputs to (b, d).
        y: the encoder of side y: a text preset (`TEXT_PRESETS`), or any of the others.
        pretrained: a CLIP, a SigLIP or a dual encoder saved by nuclr, as a folder or hub name. It has its own
            encoders, heads and tokenizer, so `x`, `y`, `x_head`, `y_head` and `tokenizer` cannot be set with it.
        width: number of features in the shared space. Default: 256, or the width of `pretrained`.
        x_head: what maps the tower's features to `width`: "linear", "mlp" or "none".
        y_head: the same for side y.
        x_frozen: keep the tower of side x fixed and train only its head.
        y_frozen: the same for side y.
        image_size: height and width of images in pixels. Default: the size the tower was made for.
        max_length: largest number of tokens per text. Default: 32 for tiny_text, the full length for CLIP and SigLIP,
            otherwise at most 64.
        x_width: number of coordinates of the vectors, or of the output of a module. A module without it gets no head.
        y_width: the same for side y.
        texts: texts to train the tokenizer of a text preset on.
        tokenizer: a folder or hub name of a tokenizer to use instead of the text tower's own.

    Returns:
        The model: `model(x, y)` gives unit-norm features of both sides.

    Raises:
        UserError: if an argument is not usable. The message names it by its settings key, such as `model.x.encoder`.

    Example:
        >>> from nuclr.models import build_model
        >>> model = build_model("tiny_resnet", "tiny_text", texts=["a red circle", "two green squares"], width=64)
        >>> model.encode_texts("a red square").shape
        torch.Size([1, 64])

    """
    sizes = {"model.width": width, "model.x.image_size": image_size, "model.y.max_length": max_length}
    sizes |= {"x_width": x_width, "y_width": y_width}
    for key, value in sizes.items():
        if value is not None and value < 1:
            raise UserError(f"{key}: {value} is not allowed; needs a positive number")
    if pretrained is not None:
        replaced = {"model.x.encoder": x != IMAGE_ENCODER, "model.y.encoder": y != TEXT_ENCODER}
        replaced |= {"model.x.head": x_head != HEAD, "model.y.head": y_head != HEAD}
        replaced |= {"model.y.tokenizer": tokenizer is not None}
        for key, is_set in replaced.items():
            if is_set:
                raise UserError(
                    f"{key}: cannot be set together with model.pretrained ({pretrained}), which has its own"
                )
        model = _open_pretrained(pretrained, x_frozen, y_frozen, image_size, max_length)
        if width is not None and width != model.width:
            raise UserError(f"model.width: {width}, but {pretrained} has {model.width} features; leave model.width out")
        return model.train()
    width = width or WIDTH
    x_encoder, image_format = _image_side(x, width, x_head, x_frozen, image_size, x_width)
    y_encoder, text_format = _text_side(y, width, y_head, y_frozen, max_length, y_width, texts, tokenizer)
    return DualEncoder(x_encoder, y_encoder, images=image_format, tokenizer=text_format).train()


def _image_side(
    source: EncoderSource, width: int, head: str, frozen: bool, size: int | None, in_width: int | None
) -> tuple[Encoder, ImageFormat | None]:
    """Return the encoder of side x and its image format (None if it takes vectors, or a module prepares its inputs)."""
    if isinstance(source, nn.Module):
        image_format = ImageFormat(size, IMAGENET_MEAN, IMAGENET_STD) if size else None
        return _module_side("x", source, width, head, frozen, in_width), image_format
    if source == VECTORS:
        return _vector_side("x", width, head, frozen, in_width), None
    if source in IMAGE_PRESETS:
        preset = IMAGE_PRESETS[str(source)]
        image_format = ImageFormat(size or preset.size, IMAGENET_MEAN, IMAGENET_STD)
        backbone = make_backbone(preset.config(image_format.size))
    else:
        folder = locate(source, "model.x.encoder", [*IMAGE_PRESETS, VECTORS])
        backbone = load_backbone(folder, "model.x.encoder", "image")
        image_format = read_image_format(folder)
        image_format = replace(image_format, size=size or image_format.size)
    tower = ImageTower(backbone, image_format.size)
    tower_width = _probe_images(tower, image_format, "model.x.encoder", source)
    return Encoder(tower, make_head(head, tower_width, width, "model.x.head"), frozen), image_format


def _text_side(
    source: EncoderSource,
    width: int,
    head: str,
    frozen: bool,
    max_length: int | None,
    in_width: int | None,
    texts: Iterable[str] | None,
    tokenizer_source: Name | None,
) -> tuple[Encoder, Tokenizer | None]:
    """Return the encoder of side y and its tokenizer (None if it takes vectors, or a module prepares its inputs)."""
    own = None if tokenizer_source is None else load_tokenizer(tokenizer_source, "model.y.tokenizer", hub=True)
    if isinstance(source, nn.Module):
        tokenizer = None if own is None else Tokenizer(own, max_length or MAX_LENGTH)
        return _module_side("y", source, width, head, frozen, in_width), tokenizer
    if source == VECTORS:
        return _vector_side("y", width, head, frozen, in_width), None
    if source in TEXT_PRESETS:
        preset = TEXT_PRESETS[str(source)]
        if own is None and texts is None:
            raise UserError(
                f"model.y.encoder: {source!r} has no tokenizer; pass texts= to train one, "
                "or set model.y.tokenizer to a folder"
            )
        own = own or train_tokenizer(texts or (), preset.vocabulary)
        max_length = max_length or preset.max_length
        backbone = make_backbone(preset.config(len(own), max_length))
        tokenizer = tokenizer_for(backbone.config, own, max_length)
    else:
        folder = locate(source, "model.y.encoder", [*TEXT_PRESETS, VECTORS])
        backbone = load_backbone(folder, "model.y.encoder", "text")
        tokenizer = tokenizer_for(backbone.config, own or load_tokenizer(folder, "model.y.encoder"), max_length)
    tower = TextTower(backbone)
    tower_width = _probe_texts(tower, tokenizer, "model.y.encoder", source)
    return Encoder(tower, make_head(head, tower_width, width, "model.y.head"), frozen), tokenizer


def _vector_side(side: str, width: int, head: str, frozen: bool, in_width: int | None) -> Encoder:
    if in_width is None:
        raise UserError(f"{side}_width: missing; {side}='vectors' needs the number of coordinates of the vectors")
    return Encoder(VectorTower(in_width), make_head(head, in_width, width, f"model.{side}.head"), frozen)


def _module_side(side: str, module: nn.Module, width: int, head: str, frozen: bool, in_width: int | None) -> Encoder:
    return Encoder(module, None if in_width is None else make_head(head, in_width, width, f"model.{side}.head"), frozen)


def _open_pretrained(
    source: Name, x_frozen: bool, y_frozen: bool, image_size: int | None, max_length: int | None
) -> DualEncoder:
    key = "model.pretrained"
    folder = locate(source, key)
    if "nuclr" not in read_json(folder / "config.json"):
        sides, image_format, tokenizer, joint = open_joint(folder, key, image_size, max_length)
        model = DualEncoder(*sides, images=image_format, tokenizer=tokenizer, joint=joint)
    else:
        if (image_size or max_length) is not None:
            raise UserError(
                f"{key}: {folder} has its own image size and text length; "
                "leave model.x.image_size and model.y.max_length out"
            )
        model = load(folder)
    x_width = _probe_images(model.x, model.images, key, folder) if model.images else model.width
    y_width = _probe_texts(model.y, model.tokenizer, key, folder) if model.tokenizer else model.width
    if x_width != y_width:
        raise UserError(f"{key}: {folder} gives {x_width} features for images but {y_width} for texts")
    if x_frozen:
        model.x.freeze()
    if y_frozen:
        model.y.freeze()
    return model


def _probe_images(encoder: nn.Module, image_format: ImageFormat, key: str, source: Name | Path) -> int:
    """Return the number of features, found by encoding one image."""
    size = image_format.size
    try:
        features = _probe(encoder, torch.zeros(1, 3, size, size))
    except Exception as error:  # a network from elsewhere may raise anything
        raise UserError(f"{key}: {source} does not accept {size}-pixel images ({first_line(error)})") from None
    return features.shape[1]


def _probe_texts(encoder: nn.Module, tokenizer: Tokenizer, key: str, source: Name | Path) -> int:
    """Return the number of features, found by encoding two texts. Refuse a decoder, which gives both the same."""
    tokens = tokenizer(["one dog", "two white cats"])
    try:
        features = _probe(encoder, tokens)
    except Exception as error:  # a network from elsewhere may raise anything
        raise UserError(f"{key}: {source} does not accept its tokenizer's output ({first_line(error)})") from None
    if torch.equal(*features) and not torch.equal(*tokens["input_ids"]):
        raise UserError(
            f"{key}: {source} is a decoder: its first token does not attend to the others; use an encoder such as BERT"
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
