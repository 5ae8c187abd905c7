"""Towers initialized at random: the paper's two at full size, and tiny ones that train on a CPU.

The tiny ones have neither batch norm nor dropout: with them, K processes of b compute what one of K b does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ImagePreset:
    """`config` takes the size of the images in pixels; `size` is the one that the preset is meant for."""

    size: int
    config: "Callable[[int], PreTrainedConfig]"


@dataclass(frozen=True)
class TextPreset:
    """`config` takes the number of tokens in the vocabulary and in a text; the other two are the most of each."""

    vocabulary: int
    max_length: int
    config: "Callable[[int, int], PreTrainedConfig]"


def _resnet50(_size: int) -> "PreTrainedConfig":
    from transformers import ResNetConfig

    return ResNetConfig()


def _tiny_resnet(_size: int) -> "PreTrainedConfig":
    from nuclr.models.resnet import GroupNormResNetConfig

    return GroupNormResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic")


def _tiny_vit(size: int) -> "PreTrainedConfig":
    from transformers import ViTConfig

    return ViTConfig(
        image_size=size,
        patch_size=8 if size < 64 else 16,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _distilbert(vocabulary: int, _max_length: int) -> "PreTrainedConfig":
    from transformers import DistilBertConfig

    return DistilBertConfig(vocab_size=vocabulary)


def _tiny_text(vocabulary: int, max_length: int) -> "PreTrainedConfig":
    from transformers import DistilBertConfig

    return DistilBertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=max_length,
        dim=128,
        n_layers=2,
        n_heads=4,
        hidden_dim=256,
        dropout=0.0,
        attention_dropout=0.0,
    )


IMAGE_PRESETS = {
    "resnet50": ImagePreset(256, _resnet50),
    "tiny_resnet": ImagePreset(32, _tiny_resnet),
    "tiny_vit": ImagePreset(32, _tiny_vit),
}
TEXT_PRESETS = {
    "distilbert": TextPreset(30522, 64, _distilbert),
    "tiny_text": TextPreset(4096, 32, _tiny_text),
}
