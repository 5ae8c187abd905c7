"""A dual encoder as a folder, with nothing pickled in it.

    config.json          the two sides, and how their inputs are prepared
    model.safetensors    heads, standardization, and modules that are the user's own
    image/  text/        the towers of x and y, which AutoModel reads by themselves; the tokenizer is in text/
    joint/               in place of these two for a CLIP or SigLIP: CLIPModel and SiglipModel read it

Weights are read in float32.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nuclr
from nuclr.errors import UserError
from nuclr.models.backbones import first_line, load_backbone, quiet
from nuclr.models.dual_encoder import DualEncoder
from nuclr.models.encoder import Encoder
from nuclr.models.heads import Head
from nuclr.models.image_format import ImageFormat, write_image_format
from nuclr.models.locate import read_json
from nuclr.models.pretrained import Joint, read_joint, write_joint
from nuclr.models.tokenizer import Tokenizer, load_tokenizer
from nuclr.models.towers import ImageTower, TextTower, VectorTower

TOWERS: dict[type[nn.Module], str] = {ImageTower: "image", TextTower: "text", VectorTower: "vectors"}
FOLDERS = {"x": "image", "y": "text"}
MODULE = "module"  # of the user's own making


def save(model: DualEncoder, folder: Path) -> None:
    """Write `model` to `folder`, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _save(model, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the model cannot be written there ({first_line(error)})") from None


def load(folder: Path, x: nn.Module | None = None, y: nn.Module | None = None) -> DualEncoder:
    """Read what `save` wrote, in eval mode; `x`, `y` take the place of modules that were the user's own."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json there; needs a folder written by DualEncoder.save_pretrained")
    facts = read_json(folder / "config.json")
    if "nuclr" not in facts:
        raise UserError(
            f"{folder}: not a dual encoder of nuclr; a CLIP or SigLIP is opened by build_model(pretrained=...)"
        )
    try:
        return _load(facts, folder, x, y).eval()
    except KeyError as error:
        raise UserError(f"{folder / 'config.json'}: lacks {error}") from None


def _save(model: DualEncoder, folder: Path) -> None:
    facts: dict[str, Any] = {"nuclr": nuclr.__version__, "joint": model.joint is not None}
    facts |= {"x": _facts(model.x), "y": _facts(model.y)}
    facts["images"] = model.images and asdict(model.images)
    facts["texts"] = model.tokenizer and {"max_length": model.tokenizer.max_length, "padding": model.tokenizer.padding}
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
    save_file(_rest(model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _load(facts: dict[str, Any], folder: Path, x: nn.Module | None, y: nn.Module | None) -> DualEncoder:
    images = facts["images"] and ImageFormat(**{key: _tuple(value) for key, value in facts["images"].items()})
    texts = facts["texts"] and Tokenizer(
        load_tokenizer(folder / ("joint" if facts["joint"] else "text"), str(folder)), **facts["texts"]
    )
    joint: Joint | None = None
    if facts["joint"]:
        encoders, joint = read_joint(folder / "joint", str(folder), images.size)
    else:
        given = {"x": x, "y": y}
        encoders = [_side(facts[name], folder, name, given[name], images) for name in ("x", "y")]
    model = DualEncoder(*encoders, images=images, tokenizer=texts, joint=joint)
    rest = _read(folder / "model.safetensors")
    state = _rest(model)
    if rest.keys() != state.keys() or any(rest[key].shape != state[key].shape for key in rest):
        odd = sorted(rest.keys() ^ state.keys()) or [key for key in rest if rest[key].shape != state[key].shape]
        raise UserError(f"{folder / 'model.safetensors'}: {odd[0]!r} does not fit the model that config.json describes")
    model.load_state_dict(rest, strict=False)
    for name, side in (("x", model.x), ("y", model.y)):
        if facts[name]["frozen"]:
            side.freeze()
    return model


def _facts(side: Encoder) -> dict[str, Any]:
    head = side.head if isinstance(side.head, Head) else None
    return {
        "tower": TOWERS.get(type(side.tower), MODULE),
        "head": None if head is None else {"kind": head.kind, "in_width": head.in_width, "width": head.width},
        "frozen": side.frozen,
    }


def _side(facts: dict[str, Any], folder: Path, name: str, module: nn.Module | None, images: ImageFormat) -> Encoder:
    head = facts["head"] and Head(**facts["head"])
    tower: nn.Module
    if facts["tower"] == "image":
        tower = ImageTower(load_backbone(folder / FOLDERS[name], str(folder), "image"), images.size)
    elif facts["tower"] == "text":
        tower = TextTower(load_backbone(folder / FOLDERS[name], str(folder), "text"))
    elif facts["tower"] == "vectors":
        tower = VectorTower(facts["head"]["in_width"])
    elif module is None:
        raise UserError(
            f"{folder}: its {name} side is a module of your own; give one to fill: from_pretrained(..., {name}=)"
        )
    else:
        tower = module
    return Encoder(tower, head)


def _rest(model: DualEncoder) -> dict[str, Tensor]:
    """What is not in a folder of transformers: contiguous copies, as safetensors wants them."""
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


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
