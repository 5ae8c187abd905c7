"""The components of a run, built from its settings: data, model, objective."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nuclr import objectives
from nuclr.data import Loader, check_samples, open_labeled, open_pairs, read_keep, usable
from nuclr.data.builtin import BuiltinLabeled, BuiltinPairs
from nuclr.data.formats.embeddings import VectorPairs
from nuclr.data.modalities import ImageOptions
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.models import TEXT_PRESETS, DualEncoder, ImageFormat, Tokenizer, build_model
from nuclr.runs import settings as s

TOKENIZER_TEXTS = 1_000_000  # more texts do not change a small vocabulary
STANDARDIZE_BATCH = 4096
DEFAULT_IMAGE_SIZE = 224  # of loaders for models that do not read images
DEFAULT_ENCODERS = {"image": "tiny_resnet", "text": "tiny_text", "vector": "vectors"}

# Loaders shared by several runs on the same pairs, so that images are decoded once for all of them.
Loaders = dict[tuple[str, str, int, str], Loader]


@dataclass(frozen=True)
class Source:
    """Pairs, the numbers of those in use, and the bad ones with the reasons."""

    pairs: Pairs
    numbers: np.ndarray
    bad: dict[int, str]


# -- data --------------------------------------------------------------------------------------------------------------


def open_train(data: s.Data, check: bool = True) -> Source:
    """Open the training pairs: split, columns and `data.keep` as set, without bad samples."""
    return _open_source(data, str(data.train), data.split, data.keep, check)


def open_val(data: s.Data, check: bool = True) -> Source | None:
    """Open the held-out pairs, or return None if the run has none; `data.val_split` defaults to `data.split`."""
    return None if data.val is None else _open_source(data, data.val, data.val_split or data.split, None, check)


def _open_source(data: s.Data, path: str, split: str | None, keep: str | None, check: bool) -> Source:
    pairs = open_pairs(path, data.root, data.x.key, data.y.key, split, data.allow_outside)
    kept = None if keep is None else read_keep(below(data.root, keep), len(pairs))
    bad = check_samples(pairs, kept, data.max_bad_share, data.workers) if check else {}
    return Source(pairs, usable(pairs, bad, kept), bad)


def below(root: str | None, name: str) -> Path:
    """Return `name` relative to the root if it exists there, otherwise as it is."""
    return Path(root) / name if root is not None and (Path(root) / name).exists() else Path(name)


def open_classes(data: s.Data, pairs: Pairs) -> Any:
    """Open the labeled images of `data.classes`, or return None. Built-in ones have the size of the pairs' images."""
    if data.classes is None:
        return None
    if data.classes == "builtin":
        return BuiltinLabeled(size=pairs.size) if isinstance(pairs, BuiltinPairs) else BuiltinLabeled()
    return open_labeled(below(data.root, data.classes), allow_outside=data.allow_outside)


def make_loader(data: s.Data, pairs: Pairs, model: DualEncoder, loaders: Loaders | None = None) -> Loader:
    """Return a loader of pairs at the image size of the model, from `loaders` if these pairs were read before."""
    size = model.x.inputs.size if isinstance(model.x.inputs, ImageFormat) else DEFAULT_IMAGE_SIZE
    shared = {} if loaders is None else loaders
    key = (pairs.fingerprint, type(pairs).__name__, size, data.fit)
    if key not in shared:
        options = ImageOptions(size, data.fit)
        x, y = (options if kind == "image" else None for kind in (pairs.x_kind, pairs.y_kind))
        shared[key] = Loader(pairs, x, y, data.workers, memory=data.memory * 2**20)
    return shared[key]


def check_compatible(train: Source, val: Source) -> None:
    """Refuse held-out pairs of another modality or width than the training pairs."""
    for side in ("x", "y"):
        kinds = [getattr(source.pairs, f"{side}_kind") for source in (train, val)]
        if kinds[0] != kinds[1]:
            raise UserError(f"data.val holds {kinds[1]}s on side {side}, but data.train holds {kinds[0]}s")
        if kinds[0] == "vector":
            widths = [len(np.asarray(getattr(source.pairs, side)(0))) for source in (train, val)]
            if widths[0] != widths[1]:
                raise UserError(f"data.val has {side} of width {widths[1]}, but data.train has width {widths[0]}")


# -- model -------------------------------------------------------------------------------------------------------------


def make_model(model: s.Model, source: Source, seed: int) -> DualEncoder:
    """Return the dual encoder for these pairs; its random weights depend only on the seed."""
    pairs, numbers = source.pairs, source.numbers
    options: dict[str, Any] = {
        "width": model.width,
        "x_frozen": model.x.frozen,
        "y_frozen": model.y.frozen,
        "x_modality": pairs.x_kind,
        "y_modality": pairs.y_kind,
        "x_image_size": model.x.image_size,
        "y_max_length": model.y.max_length,
    }
    torch.manual_seed(seed)
    if model.pretrained is not None:
        return build_model(pretrained=model.pretrained, **options)
    encoders = {side: _encoder(side, getattr(model, side).encoder, pairs) for side in ("x", "y")}
    if model.x.image_size is None and isinstance(pairs, BuiltinPairs):
        options["x_image_size"] = pairs.size
    first = int(numbers[0])
    if encoders["x"] == "vectors":
        options["x_width"] = len(np.asarray(pairs.x(first)))
    if encoders["y"] == "vectors":
        options["y_width"] = len(np.asarray(pairs.y(first)))
    if encoders["y"] in TEXT_PRESETS and model.y.tokenizer is None:
        options["y_texts"] = (str(pairs.y(int(number))) for number in islice(numbers, TOKENIZER_TEXTS))
    built = build_model(
        encoders["x"],
        encoders["y"],
        x_head=model.x.head,
        y_head=model.y.head,
        y_tokenizer=model.y.tokenizer,
        **options,
    )
    if model.standardize and isinstance(pairs, VectorPairs):
        built.fit_vectors(_vectors(pairs, numbers, "x"), _vectors(pairs, numbers, "y"))
    return built


def _encoder(side: str, name: str | None, pairs: Pairs) -> str:
    kind = getattr(pairs, f"{side}_kind")
    if kind == "vector" and name not in (None, "vectors"):
        raise UserError(f"model.{side}.encoder is {name!r}, but the data holds vectors there; leave it out")
    if kind != "vector" and name == "vectors":
        raise UserError(f"model.{side}.encoder is 'vectors', but the data holds {kind}s there; name an encoder")
    return name or DEFAULT_ENCODERS[kind]


def _vectors(pairs: VectorPairs, numbers: np.ndarray, side: Literal["x", "y"]) -> Iterator[Tensor]:
    for begin in range(0, len(numbers), STANDARDIZE_BATCH):
        yield torch.from_numpy(pairs.items(side, numbers[begin : begin + STANDARDIZE_BATCH]))


# -- objective ---------------------------------------------------------------------------------------------------------


def make_objective(objective: s.Objective, num_samples: int) -> objectives.Objective:
    """Return the objective with one row of state per pair, used or not, so that a pair's number is its row."""
    try:
        return objectives.build(objective.name, num_samples=num_samples, **objective.arguments())
    except ValueError as error:
        raise UserError(f"objective.{error}") from None


# -- resolved settings -------------------------------------------------------------------------------------------------


def resolve(settings: s.Settings, out: Path, device: torch.device, source: Source, model: DualEncoder) -> s.Settings:
    """Return the settings with every default replaced by the value that is used."""
    data, sides = settings.data, settings.model
    changes: dict[str, Any] = {
        "out": str(out),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "plugins": tuple(str(Path(p).resolve()) if p.endswith(".py") else p for p in settings.plugins),
        "objective": dataclasses.replace(settings.objective, options=settings.objective.arguments()),
        "model.width": model.width,
    }
    if data.val is not None:
        changes["data.val_split"] = data.val_split or data.split
    for side in ("x", "y"):
        changes[f"data.{side}.key"] = getattr(source.pairs, f"{side}_key", None) or getattr(data, side).key
        if sides.pretrained is None:
            changes[f"model.{side}.encoder"] = _encoder(side, getattr(sides, side).encoder, source.pairs)
    if sides.pretrained is None:  # a pretrained model has its own image size and text length, which must not be set
        for side, inputs in (("x", model.x.inputs), ("y", model.y.inputs)):
            if isinstance(inputs, ImageFormat):
                changes[f"model.{side}.image_size"] = inputs.size
            if isinstance(inputs, Tokenizer):
                changes[f"model.{side}.max_length"] = inputs.max_length
    for key, value in changes.items():
        settings = s.change(settings, key, value)
    return settings


def to_device(inputs: Any, device: torch.device) -> Any:
    """Move a tensor, or a dict of tensors, to a device."""
    if isinstance(inputs, dict):
        return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
    return inputs.to(device, non_blocking=True)
