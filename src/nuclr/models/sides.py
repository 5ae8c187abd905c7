"""One side of a dual encoder from what the user names: a preset, a folder, a hub name, vectors, a module."""

import os
from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from nuclr.errors import UserError
from nuclr.models.backbones import load_backbone, make_backbone
from nuclr.models.encoder import Encoder
from nuclr.models.heads import make_head
from nuclr.models.image_format import IMAGENET_MEAN, IMAGENET_STD, ImageFormat, read_image_format
from nuclr.models.locate import locate
from nuclr.models.presets import IMAGE_PRESETS, TEXT_PRESETS
from nuclr.models.probe import probe_images, probe_texts
from nuclr.models.tokenizer import MAX_LENGTH, Tokenizer, load_tokenizer, tokenizer_for, train_tokenizer
from nuclr.models.towers import ImageTower, TextTower, VectorTower

VECTORS = "vectors"
Source = str | os.PathLike[str] | nn.Module
Name = str | os.PathLike[str]


def image_side(
    source: Source, width: int, head: str, frozen: bool, size: int | None, in_width: int | None
) -> tuple[Encoder, ImageFormat | None]:
    """The x side, and how its pictures are prepared (None: it takes none, or a module that prepares them itself)."""
    if isinstance(source, nn.Module):
        images = ImageFormat(size, IMAGENET_MEAN, IMAGENET_STD) if size else None
        return _module_side("image", source, width, head, frozen, in_width), images
    if source == VECTORS:
        return _vector_side("image", width, head, frozen, in_width), None
    if source in IMAGE_PRESETS:
        preset = IMAGE_PRESETS[str(source)]
        images = ImageFormat(size or preset.size, IMAGENET_MEAN, IMAGENET_STD)
        backbone = make_backbone(preset.config(images.size))
    else:
        folder = locate(source, "image", [*IMAGE_PRESETS, VECTORS])
        backbone = load_backbone(folder, "image", "image")
        images = read_image_format(folder)
        images = replace(images, size=size or images.size)
    tower = ImageTower(backbone, images.size)
    return Encoder(tower, make_head(head, probe_images(tower, images, source), width, "image"), frozen), images


def text_side(
    source: Source,
    width: int,
    head: str,
    frozen: bool,
    max_length: int | None,
    in_width: int | None,
    captions: Iterable[str] | None,
    tokenizer: Name | None,
) -> tuple[Encoder, Tokenizer | None]:
    """The y side, and how its texts are prepared (None: it takes none, or a module that prepares them itself)."""
    own = None if tokenizer is None else load_tokenizer(tokenizer, "tokenizer")
    if isinstance(source, nn.Module):
        texts = None if own is None else Tokenizer(own, max_length or MAX_LENGTH)
        return _module_side("text", source, width, head, frozen, in_width), texts
    if source == VECTORS:
        return _vector_side("text", width, head, frozen, in_width), None
    if source in TEXT_PRESETS:
        preset = TEXT_PRESETS[str(source)]
        if own is None and captions is None:
            raise UserError(f"text: {source!r} has no tokenizer yet; give captions to train one, or tokenizer=FOLDER")
        own = own or train_tokenizer(captions or (), preset.vocabulary)
        max_length = max_length or preset.max_length
        backbone = make_backbone(preset.config(len(own), max_length))
        texts = tokenizer_for(backbone.config, own, max_length)
    else:
        folder = locate(source, "text", [*TEXT_PRESETS, VECTORS])
        backbone = load_backbone(folder, "text", "text")
        texts = tokenizer_for(backbone.config, own or load_tokenizer(folder, "text"), max_length)
    tower = TextTower(backbone)
    return Encoder(tower, make_head(head, probe_texts(tower, texts, source), width, "text"), frozen), texts


def _vector_side(key: str, width: int, head: str, frozen: bool, in_width: int | None) -> Encoder:
    if in_width is None:
        raise UserError(f"{key}_width: not given; {key}='vectors' needs the number of their coordinates")
    return Encoder(VectorTower(in_width), make_head(head, in_width, width, key), frozen)


def _module_side(key: str, module: nn.Module, width: int, head: str, frozen: bool, in_width: int | None) -> Encoder:
    return Encoder(module, None if in_width is None else make_head(head, in_width, width, key), frozen)
