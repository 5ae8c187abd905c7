"""Backbones from transformers: made from a configuration, or read from a folder."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from nuclr.errors import UserError
from nuclr.models.locate import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

JOINT = ("clip", "siglip")
PART = {"image": "vision_config", "text": "text_config"}


def make_backbone(config: "PreTrainedConfig") -> "PreTrainedModel":
    """Random weights, from torch's generator, in float32."""
    kind = class_of(config)
    return kind._from_config(config, **_without_pooler(kind))


def load_backbone(folder: Path, key: str, side: Literal["image", "text"]) -> "PreTrainedModel":
    """The model in a folder, in float32; of a two-tower model (CLIP, SigLIP) only the tower of this side."""
    config = read_config(folder, key)
    config = getattr(config, PART[side], config)
    kind = class_of(config)
    return _load(kind, folder, key, config=config, **_without_pooler(kind))


def load_joint(folder: Path, key: str) -> "PreTrainedModel":
    """A whole CLIPModel or SiglipModel, in float32."""
    config = read_config(folder, key)
    if config.model_type not in JOINT:
        raise UserError(f"{key}: {folder} holds a {config.model_type!r} model; allowed: {', '.join(JOINT)}")
    return _load(class_of(config), folder, key, config=config)


def read_config(folder: Path, key: str) -> "PreTrainedConfig":
    """The transformers configuration in a folder."""
    from transformers import AutoConfig

    import nuclr.models.resnet  # noqa: F401 (registers it)

    facts = read_json(folder / "config.json")
    if "nuclr" in facts:
        raise UserError(f"{key}: {folder} is a whole dual encoder of nuclr; set model.pretrained={folder}")
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise UserError(f"{key}: {folder / 'config.json'} is not understood ({first_line(error)})") from None


def class_of(config: "PreTrainedConfig") -> "type[PreTrainedModel]":
    """The class that AutoModel would take."""
    from transformers import AutoModel

    try:
        return cast("type[PreTrainedModel]", AutoModel._model_mapping[type(config)])
    except KeyError:
        raise UserError(f"{config.model_type!r} models have no encoder that transformers' AutoModel knows") from None


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and load reports from transformers, for a while."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """What an exception of another library says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _without_pooler(kind: "type[PreTrainedModel]") -> dict[str, Any]:
    """Poolers for classification (a dense layer on [CLS]) are not what we pool with, and often have no weights."""
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}


def _load(kind: "type[PreTrainedModel]", folder: Path, key: str, **options: Any) -> "PreTrainedModel":
    try:
        with quiet():
            options |= {"dtype": torch.float32, "use_safetensors": True, "local_files_only": True}
            loaded = kind.from_pretrained(folder, output_loading_info=True, **options)
            backbone, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    except Exception as error:  # the library raises whatever the file's reader did
        raise UserError(f"{key}: the weights in {folder} cannot be loaded ({first_line(error)})") from None
    if report["missing_keys"]:
        name, more = sorted(report["missing_keys"])[0], len(report["missing_keys"]) - 1
        raise UserError(f"{key}: {folder} lacks the weights {name!r}" + (f" and {more} more" if more else ""))
    return backbone
