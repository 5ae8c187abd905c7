"""Save a dual encoder to a folder and load it. Nothing is pickled.

    config.json               both sides: tower, modality, how inputs are prepared, head; whether they share an encoder
    dual_encoder.safetensors  heads, standardization, embeddings of bags of words, modules of users and plugins
    x/  y/                    transformers models of each side, with tokenizer or image processor, which AutoModel,
                              AutoTokenizer and AutoImageProcessor can load; only x/ if shared
    joint/                    instead of these two for a CLIP or SigLIP: CLIPModel and SiglipModel can load it

The folder itself is not a model of transformers, and must not be mistaken for one: its `model_type` is unknown to
AutoModel, and there is no model.safetensors, without which CLIPModel.from_pretrained would return random weights.
`nuclr export` writes folders that other tools load.

All files are first written to a hidden subfolder and then moved; config.json comes last, see `files.publish_folder`. If
saving fails (a full disk), the model that was there before is not touched. An incomplete folder is refused.

Weights are loaded in float32.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nuclr
from nuclr.errors import UserError, first_line
from nuclr.files import publish_folder, write_json
from nuclr.models.backbones import load_backbone, no_model_in, quiet, read_json
from nuclr.models.dual_encoder import DualEncoder
from nuclr.models.encoder import Encoder, Head, Inputs, VectorFormat
from nuclr.models.image_format import ImageFormat
from nuclr.models.presets import build_registered
from nuclr.models.pretrained import read_joint, write_joint
from nuclr.models.tokenizer import Tokenizer, load_tokenizer
from nuclr.models.towers import BagOfWords, ImageTower, RegisteredTower, TextTower, VectorTower

CONFIG = "config.json"
WEIGHTS = "dual_encoder.safetensors"
MODEL_TYPE = "nuclr_dual_encoder"

# Kind in config.json -> class, and the attributes that are stored.
Kinds = dict[str, tuple[type, tuple[str, ...]]]
TOWERS: Kinds = {
    "image": (ImageTower, ()),
    "text": (TextTower, ("pooling",)),
    "vectors": (VectorTower, ("width",)),
    "bag_of_words": (BagOfWords, ("vocabulary", "width")),
    "registered": (RegisteredTower, ("name", "options")),
    "module": (nn.Module, ()),
}
INPUTS: Kinds = {
    "image": (ImageFormat, ("size", "mean", "std")),
    "text": (Tokenizer, ("max_length", "padding")),
    "vector": (VectorFormat, ("width",)),
}
HEAD = ("kind", "in_width", "width")


def save(model: DualEncoder, folder: Path) -> None:
    """Save a model to a folder, see `DualEncoder.save_pretrained`."""
    try:
        with publish_folder(folder, CONFIG, "nuclr", has_page=False) as new:
            write_json(new / CONFIG, _write_parts(model, new))
    except SafetensorError as error:
        raise UserError(f"{folder}: cannot be written ({first_line(error)})") from None


def load(
    folder: Path,
    x: nn.Module | None = None,
    y: nn.Module | None = None,
) -> DualEncoder:
    """Load a model from a folder, see `DualEncoder.from_pretrained`."""
    if not (folder / CONFIG).is_file():
        raise UserError(no_model_in(folder))
    config = read_json(folder / CONFIG)
    if "nuclr" not in config:
        raise UserError(
            f"{folder}: not a whole dual encoder saved by nuclr; open a CLIP or SigLIP with build_model(pretrained=...)"
        )
    try:
        model = _load(config, folder, {"x": x, "y": y})
        _load_own_state(model, folder / WEIGHTS)
        for name, side in model.sides:
            if config[name]["frozen"]:
                side.freeze()
    except UserError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        OSError,
        RuntimeError,
        SafetensorError,
        TypeError,
        ValueError,
    ) as error:  # values are missing or wrong, which anything that is built from them may refuse
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{folder}: the model's files are damaged ({reason})") from None
    return model.eval()


# -- saving ------------------------------------------------------------------------------------------------------------


def _write_parts(model: DualEncoder, folder: Path) -> dict[str, Any]:
    """Write everything except config.json, and return its content."""
    config: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "nuclr": nuclr.__version__,
        "joint": model.joint is not None,
        "shared": model.shared,
    }
    for name, side in model.sides:
        head = side.head
        config[name] = {
            "tower": _describe(side.tower, TOWERS),
            "modality": side.modality,
            "inputs": _describe(side.inputs, INPUTS),
            "head": {key: getattr(head, key) for key in HEAD} if isinstance(head, Head) else None,
            "frozen": side.frozen,
        }
        target = folder / ("joint" if model.joint else name)
        if model.joint is None and isinstance(side.tower, ImageTower | TextTower):
            with quiet():
                side.tower.backbone.save_pretrained(target)
        if side.inputs is not None:
            side.inputs.save(target)
    if model.joint:
        images, texts = sorted((model.x, model.y), key=lambda side: isinstance(side.tower, TextTower))
        write_joint(model.joint, folder / "joint", images, texts)
    save_file(_own_state(model), folder / WEIGHTS)
    return config


def _describe(part: object, kinds: Kinds) -> dict[str, Any] | None:
    """Return the kind of a part with its attributes; None for inputs of a plugin, which makes them again."""
    for kind, (cls, names) in kinds.items():
        if isinstance(part, cls):
            return {"kind": kind, **{name: getattr(part, name) for name in names}}
    return None


def _own_state(model: DualEncoder) -> dict[str, Tensor]:
    """Return the state that transformers does not save, as contiguous copies, which safetensors requires."""
    if model.joint:
        return {}
    elsewhere = tuple(
        f"{name}.tower.backbone." for name, side in model.sides if isinstance(side.tower, ImageTower | TextTower)
    )
    own = {}
    for key, value in model.state_dict().items():
        if not key.startswith(elsewhere):
            own[key] = value.detach().clone(memory_format=torch.contiguous_format)
    return own


# -- loading -----------------------------------------------------------------------------------------------------------


def _load(
    config: dict[str, Any],
    folder: Path,
    modules: dict[str, nn.Module | None],
) -> DualEncoder:
    """Return the model without its own state, of which some may be on the device "meta"."""
    names = ["x"] if config["shared"] else ["x", "y"]
    if config["joint"]:
        inputs = {name: _load_inputs(config[name]["inputs"], folder / "joint") for name in names}
        return read_joint(folder / "joint", str(folder), inputs)
    sides = [_load_side(config[name], folder, name, modules[name]) for name in names]
    return DualEncoder(sides[0], sides[-1])


def _load_inputs(config: dict[str, Any] | None, folder: Path) -> Inputs | None:
    if config is None:
        return None
    options = dict(config)
    kind = options.pop("kind")
    if kind == "text":
        options["tokenizer"] = load_tokenizer(folder, str(folder))
    return INPUTS[kind][0](**options)


def _load_side(
    config: dict[str, Any],
    folder: Path,
    name: str,
    module: nn.Module | None,
) -> Encoder:
    tower = module
    inputs: Any = _load_inputs(config["inputs"], folder / name)
    options = dict(config["tower"])
    kind = options.pop("kind")
    cls, _ = TOWERS[kind]
    if kind == "image":
        tower = ImageTower(load_backbone(folder / name, str(folder), "image"), inputs.size)
    elif kind == "text":
        tower = TextTower(load_backbone(folder / name, str(folder), "text"), options["pooling"])
    elif kind == "registered":
        tower, own = build_registered(options["name"], options["options"], f"{folder}: side {name}")
        inputs = inputs or own
    elif kind == "module" and tower is None:
        raise UserError(
            f"{folder}: side {name} is a module of your own; pass one of the same structure: "
            f"from_pretrained(..., {name}=module)"
        )
    with torch.device("meta"):  # takes no memory, whatever widths the file states
        if kind in ("vectors", "bag_of_words"):
            tower = cls(**options)
        head = config["head"] and Head(**config["head"])
    return Encoder(tower, head, inputs=inputs)  # type: ignore[arg-type]


def _load_own_state(model: DualEncoder, path: Path) -> None:
    saved = load_file(path)
    expected = _own_state(model)
    misfits = sorted(saved.keys() ^ expected.keys())
    misfits += [key for key in saved if key in expected and saved[key].shape != expected[key].shape]
    if misfits:
        raise UserError(f"{path}: {misfits[0]!r} does not fit the model that config.json describes")
    for _, side in model.sides:
        for part in (side.head, side.tower):
            if any(tensor.is_meta for tensor in part.state_dict().values()):
                part.to_empty(device="cpu")
    model.load_state_dict(saved, strict=False)
