"""Backbones from transformers: random weights from a configuration, or pretrained ones from a folder or the hub.

A name on the Hugging Face hub is first downloaded to the hub's cache (`locate`). Everything else reads folders only,
so it works without a network. Weights must be safetensors; pickled weights are refused. Python code in a folder is
never run (`trust_remote_code`): a folder that needs it is refused.
"""

import inspect
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from nuclr import files
from nuclr.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PART = {"image": "vision_config", "text": "text_config"}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
MOST_LAYERS = 1000
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]


def make_backbone(config: "PreTrainedConfig") -> "PreTrainedModel":
    """Make a backbone with random weights, drawn from torch's global generator, in float32."""
    model_class = class_of(config)
    return model_class._from_config(config, **without_pooler(model_class))


# Pretrained weights


def locate(
    name: str | os.PathLike[str],
    key: str,
    presets: Iterable[str] = (),
) -> Path:
    """Return the folder with the model called `name`; download it if it is on the hub and not yet in the cache.

    Args:
        name: a folder, or a name on the Hugging Face hub.
        key: the settings key to name in messages.
        presets: other values that the setting may have, to suggest in messages.

    Returns:
        A folder with a config.json.

    Raises:
        UserError: if there is no such folder, it holds no model, or the hub cannot be reached.

    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir() or (folder.parent / "config.yaml").is_file():
        raise UserError(f"{key}: {no_model_in(folder)}")
    if HUB_NAME.fullmatch(str(name)) and (downloaded := _download(str(name))):
        return downloaded
    names = ", ".join(presets)
    preset = f"not a preset ({names}; docs/training.md, section Encoders, describes them), " if names else ""
    raise UserError(
        f"{key}: {str(name)!r} is {preset}not a folder, and could not be downloaded from the Hugging Face hub (no "
        "network, or no such model with safetensors).\nOn a machine with a network, save it with AutoModel (and "
        f"AutoTokenizer).from_pretrained(NAME).save_pretrained(FOLDER), then set {key} to the folder."
    )


def no_model_in(folder: Path) -> str:
    """Return the message for a folder that is missing or has no config.json; for folders of a run, what to use."""
    run = folder.parent if folder.name == "model" else folder
    if (run / "config.yaml").is_file():
        return f"{folder} is a run; use {run / 'model'}, which a finished run has (nuclr train {run} --resume)"
    return f"{folder} has no config.json; needs a folder written by save_pretrained"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise UserError if it cannot be read."""
    content = files.read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a JSON {type(content).__name__}; needs a JSON object")
    return content


def read_config(folder: Path, key: str) -> "PreTrainedConfig":
    """Return the transformers configuration in a folder."""
    from transformers import AutoConfig

    import nuclr.models.networks  # noqa: F401 (registers its configurations)

    content = read_json(folder / "config.json")
    if "nuclr" in content:
        raise UserError(f"{key}: {folder} is a whole dual encoder of nuclr; set model.pretrained={folder}")
    _refuse_many_layers(content, folder / "config.json", key)
    with quiet(), files.readable(f"{key}: {folder / 'config.json'}", "a model's configuration"):
        return AutoConfig.from_pretrained(folder, **LOCAL)


def _refuse_many_layers(
    content: Any,
    path: Path,
    key: str,
) -> None:
    """Refuse an absurd number of layers: transformers makes all of them before it reads their weights."""
    if not isinstance(content, dict):
        return
    for name, value in content.items():
        _refuse_many_layers(value, path, key)
        counts = value if isinstance(value, list) else [value]
        if ("layer" in name or "depth" in name) and any(isinstance(n, int) and n > MOST_LAYERS for n in counts):
            raise UserError(f"{key}: {path}: {name} is {str(value)[:40]}; at most {MOST_LAYERS} layers are allowed")


def load_backbone(
    folder: Path,
    key: str,
    modality: Literal["image", "text"],
) -> "PreTrainedModel":
    """Load the model in a folder, in float32. Of a two-tower model (CLIP, SigLIP), load only the modality's tower."""
    config = read_config(folder, key)
    config = getattr(config, PART[modality], config)
    model_class = class_of(config)
    return load_model(
        model_class,
        folder,
        key,
        config=config,
        **without_pooler(model_class),
    )


def class_of(config: "PreTrainedConfig") -> "type[PreTrainedModel]":
    """Return the class that AutoModel uses for a configuration."""
    from transformers import AutoModel

    try:
        return cast("type[PreTrainedModel]", AutoModel._model_mapping[type(config)])
    except KeyError:
        raise UserError(f"{config.model_type!r} models have no encoder in transformers' AutoModel") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off progress bars and load reports of transformers within a block."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _download(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    for cached_only in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=cached_only))
        except Exception:  # not in the cache, no such name, no network, a proxy: the advice to the user is the same
            continue
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
    return None


def without_pooler(model_class: "type[PreTrainedModel]") -> dict[str, Any]:
    """Leave out poolers for classification (a dense layer on [CLS]): they are not used, and often have no weights."""
    has_pooler = "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    return {"add_pooling_layer": False} if has_pooler else {}


def load_model(
    model_class: "type[PreTrainedModel]",
    folder: Path,
    key: str,
    **options: Any,
) -> "PreTrainedModel":
    """Load a model of this class from a folder, in float32; `key` is the settings key to name in messages."""
    with quiet(), files.readable(f"{key}: {folder}", "a model"):
        loaded: Any = model_class.from_pretrained(
            folder,
            output_loading_info=True,
            dtype=torch.float32,
            use_safetensors=True,
            **LOCAL,
            **options,
        )
    backbone, report = loaded
    if report["missing_keys"]:
        raise UserError(f"{key}: {folder} lacks the weights {', '.join(sorted(report['missing_keys']))[:200]}")
    return cast("PreTrainedModel", backbone)


# Probes


def probe(
    encoder: nn.Module,
    inputs: Any,
    key: str,
    source: object,
) -> int:
    """Return the number of features of a tower or an encoder, found by encoding one image or two texts.

    This also shows at once whether a tower fits its inputs.

    Args:
        encoder: it takes images or texts.
        inputs: how its items are prepared: an `ImageFormat` or a `Tokenizer`.
        key: the settings key to name in messages.
        source: where the encoder comes from, to name in messages.

    Raises:
        UserError: if the encoder does not take its inputs, or gives all texts the same features.

    """
    example = inputs.example()
    try:
        features = _probe(encoder, example)
    except Exception as error:  # a network from elsewhere may raise anything
        raise UserError(
            f"{key}: {source} does not accept the {inputs.modality}s of {inputs} ({first_line(error)})"
        ) from None
    if isinstance(example, dict) and torch.equal(*features) and not torch.equal(*example["input_ids"]):
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
