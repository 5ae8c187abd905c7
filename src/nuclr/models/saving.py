"""Save a dual encoder to a folder and load it. Nothing is pickled.

    config.json               both sides: tower, modality, how inputs are prepared, head; whether they share an encoder
    dual_encoder.safetensors  heads, standardization, embeddings of bags of words, modules of users and plugins
    x/  y/                    transformers models of each side, with tokenizer or image processor, which AutoModel,
                              AutoTokenizer and AutoImageProcessor can load; only x/ if shared
    joint/                    instead of these two for a CLIP or SigLIP: CLIPModel and SiglipModel can load it

The folder itself is not a model of transformers, and must not be mistaken for one: its `model_type` is unknown to
AutoModel, and there is no model.safetensors, without which CLIPModel.from_pretrained would return random weights.
`nuclr export` writes folders that other tools load.

All files are first written to a hidden subfolder and then moved; config.json comes last. If saving fails (a full disk),
the model that was there before is not touched. A folder without config.json is incomplete and is refused.

Weights are loaded in float32.
"""

import contextlib
import math
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nuclr
from nuclr.errors import UserError
from nuclr.files import write_json
from nuclr.models.backbones import first_line, load_backbone, no_model_in, part_of_model, quiet, read_json
from nuclr.models.dual_encoder import DualEncoder
from nuclr.models.encoder import Encoder, Head
from nuclr.models.image_format import ImageFormat, check_image_format, write_image_format
from nuclr.models.inputs import Inputs, VectorFormat
from nuclr.models.pretrained import read_joint, write_joint
from nuclr.models.sides import build_registered
from nuclr.models.tokenizer import PADDINGS, Tokenizer, load_tokenizer
from nuclr.models.towers import POOLINGS, BagOfWords, ImageTower, RegisteredTower, TextTower, VectorTower

CONFIG, WEIGHTS, TEMPORARY = "config.json", "dual_encoder.safetensors", ".saving"
MODEL_TYPE = "nuclr_dual_encoder"


def save(model: DualEncoder, folder: Path) -> None:
    """Save a model to a folder, see `DualEncoder.save_pretrained`."""
    temporary = folder / TEMPORARY
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
        temporary.mkdir(parents=True)
        config = _write_parts(model, temporary)
        _move_files(temporary, folder)
        write_json(folder / CONFIG, config)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the model cannot be written there ({first_line(error)})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(folder: Path, x: nn.Module | None = None, y: nn.Module | None = None) -> DualEncoder:
    """Load a model from a folder, see `DualEncoder.from_pretrained`."""
    if not (folder / CONFIG).is_file():
        raise UserError(no_model_in(folder))
    config = read_json(folder / CONFIG)
    if "nuclr" not in config:
        raise UserError(
            part_of_model(folder)
            or f"{folder}: not a dual encoder saved by nuclr; open a CLIP or SigLIP with build_model(pretrained=...)"
        )
    try:
        return _load(config, folder, x, y).eval()
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{folder / CONFIG}: lacks {error}") from None
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        # Values of the wrong type or size, which anything that is built from them may refuse.
        raise UserError(f"{folder}: the model's files are damaged ({first_line(error)[:200]})") from None


def _write_parts(model: DualEncoder, folder: Path) -> dict[str, Any]:
    """Write everything except config.json, and return its content."""
    config: dict[str, Any] = {"model_type": MODEL_TYPE, "nuclr": nuclr.__version__}
    config |= {"joint": model.joint is not None, "shared": model.shared}
    for name, side in _sides(model):
        config[name] = {
            "tower": _tower_config(side.tower),
            "modality": side.modality,
            "inputs": _inputs_config(side.inputs),
            "head": _head_config(side.head),
            "frozen": side.frozen,
        }
        if model.joint is None and isinstance(side.tower, ImageTower | TextTower):
            with quiet():
                side.tower.backbone.save_pretrained(folder / name)
        if model.joint is None and isinstance(side.inputs, ImageFormat):
            write_image_format(side.inputs, folder / name)
        if isinstance(side.inputs, Tokenizer):
            side.inputs.save(folder / ("joint" if model.joint else name))
    if model.joint:
        images, texts = sorted((model.x, model.y), key=lambda side: isinstance(side.tower, TextTower))
        write_joint(model.joint, folder / "joint", images, texts)
    save_file(_own_state(model), folder / WEIGHTS)
    return config


def _sides(model: DualEncoder) -> list[tuple[str, Encoder]]:
    """Return the encoders by the names of their sides; a shared one once."""
    return [("x", model.x)] if model.shared else [("x", model.x), ("y", model.y)]


def _tower_config(tower: nn.Module) -> dict[str, Any]:
    if isinstance(tower, ImageTower):
        return {"kind": "image"}
    if isinstance(tower, TextTower):
        return {"kind": "text", "pooling": tower.pooling}
    if isinstance(tower, VectorTower):
        return {"kind": "vectors", "width": len(tower.mean)}
    if isinstance(tower, BagOfWords):
        table = tower.embedding
        return {"kind": "bag_of_words", "vocabulary": table.num_embeddings, "width": table.embedding_dim}
    if isinstance(tower, RegisteredTower):
        return {"kind": "registered", "name": tower.name, "options": tower.options}
    return {"kind": "module"}


def _inputs_config(inputs: Inputs | None) -> dict[str, Any] | None:
    """Return how inputs are prepared; None if the tower takes tensors, or a plugin makes its inputs."""
    if isinstance(inputs, ImageFormat):
        return {"kind": "image", **asdict(inputs)}
    if isinstance(inputs, Tokenizer):
        return {"kind": "text", "max_length": inputs.max_length, "padding": inputs.padding}
    if isinstance(inputs, VectorFormat):
        return {"kind": "vector", "width": inputs.width}
    return None


def _head_config(head: nn.Module) -> dict[str, Any] | None:
    return {"kind": head.kind, "in_width": head.in_width, "width": head.width} if isinstance(head, Head) else None


def _move_files(source: Path, folder: Path) -> None:
    """Move all files of `source` to `folder`, under the same relative paths.

    The old config.json is removed first: without it, a mixture of old and new files is not loaded.
    """
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    (folder / CONFIG).unlink(missing_ok=True)
    for path in files:
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)


def _load(config: dict[str, Any], folder: Path, x: nn.Module | None, y: nn.Module | None) -> DualEncoder:
    if not isinstance(config["shared"], bool):
        raise UserError(f"{folder / CONFIG}: shared is {str(config['shared'])[:80]}; needs true or false")
    names = ["x"] if config["shared"] else ["x", "y"]
    inputs = {
        name: _load_inputs(config[name]["inputs"], folder / ("joint" if config["joint"] else name), folder)
        for name in names
    }
    if config["joint"]:
        model = _load_joint(folder, inputs)
    else:
        modules = {"x": x, "y": y}
        sides = [_load_side(config[name], folder, name, modules[name], inputs[name]) for name in names]
        model = DualEncoder(sides[0], sides[-1])
    _load_own_state(model, folder)
    for name, side in _sides(model):
        if config[name]["frozen"]:
            side.freeze()
    return model


def _load_joint(folder: Path, inputs: dict[str, Inputs | None]) -> DualEncoder:
    """Load a CLIP or SigLIP with the image on the side that it had."""
    sizes = {name: given.size for name, given in inputs.items() if isinstance(given, ImageFormat)}
    ((image_side, size),) = sizes.items()
    images, texts, joint = read_joint(folder / "joint", str(folder), size)
    sides = {image_side: images, "y" if image_side == "x" else "x": texts}
    for name, side in sides.items():
        side.inputs = inputs[name]
    return DualEncoder(sides["x"], sides["y"], joint=joint)


def _load_inputs(config: dict[str, Any] | None, subfolder: Path, folder: Path) -> Inputs | None:
    if config is None:
        return None
    options = {key: _tuple(value) for key, value in config.items() if key != "kind"}
    if config["kind"] == "image":
        image_format = ImageFormat(**options)
        check_image_format(image_format, folder / CONFIG)
        return image_format
    if config["kind"] == "text":
        if type(options["max_length"]) is not int or options["max_length"] < 1 or options["padding"] not in PADDINGS:
            raise UserError(f"{folder / CONFIG}: unknown text inputs {str(options)[:80]}")
        return Tokenizer(load_tokenizer(subfolder, str(folder)), **options)
    if config["kind"] == "vector":
        return VectorFormat(**options)
    raise UserError(f"{folder / CONFIG}: unknown inputs {str(config['kind'])[:80]!r}")


def _load_side(
    config: dict[str, Any], folder: Path, name: str, module: nn.Module | None, inputs: Inputs | None
) -> Encoder:
    head = config["head"] and _load_head(config["head"], folder)
    kind, tower = config["tower"]["kind"], config["tower"]
    if kind == "image" and isinstance(inputs, ImageFormat):
        return Encoder(ImageTower(load_backbone(folder / name, str(folder), "image"), inputs.size), head, inputs=inputs)
    if kind == "text" and tower["pooling"] in POOLINGS:
        backbone = load_backbone(folder / name, str(folder), "text")
        return Encoder(TextTower(backbone, tower["pooling"]), head, inputs=inputs)
    if kind == "vectors":
        _check_widths([tower["width"]], 0, folder)
        return Encoder(VectorTower(tower["width"]), head, inputs=inputs)
    if kind == "bag_of_words":
        widths = [tower["vocabulary"], tower["width"]]
        _check_widths(widths, math.prod(widths), folder)
        return Encoder(BagOfWords(*widths), head, inputs=inputs)
    if kind == "registered":
        built, own = build_registered(tower["name"], tower["options"], f"{folder}: side {name}")
        return Encoder(built, head, inputs=inputs or own)
    if kind != "module":
        raise UserError(f"{folder / CONFIG}: side {name} has an unknown tower {str(tower)[:80]}")
    if module is None:
        raise UserError(
            f"{folder}: side {name} is a module of your own; pass one of the same structure: "
            f"from_pretrained(..., {name}=module)"
        )
    return Encoder(module, head, inputs=inputs)


def _load_head(config: dict[str, Any], folder: Path) -> Head:
    """Make a head; if its stated widths need more weights than the file can hold, refuse before allocating memory."""
    kind, widths = config["kind"], [config["in_width"], config["width"]]
    _check_widths(widths, 0 if kind == "none" else math.prod(widths), folder)
    # Head makes the layers of all kinds; those of a large head that keeps no weights would only cost memory.
    with torch.device("meta") if kind == "none" and max(widths) > 4096 else contextlib.nullcontext():
        return Head(**config)


def _check_widths(widths: list[Any], weights: int, folder: Path) -> None:
    """Refuse widths that are not positive whole numbers, or need more weights than the file with them can hold."""
    size = (folder / WEIGHTS).stat().st_size if (folder / WEIGHTS).is_file() else 0
    if not all(type(width) is int and 0 < width <= 2**20 for width in widths):
        raise UserError(f"{folder / CONFIG}: widths are {str(widths)[:80]}; needs positive whole numbers")
    if weights > max(size, 2**24):  # a weight takes more than one byte
        raise UserError(f"{folder / CONFIG}: widths {widths} are too large for {WEIGHTS} of {size} bytes")


def _own_state(model: DualEncoder) -> dict[str, Tensor]:
    """Return the state that transformers does not save, as contiguous copies, which safetensors requires."""
    elsewhere = ["x.", "y."] if model.joint else []
    elsewhere += [
        f"{name}.tower.backbone." for name, side in _sides(model) if isinstance(side.tower, ImageTower | TextTower)
    ]
    return {
        key: value.detach().clone(memory_format=torch.contiguous_format)
        for key, value in model.state_dict().items()
        if not key.startswith(tuple(elsewhere))
    }


def _load_own_state(model: DualEncoder, folder: Path) -> None:
    path = folder / WEIGHTS
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None
    expected = _own_state(model)
    misfits = sorted(saved.keys() ^ expected.keys())
    misfits += [key for key in saved if key in expected and saved[key].shape != expected[key].shape]
    if misfits:
        raise UserError(f"{path}: {misfits[0]!r} does not fit the model that config.json describes")
    model.load_state_dict(saved, strict=False)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
