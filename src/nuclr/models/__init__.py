"""Dual encoders: map images, texts or vectors to unit-norm features in one space."""

from nuclr.models.backbones import IMAGE_PRESETS, TEXT_PRESETS
from nuclr.models.build import build_model
from nuclr.models.dual_encoder import DualEncoder
from nuclr.models.encoder import Encoder
from nuclr.models.image_format import ImageFormat
from nuclr.models.tokenizer import Tokenizer, train_tokenizer

__all__ = [
    "IMAGE_PRESETS",
    "TEXT_PRESETS",
    "DualEncoder",
    "Encoder",
    "ImageFormat",
    "Tokenizer",
    "build_model",
    "train_tokenizer",
]
