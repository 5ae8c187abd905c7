"""What a run is made of, from its settings: data, model, objective."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nuclr import objectives
from nuclr.data import Loader, check_samples, open_labeled, open_pairs, read_keep, usable
from nuclr.data.builtin import BuiltinLabeled, BuiltinPairs
from nuclr.data.pairs import Pairs
from nuclr.data.modalities.augment import Augment
from nuclr.data.formats.embeddings import VectorPairs
from nuclr.errors import UserError
from nuclr.models import TEXT_PRESETS, DualEncoder, build_model
from nuclr.runs import settings as s

TOKENISER_CAPTIONS = 1_000_000  # more do not change a small vocabulary
STANDARDISE_BATCH = 4096
Loaders = dict[tuple[str, str, int], Loader]  # of several runs on the same pairs: pictures are decoded once for all


@dataclass(frozen=True)
class Source:
    """Pairs, the numbers of those in use, and the bad ones with their reasons."""

    pairs: Pairs
    numbers: np.ndarray
    bad: dict[int, str]


def open_source(data: s.Data, path: str, split: str | None, keep: str | None = None, check: bool = True) -> Source:
    """Open pairs, read the list of those to keep, and look for bad samples."""
    pairs = cast(Pairs, open_pairs(path, data.root, data.image_key, data.caption_key, split))
    kept = None if keep is None else read_keep(below(data.root, keep), len(pairs))
    bad = check_samples(pairs, kept, data.max_bad_share, data.workers) if check else {}
    return Source(pairs, usable(pairs, bad, kept), bad)


def below(root: str | None, name: str) -> Path:
    """`name` relative to the root where it is there, else as it is."""
    return Path(root) / name if root is not None and (Path(root) / name).exists() else Path(name)


def open_classes(data: s.Data, pairs: Pairs) -> Any:
    """Labeled images for zero-shot classification, or None; built-in ones have the size of built-in pairs."""
    if data.classes is None:
        return None
    if data.classes == "builtin":
        return BuiltinLabeled(size=pairs.size) if isinstance(pairs, BuiltinPairs) else BuiltinLabeled()
    return open_labeled(below(data.root, data.classes))


def make_model(model: s.Model, source: Source, seed: int) -> DualEncoder:
    """The dual encoder for these pairs; its random weights follow from the seed."""
    pairs, numbers = source.pairs, source.numbers
    options: dict[str, Any] = {
        "width": model.width,
        "x_head": model.image_head,
        "y_head": model.text_head,
        "x_frozen": model.image_frozen,
        "y_frozen": model.text_frozen,
        "image_size": model.image_size,
        "max_length": model.max_length,
        "tokenizer": model.tokenizer,
    }
    torch.manual_seed(seed)
    if model.pretrained is not None:
        built = build_model(pretrained=model.pretrained, **_given(options, "tokenizer", "x_head", "y_head"))
        _check_kinds(pairs, built)
        return built
    first = int(numbers[0])
    image = _tower("image", model.image, pairs.x_kind, "tiny_resnet")
    text = _tower("text", model.text, pairs.y_kind, "tiny_text")
    widths: dict[str, Any] = {}
    if image == "vectors":
        widths["x_width"] = len(np.asarray(pairs.x(first)))
    if text == "vectors":
        widths["y_width"] = len(np.asarray(pairs.y(first)))
    if text in TEXT_PRESETS and model.tokenizer is None:
        widths["texts"] = (str(pairs.y(int(number))) for number in islice(numbers, TOKENISER_CAPTIONS))
    built = build_model(image, text, **options, **widths)
    if model.standardize and isinstance(pairs, VectorPairs):
        built.fit_vectors(_vectors(pairs, numbers, 0), _vectors(pairs, numbers, 1))
    return built


def _given(options: dict[str, Any], *without: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in without}


def _tower(side: str, wanted: str | None, kind: str, default: str) -> str:
    if kind == "vector":
        if wanted not in (None, "vectors"):
            raise UserError(
                f"model.{side} is {wanted!r}, but the data holds vectors there; leave it out or say vectors"
            )
        return "vectors"
    if wanted == "vectors":
        raise UserError(f"model.{side} is 'vectors', but the data holds {kind}s there; name an encoder")
    return wanted or default


def _check_kinds(pairs: Pairs, model: DualEncoder) -> None:
    for name, kind, takes in (("x", pairs.x_kind, model.images), ("y", pairs.y_kind, model.tokenizer)):
        if (kind == "vector") != (takes is None):
            raise UserError(f"model.pretrained and data.train do not fit: the data holds {kind}s on side {name}")


def _vectors(pairs: VectorPairs, numbers: np.ndarray, side: int) -> Iterator[Tensor]:
    for begin in range(0, len(numbers), STANDARDISE_BATCH):
        yield torch.from_numpy(pairs.rows(numbers[begin : begin + STANDARDISE_BATCH])[side])


def make_objective(objective: s.Objective, num_samples: int) -> objectives.Objective:
    """The objective with one row of state for each pair of the data, used or not: numbers are never shifted."""
    try:
        return objectives.build(objective.name, num_samples=num_samples, **s.objective_options(objective))
    except ValueError as error:
        raise UserError(f"objective.{error}") from None


def make_loader(data: s.Data, pairs: Pairs, model: DualEncoder, loaders: Loaders | None = None) -> Loader:
    """Reads pairs at the size that the model takes; one of `loaders` where these pairs have been read before."""
    size = model.images.size if model.images is not None else 224
    shared = {} if loaders is None else loaders
    key = (pairs.fingerprint, type(pairs).__name__, size)
    if key not in shared:
        shared[key] = Loader(pairs, size, data.fit, data.workers, memory=data.memory * 2**20)
    return shared[key]


def make_augment(augment: s.Augmentation, model: DualEncoder, seed: int) -> Augment | None:
    """None where pictures are taken as they are."""
    if not augment.enabled or model.images is None:
        return None
    return Augment(model.images.size, seed, (augment.crop, 1.0), augment.flip, augment.operations, augment.magnitude)


def to_device(inputs: Any, device: torch.device) -> Any:
    """A tensor, or a dict of them."""
    if isinstance(inputs, dict):
        return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
    return inputs.to(device, non_blocking=True)
