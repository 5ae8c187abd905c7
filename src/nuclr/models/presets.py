"""Encoders by name: presets with random weights, and encoders that plugins register.

Presets are the paper's two towers at full size, and tiny ones that train on a CPU. The tiny ones have neither batch
norm nor dropout, so K processes with b samples each compute what one process with K b samples does. `tiny_edges`
starts with known filters and is meant to be frozen.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from nuclr.errors import UserError
from nuclr.models.backbones import make_backbone
from nuclr.models.encoder import Inputs
from nuclr.models.towers import BagOfWords, RegisteredTower, TextTower

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VECTORS = "vectors"
DEFAULT_ENCODERS = {
    "image": "tiny_resnet",
    "text": "tiny_text",
    "vector": VECTORS,
}


@dataclass(frozen=True)
class ImagePreset:
    """An image model with random weights.

    Args:
        size: default height and width of the images in pixels.
        config_class: its configuration, a class of transformers or of `nuclr.models.networks`.
        options: options of the configuration.

    """

    size: int
    config_class: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def config(self, size: int) -> "PreTrainedConfig":
        """Return the configuration for images of a given size."""
        import transformers

        from nuclr.models import networks

        options = dict(self.options)
        if self.config_class == "ViTConfig":  # the only one that depends on the size
            options |= {"image_size": size, "patch_size": 8 if size < 64 else 16}
        package = networks if hasattr(networks, self.config_class) else transformers
        return getattr(package, self.config_class)(**options)


@dataclass(frozen=True)
class TextPreset:
    """A text model with random weights: a DistilBERT, or a bag of words.

    Args:
        vocabulary: largest number of tokens in the vocabulary.
        max_length: default for the largest number of tokens per text.
        options: sizes of a DistilBERT, whose positions are then as many as tokens per text; empty for those of
            the published one, None for a bag of words.

    """

    vocabulary: int
    max_length: int
    options: Mapping[str, Any] | None

    def tower(self, vocabulary: int, max_length: int) -> nn.Module:
        """Return the tower for a given number of tokens in the vocabulary and per text."""
        if self.options is None:
            return BagOfWords(vocabulary, 128)
        from transformers import DistilBertConfig

        positions: dict[str, Any] = {"max_position_embeddings": max_length} if self.options else {}
        return TextTower(make_backbone(DistilBertConfig(vocab_size=vocabulary, **positions, **self.options)))


IMAGE_PRESETS = {
    "resnet50": ImagePreset(256, "ResNetConfig"),
    "tiny_edges": ImagePreset(32, "EdgesConfig"),
    "tiny_resnet": ImagePreset(
        64,
        "GroupNormResNetConfig",
        {
            "embedding_size": 32,
            "hidden_sizes": [32, 64, 128],
            "depths": [1, 1, 1],
            "layer_type": "basic",
        },
    ),
    "tiny_vit": ImagePreset(
        64,
        "ViTConfig",
        {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
}
TEXT_PRESETS = {
    "distilbert": TextPreset(30522, 64, {}),
    "tiny_text": TextPreset(
        4096,
        32,
        {
            "dim": 128,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 256,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "bag_of_words": TextPreset(16384, 64, None),
}


# Encoders of plugins

BuildEncoder = Callable[..., tuple[nn.Module, Inputs | None]]


REGISTERED: dict[str, BuildEncoder] = {}
MODALITIES = {  # of every encoder
    **dict.fromkeys(IMAGE_PRESETS, "image"),
    **dict.fromkeys(TEXT_PRESETS, "text"),
    VECTORS: "vector",
}


def register_encoder(
    name: str,
    build: BuildEncoder,
    modality: str,
) -> None:
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
    if name in MODALITIES and name not in REGISTERED:
        raise ValueError(f"name: {name!r} is a preset of nuclr; choose another name")
    REGISTERED[name] = build
    MODALITIES[name] = modality


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
    return [name for name, takes in MODALITIES.items() if modality in (None, takes)]


def default_encoder(modality: str, key: str) -> str:
    """Return the encoder of a side that names none: a small preset, or the only encoder registered for the modality.

    Args:
        modality: what the side holds.
        key: the settings key of the side ("model.x"), to name in messages.

    Raises:
        UserError: if several encoders take the modality, or none does.

    """
    names = [DEFAULT_ENCODERS[modality]] if modality in DEFAULT_ENCODERS else encoder_names(modality)
    if len(names) != 1:
        fix = f"name one of {', '.join(names)}" if names else "register one in a plugin (register_encoder)"
        raise UserError(f"{key}.encoder: missing for {modality}s; {fix}")
    return names[0]


def build_registered(
    name: str,
    options: dict[str, Any],
    key: str,
) -> tuple[RegisteredTower, Inputs | None]:
    """Return the tower and the inputs of a registered encoder.

    Args:
        name: the name it is registered with.
        options: the options to build it with.
        key: the settings key of the side ("model.x"), to name in messages.

    Raises:
        UserError: if it is not registered, or does not have an option.

    """
    if name not in REGISTERED:
        raise UserError(f"{key}.encoder: {name!r} is not registered; load its plugin first (the setting `plugins`)")
    build = REGISTERED[name]
    try:
        inspect.signature(build).bind(**options)
    except TypeError as error:
        raise UserError(f"{key}: the encoder {name!r} cannot be built ({error})") from None
    module, inputs = build(**options)
    return RegisteredTower(module, name, options, MODALITIES[name]), inputs
