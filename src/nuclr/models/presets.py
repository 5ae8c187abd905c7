"""Encoders by name: presets with random weights, and encoders that plugins register.

Presets are the paper's two towers at full size, and tiny ones that train on a CPU. The tiny ones have neither batch
norm nor dropout, so K processes with b samples each compute what one process with K b samples does. `tiny_edges`
starts with known filters and is meant to be frozen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from nuclr.models.backbones import make_backbone
from nuclr.models.inputs import Inputs
from nuclr.models.towers import BagOfWords, TextTower

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VECTORS = "vectors"


@dataclass(frozen=True)
class ImagePreset:
    """An image model with random weights.

    Args:
        size: default height and width of the images in pixels.
        config: makes the configuration for images of a given size.

    """

    size: int
    config: "Callable[[int], PreTrainedConfig]"


@dataclass(frozen=True)
class TextPreset:
    """A text model with random weights.

    Args:
        vocabulary: largest number of tokens in the vocabulary.
        max_length: default for the largest number of tokens per text.
        tower: makes the tower for a given number of tokens in the vocabulary and per text.

    """

    vocabulary: int
    max_length: int
    tower: Callable[[int, int], nn.Module]


def _resnet50(_size: int) -> "PreTrainedConfig":
    from transformers import ResNetConfig

    return ResNetConfig()


def _tiny_resnet(_size: int) -> "PreTrainedConfig":
    from nuclr.models.resnet import GroupNormResNetConfig

    return GroupNormResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic")


def _tiny_edges(_size: int) -> "PreTrainedConfig":
    from nuclr.models.edges import EdgesConfig

    return EdgesConfig()


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


def _distilbert(vocabulary: int, _max_length: int) -> TextTower:
    from transformers import DistilBertConfig

    return TextTower(make_backbone(DistilBertConfig(vocab_size=vocabulary)))


def _tiny_text(vocabulary: int, max_length: int) -> TextTower:
    from transformers import DistilBertConfig

    config = DistilBertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=max_length,
        dim=128,
        n_layers=2,
        n_heads=4,
        hidden_dim=256,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return TextTower(make_backbone(config))


def _bag_of_words(vocabulary: int, _max_length: int) -> BagOfWords:
    return BagOfWords(vocabulary, 128)


IMAGE_PRESETS = {
    "resnet50": ImagePreset(256, _resnet50),
    "tiny_edges": ImagePreset(32, _tiny_edges),
    "tiny_resnet": ImagePreset(64, _tiny_resnet),
    "tiny_vit": ImagePreset(64, _tiny_vit),
}
TEXT_PRESETS = {
    "distilbert": TextPreset(30522, 64, _distilbert),
    "tiny_text": TextPreset(4096, 32, _tiny_text),
    "bag_of_words": TextPreset(16384, 64, _bag_of_words),
}


# Encoders of plugins

BuildEncoder = Callable[..., tuple[nn.Module, Inputs | None]]


@dataclass(frozen=True)
class RegisteredEncoder:
    """An encoder that `register_encoder` added."""

    build: BuildEncoder
    modality: str


REGISTERED: dict[str, RegisteredEncoder] = {}


def register_encoder(name: str, build: BuildEncoder, modality: str) -> None:
    """Register an encoder, so that `build_model` and `model.x.encoder` take its name.

    Args:
        name: the name; registering it again replaces the encoder.
        build: returns a module from a batch of inputs to (b, d), with the attribute `width` = d, and the `Inputs` that
            prepare raw items (None: the data's tensors are used as they are). It is called with those of the options
            `image_size`, `max_length`, `in_width` and `pooling` that are set. A saved model calls it again with the
            same options to load its weights.
        modality: what it takes: "image", "text", "vector", or the name of a modality of your own.

    Raises:
        ValueError: if the name is that of a preset.

    Example:
        >>> from nuclr.models import VectorFormat, build_model, register_encoder
        >>> def build(in_width=3):
        ...     tower = nn.Linear(in_width, 8)
        ...     tower.width = 8
        ...     return tower, VectorFormat(in_width)
        >>> register_encoder("linear_example", build, "vector")
        >>> build_model("linear_example", shared=True, width=4).encode_x([[1.0, 2.0, 3.0]]).shape
        torch.Size([1, 4])

    """
    if name in IMAGE_PRESETS or name in TEXT_PRESETS or name == VECTORS:
        raise ValueError(f"name: {name!r} is a preset of nuclr; choose another name")
    REGISTERED[name] = RegisteredEncoder(build, modality)


def modality_of(name: str) -> str | None:
    """Return the modality that an encoder takes, or None if it is neither a preset nor registered.

    Args:
        name: the name of an encoder.

    Returns:
        "image", "text", "vector", the modality of a registered encoder, or None.

    Example:
        >>> modality_of("bag_of_words")
        'text'

    """
    if name in REGISTERED:
        return REGISTERED[name].modality
    if name == VECTORS:
        return "vector"
    return "image" if name in IMAGE_PRESETS else "text" if name in TEXT_PRESETS else None


def encoder_names(modality: str | None = None) -> list[str]:
    """Return the names of presets and registered encoders, of one modality or of all.

    Args:
        modality: such as "image"; None for all.

    Returns:
        The names, presets first.

    Example:
        >>> encoder_names("image")
        ['resnet50', 'tiny_edges', 'tiny_resnet', 'tiny_vit']

    """
    names = [*IMAGE_PRESETS, *TEXT_PRESETS, VECTORS, *REGISTERED]
    return [name for name in names if modality is None or modality_of(name) == modality]
