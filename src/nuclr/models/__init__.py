"""Dual encoders: map images, texts or vectors to unit-norm features in one space."""

from nuclr.models.build import build_model
from nuclr.models.dual_encoder import DualEncoder
from nuclr.models.encoder import Encoder, EncoderSide, Inputs, VectorFormat
from nuclr.models.image_format import ImageFormat
from nuclr.models.presets import (
    IMAGE_PRESETS,
    TEXT_PRESETS,
    encoder_names,
    register_encoder,
)
from nuclr.models.tokenizer import Tokenizer, train_tokenizer

__all__ = [
    "IMAGE_PRESETS",
    "TEXT_PRESETS",
    "DualEncoder",
    "Encoder",
    "EncoderSide",
    "ImageFormat",
    "Inputs",
    "Tokenizer",
    "VectorFormat",
    "build_model",
    "encoder_names",
    "register_encoder",
    "train_tokenizer",
]
