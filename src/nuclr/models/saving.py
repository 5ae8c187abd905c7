"""Save a dual encoder to a folder and load it. Nothing is pickled.

    config.json          both sides, and how their inputs are prepared
    model.safetensors    heads, standardization, and the user's own modules
    image/  text/        the towers of x and y, which AutoModel can load; text/ also has the tokenizer
    joint/               instead of these two for a CLIP or SigLIP: CLIPModel and SiglipModel can load it

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
from nuclr.models.backbones import first_line, load_backbone, no_model_in, quiet, read_json
from nuclr.models.dual_encoder import DualEncoder
from nuclr.models.encoder import Encoder, Head
from nuclr.models.image_format import ImageFormat, write_image_format
from nuclr.models.pretrained import Joint, read_joint, write_joint
from nuclr.models.tokenizer import Tokenizer, load_tokenizer
from nuclr.models.towers import ImageTower, TextTower, VectorTower

TOWERS: dict[type[nn.Module], str] = {ImageTower: "image", TextTower: "text", VectorTower: "vectors"}
FOLDERS = {"x": "image", "y": "text"}
MODULE = "module"  # the user's own
CONFIG, WEIGHTS, TEMPORARY = "config.json", "model.safetensors", ".saving"


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
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; needs one written by DualEncoder.save_pretrained")
    if not (folder / CONFIG).is_file():
        raise UserError(no_model_in(folder))
    config = read_json(folder / CONFIG)
    if "nuclr" not in config:
        raise UserError(
            f"{folder}: not a dual encoder saved by nuclr; open a CLIP or SigLIP with build_model(pretrained=...)"
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
    config: dict[str, Any] = {"nuclr": nuclr.__version__, "joint": model.joint is not None}
    config |= {"x": _side_config(model.x), "y": _side_config(model.y)}
    config["images"] = model.images and asdict(model.images)
    config["texts"] = model.tokenizer and {
        "max_length": model.tokenizer.max_length,
        "padding": model.tokenizer.padding,
    }
    if model.joint and model.images:
        write_joint(model.joint, folder / "joint", model.x, model.y, model.images)
    for name, side in (("x", model.x), ("y", model.y)):
        if not model.joint and isinstance(side.tower, ImageTower | TextTower):
            with quiet():
                side.tower.backbone.save_pretrained(folder / FOLDERS[name])
    if model.images and not model.joint:
        write_image_format(model.images, folder / "image")
    if model.tokenizer:
        model.tokenizer.tokenizer.save_pretrained(folder / ("joint" if model.joint else "text"))
    save_file(_own_state(model), folder / WEIGHTS)
    return config


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
    images = config["images"] and ImageFormat(**{key: _tuple(value) for key, value in config["images"].items()})
    texts = config["texts"] and Tokenizer(
        load_tokenizer(folder / ("joint" if config["joint"] else "text"), str(folder)), **config["texts"]
    )
    joint: Joint | None = None
    if config["joint"]:
        encoders, joint = read_joint(folder / "joint", str(folder), images.size)
    else:
        modules = {"x": x, "y": y}
        encoders = [_load_side(config[name], folder, name, modules[name], images) for name in ("x", "y")]
    model = DualEncoder(*encoders, images=images, tokenizer=texts, joint=joint)
    _load_own_state(model, folder)
    for name, side in (("x", model.x), ("y", model.y)):
        if config[name]["frozen"]:
            side.freeze()
    return model


def _side_config(side: Encoder) -> dict[str, Any]:
    head = side.head if isinstance(side.head, Head) else None
    return {
        "tower": TOWERS.get(type(side.tower), MODULE),
        "head": None if head is None else {"kind": head.kind, "in_width": head.in_width, "width": head.width},
        "frozen": side.frozen,
    }


def _load_side(
    config: dict[str, Any], folder: Path, name: str, module: nn.Module | None, images: ImageFormat
) -> Encoder:
    head = config["head"] and _load_head(config["head"], folder)
    tower: nn.Module
    if config["tower"] == "image":
        tower = ImageTower(load_backbone(folder / FOLDERS[name], str(folder), "image"), images.size)
    elif config["tower"] == "text":
        tower = TextTower(load_backbone(folder / FOLDERS[name], str(folder), "text"))
    elif config["tower"] == "vectors":
        tower = VectorTower(config["head"]["in_width"])
    elif module is None:
        raise UserError(
            f"{folder}: side {name} is a module of your own; pass one of the same structure: "
            f"from_pretrained(..., {name}=module)"
        )
    else:
        tower = module
    return Encoder(tower, head)


def _load_head(config: dict[str, Any], folder: Path) -> Head:
    """Make a head, unless it is larger than the file with its weights: no memory is taken for a size only claimed."""
    kind, widths = config["kind"], [config["in_width"], config["width"]]
    size = (folder / WEIGHTS).stat().st_size if (folder / WEIGHTS).is_file() else 0
    if not all(type(width) is int and 0 < width <= 2**20 for width in widths):
        raise UserError(f"{folder / CONFIG}: a head has widths {str(widths)[:80]}; needs two positive whole numbers")
    if kind != "none" and math.prod(widths) > max(size, 2**24):  # a weight takes more than one byte
        raise UserError(f"{folder / CONFIG}: a head has widths {widths}, too large for {WEIGHTS} of {size} bytes")
    # Head makes the layers of all kinds; those of a large head that keeps no weights would only cost memory.
    with torch.device("meta") if kind == "none" and max(widths) > 4096 else contextlib.nullcontext():
        return Head(**config)


def _own_state(model: DualEncoder) -> dict[str, Tensor]:
    """Return the state that transformers does not save, as contiguous copies, which safetensors requires."""
    elsewhere = ["x.", "y."] if model.joint else []
    elsewhere += [
        f"{name}.tower.backbone."
        for name, side in (("x", model.x), ("y", model.y))
        if isinstance(side.tower, ImageTower | TextTower)
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
