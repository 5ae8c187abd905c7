"""The components of a run, built from its settings: data, model, objective."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr import objectives, transfer
from nuclr.data import Loader, ViewGroups, check_samples, open_labeled, open_pairs, read_keep, usable
from nuclr.data.builtin import BuiltinLabeled, BuiltinPairs
from nuclr.data.formats.listed import ListedPairs
from nuclr.data.modalities import ImageOptions, TextOptions
from nuclr.data.pairs import SIDES, Pairs, Side
from nuclr.errors import UserError
from nuclr.evaluation.standard_sets import open_standard_pairs, parse_standard
from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL
from nuclr.models import (
    TEXT_PRESETS,
    DualEncoder,
    Encoder,
    ImageFormat,
    Tokenizer,
    build_model,
    encoder_names,
    modality_of,
)
from nuclr.models.towers import VectorTower
from nuclr.remote import is_url, local_copy
from nuclr.runs import settings as s

TOKENIZER_TEXTS = 1_000_000  # more texts do not change a small vocabulary
STANDARDIZE_BATCH = 4096
MOST_COMPARED = 500_000  # longer lists of training and held-out pairs are not searched for common items
SHARED = 0.01  # if a larger share of the held-out items is also in the training set, a warning says so
DEFAULT_IMAGE_SIZE = 224  # of loaders for models that do not read images
DEFAULT_ENCODERS = {"image": "tiny_resnet", "text": "tiny_text", "vector": "vectors"}

# Loaders shared by several runs on the same pairs, so that images are decoded once for all of them.
Loaders = dict[tuple[Any, ...], Loader]


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
    """Open the first set of held-out pairs, or return None if the run has none."""
    return next((open_val_set(data, name, check) for name in data.val_sets), None)


def open_held_out(data: s.Data, check: bool = True) -> dict[str, Source]:
    """Open all sets of held-out pairs by name; see `Data.val_sets`."""
    return {name: open_val_set(data, name, check) for name in data.val_sets}


def val_split(data: s.Data, name: str) -> str | None:
    """Return the split of one of the sets of held-out pairs: its own, `data.val_split`, or the default.

    The default is "val" for standard sets. For a path without a name it is `data.split`, since one file may hold both.
    """
    split = data.val_sets[name].split or data.val_split
    if split is None and _standard_set(data, name) is not None:
        return "val"
    return split or (None if isinstance(data.val, Mapping) else data.split)


def _standard_set(data: s.Data, name: str) -> tuple[str, Path] | None:
    path = str(data.val_sets[name].path)
    if "::" in path:  # several tars
        return None
    return parse_standard(path, RETRIEVAL, data.val_key(name), CLASSIFICATION, "data.classes")


def open_val_set(data: s.Data, name: str, check: bool = True) -> Source:
    """Open one of the sets of held-out pairs, without bad samples.

    Raises:
        UserError: if it cannot be opened; it names the setting.

    """
    chosen, key, split = data.val_sets[name], data.val_key(name), val_split(data, name)
    path, standard = str(chosen.path), _standard_set(data, name)
    if standard is not None:
        opened = open_standard_pairs(*standard, str(split), data.allow_outside, data.x.name, data.y.name)
        return Source(opened.pairs, np.arange(len(opened.pairs)), {})
    if not isinstance(data.val, Mapping):
        return _open_source(data, path, split, None, check)
    x, y = (
        own if column is None else s.DataSide(column, name=own.name)
        for own, column in ((data.x, chosen.x_key), (data.y, chosen.y_key))
    )
    root = chosen.root or data.root
    try:
        pairs = open_pairs_like_run(dataclasses.replace(data, x=x, y=y), path, root, split)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    return _check_source(data, pairs, None, check)


def _open_source(data: s.Data, path: str, split: str | None, keep: str | None, check: bool) -> Source:
    return _check_source(data, open_pairs_of_run(data, path, data.root, split), keep, check)


def _check_source(data: s.Data, pairs: Pairs, keep: str | None, check: bool) -> Source:
    kept = None if keep is None else read_keep(below(data.root, keep), len(pairs))
    bad = check_samples(pairs, kept, data.max_bad_share, data.workers) if check else {}
    return Source(pairs, usable(pairs, bad, kept), bad)


def open_pairs_of_run(data: s.Data, path: str, root: str | None, split: str | None) -> Pairs:
    """Open pairs with the columns, modalities, names and views that `data` sets."""
    return open_pairs(
        path,
        root,
        data.x.key,
        data.y.key,
        split,
        data.allow_outside,
        x_kind=data.x.modality,
        y_kind=data.y.modality,
        x_name=data.x.name,
        y_name=data.y.name,
        views=data.contrasts_views,
    )


def open_pairs_like_run(data: s.Data, path: str, root: str | None, split: str | None) -> Pairs:
    """Open other pairs than a run's own, with its columns and modalities, or the usual ones if these do not exist.

    If a side of the run was not read from a column, such as an array of an embedding file, the modality of that side is
    recognized from the new pairs and not taken from the run.
    """
    x, y = (side if side.key is not None else s.DataSide(name=side.name) for side in (data.x, data.y))
    data = dataclasses.replace(data, x=x, y=y)
    usual = dataclasses.replace(data, x=s.DataSide(name=data.x.name), y=s.DataSide(name=data.y.name))
    try:
        return open_pairs_of_run(data, path, root, split)
    except UserError as error:
        if usual == data:
            raise
        try:
            return open_pairs_of_run(usual, path, root, split)
        except UserError:
            raise error from None


def view_groups(settings: s.Settings, source: Source) -> ViewGroups | None:
    """Return the groups of pairs that views come from; None if every visit is of one pair.

    Raises:
        UserError: if the pairs do not have so many views.

    """
    data, pairs, views = settings.data, source.pairs, {"x": 1, "y": 1}
    for side in SIDES:
        kind, wanted = getattr(pairs, f"{side}_kind"), getattr(data, side).views
        if kind != "image":
            views[side] = wanted
        elif wanted > 1 and not settings.augment.enabled:
            raise UserError(
                f"data.{side}.views={wanted} needs augmentation, or all views of an image are equal; "
                f"set augment.enabled=true or data.{side}.views=1"
            )
    if max(views.values()) == 1:
        return None
    groups = ViewGroups(pairs, views["x"], views["y"], source.numbers)
    if groups.count < 2:
        raise UserError(
            "data.train has only one group of pairs that belong together, which data.x.views and data.y.views contrast "
            "with other groups; leave them out"
        )
    return groups


def below(root: str | None, name: str) -> Path:
    """Return `name` relative to the root if it exists there, otherwise as it is; a URL gives its local copy."""
    if is_url(name):
        return local_copy(name)
    return Path(root) / name if root is not None and (Path(root) / name).exists() else Path(name)


def open_classes(data: s.Data, pairs: Pairs) -> Any:
    """Open the labeled images of `data.classes`, or return None. Built-in ones have the size of the pairs' images."""
    if data.classes is None:
        return None
    if data.classes == "builtin":
        return BuiltinLabeled(size=pairs.size) if isinstance(pairs, BuiltinPairs) else BuiltinLabeled()
    if is_url(data.classes):
        raise UserError(f"data.classes={data.classes}: labeled images must be in a local folder; download them first")
    return open_labeled(below(data.root, data.classes), allow_outside=data.allow_outside)


def make_loader(
    data: s.Data,
    pairs: Pairs,
    model: DualEncoder,
    loaders: Loaders | None = None,
    encoders: tuple[Encoder, Encoder] | None = None,
    smallest_crop: float | None = None,
) -> Loader:
    """Return a loader of pairs at the image sizes of the model, from `loaders` if these pairs were read before.

    Args:
        data: the settings.
        pairs: the pairs to read.
        model: the dual encoder.
        loaders: shared by several runs on the same pairs, so that images are decoded once.
        encoders: the encoders of x and of y; the model's by default.
        smallest_crop: of the random crops in training; None if the loader gives no random crops.

    """
    x_encoder, y_encoder = encoders or (model.x, model.y)
    x = _side_options(data, data.x, pairs.x_kind, x_encoder, smallest_crop)
    y = _side_options(data, data.y, pairs.y_kind, y_encoder, smallest_crop)
    shared = {} if loaders is None else loaders
    key = (pairs.fingerprint, type(pairs).__name__, x, y)
    if key not in shared:
        pin_memory = transfer.can_pin(_device(model))
        shared[key] = Loader(pairs, x, y, data.workers, memory=data.memory * 2**20, pin_memory=pin_memory)
    return shared[key]


def _side_options(
    data: s.Data, side: s.DataSide, kind: str, encoder: Encoder, smallest_crop: float | None
) -> ImageOptions | TextOptions | None:
    """Return the options of a side's modality; None for its defaults."""
    if kind == "image":
        return ImageOptions(_image_size(encoder), data.fit, smallest_crop)
    return TextOptions(side.text) if kind == "text" and side.text != "plain" else None


def make_class_loader(data: s.Data, classes: Any, model: DualEncoder, loaders: Loaders | None = None) -> Loader:
    """Return a loader of the labeled images of `data.classes`, whose x is for the side that takes images."""
    encoder = model.x if model.x.modality == "image" else model.y
    return make_loader(data, classes, model, loaders, encoders=(encoder, encoder))


def _device(model: DualEncoder) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _image_size(encoder: Encoder) -> int:
    return encoder.inputs.size if isinstance(encoder.inputs, ImageFormat) else DEFAULT_IMAGE_SIZE


def check_compatible(train: Source, val: Source, key: str = "data.val") -> None:
    """Refuse held-out pairs, of the setting `key`, of another modality or width than the training pairs."""
    for side in SIDES:
        kinds = [getattr(source.pairs, f"{side}_kind") for source in (train, val)]
        if kinds[0] != kinds[1]:
            raise UserError(f"{key} holds {kinds[1]}s on side {side}, but data.train holds {kinds[0]}s")
        if kinds[0] == "vector":
            widths = [_vector_width(source.pairs, side, int(source.numbers[0])) for source in (train, val)]
            if widths[0] != widths[1]:
                raise UserError(f"{key} has {side} of width {widths[1]}, but data.train has width {widths[0]}")


def describe_overlap(train: Source, val: Source, key: str = "data.val") -> str | None:
    """Return a warning if held-out pairs are also training pairs, or their images also training images; else None.

    Only what lists hold is compared, the names of files and texts, so no image is read. Other formats are compared as a
    whole.

    Args:
        train: the training pairs.
        val: the held-out pairs.
        key: the setting that names them.

    """
    advice = "so its recall does not show how the model does on new data; hold out other pairs"
    if train.pairs.fingerprint == val.pairs.fingerprint:
        return f"{key} holds the same pairs as data.train, {advice}"
    if max(len(train.numbers), len(val.numbers)) > MOST_COMPARED:
        return None
    images = [side for side in SIDES if getattr(val.pairs, f"{side}_kind") == "image"]
    sides = tuple(images[:1]) or SIDES
    held_out, trained = (_identities(source, sides) for source in (val, train))
    shared = len(held_out & trained)
    if shared <= SHARED * len(held_out):
        return None
    what = "images" if images else "pairs"
    return f"{key}: {shared:,} of its {len(held_out):,} {what} are also in data.train, {advice}"


def _identities(source: Source, sides: tuple[Side, ...]) -> set[tuple[str, ...]]:
    """Return the distinct items of these sides, by the paths of their files or by their texts.

    The set is empty if the source is not a list of them.
    """
    pairs, columns = source.pairs, []
    if not isinstance(pairs, ListedPairs):
        return set()
    numbers = np.setdiff1d(source.numbers, np.fromiter(pairs.known_bad, np.int64))
    for side in sides:
        if getattr(pairs, f"{side}_kind") == "text":
            columns.append([str(text) for text in pairs.items(side, numbers)])
        elif all(files := [pairs.file(side, number) for number in numbers.tolist()]):
            columns.append([str(Path(str(file)).absolute()) for file in files])
        else:
            return set()
    return set(zip(*columns, strict=True))


def _vector_width(pairs: Pairs, side: Side, number: int) -> int:
    return len(np.asarray(getattr(pairs, side)(number)))


def name_sides(data: s.Data, pairs: Pairs) -> s.Data:
    """Return the settings with the names that the pairs gave to the sides, so that all sources use the same names."""
    x, y = (dataclasses.replace(getattr(data, side), name=getattr(pairs, f"{side}_name")) for side in SIDES)
    return dataclasses.replace(data, x=x, y=y)


# -- model -------------------------------------------------------------------------------------------------------------


def make_model(model: s.Model, source: Source, seed: int) -> DualEncoder:
    """Return the dual encoder for these pairs; its random weights depend only on the seed."""
    pairs, numbers = source.pairs, source.numbers
    options: dict[str, Any] = {"width": model.width, "shared": is_shared(model, pairs)}
    for side in SIDES:
        chosen = getattr(model, side)
        options[f"{side}_modality"] = getattr(pairs, f"{side}_kind")
        for key in ("frozen", "image_size", "max_length"):
            options[f"{side}_{key}"] = getattr(chosen, key)
    torch.manual_seed(seed)
    if model.pretrained is not None:
        return build_model(pretrained=model.pretrained, **options | {"shared": bool(model.shared)})
    encoders = [_encoder("x", model.x.encoder, pairs)]
    encoders += [_encoder("y", model.y.encoder or (encoders[0] if options["shared"] else None), pairs)]
    for side, encoder in zip(SIDES, encoders, strict=True):
        kind, chosen = getattr(pairs, f"{side}_kind"), getattr(model, side)
        for key in ("head", "tokenizer", "pooling", "image_normalization"):
            options[f"{side}_{key}"] = getattr(chosen, key)
        if kind == "image" and chosen.image_size is None and isinstance(pairs, BuiltinPairs):
            options[f"{side}_image_size"] = pairs.size
        if kind == "vector":
            options[f"{side}_width"] = _vector_width(pairs, side, int(numbers[0]))
            if options["shared"] and options[f"{side}_width"] != options["x_width"]:
                widths = f"{options['x_width']} and {options['y_width']}"
                raise UserError(f"model.shared=true: vectors of {widths} coordinates need two encoders; leave it out")
        if encoder in TEXT_PRESETS and chosen.tokenizer is None:
            options[f"{side}_texts"] = _texts(pairs, side, numbers)
    built = build_model(*encoders, **options)
    if model.standardize:
        vector_sides = [side for side in SIDES if isinstance(getattr(built, side).tower, VectorTower)]
        built.fit_vectors(**{side: _vectors(pairs, numbers, side) for side in vector_sides})
    return built


def check_tower_widths(model: DualEncoder) -> None:
    """Refuse `evaluate.head=false` if the towers have different numbers of features, which cannot be compared."""
    x, y = (getattr(side.head, "in_width", model.width) for side in (model.x, model.y))
    if x != y:
        raise UserError(
            f"evaluate.head is false, but the towers have {x} and {y} features, which cannot be compared; leave it out"
        )


def is_shared(model: s.Model, pairs: Pairs) -> bool:
    """Return whether both sides have one encoder: as set, or if both hold images or texts and y has no own options."""
    if model.shared and pairs.x_kind != pairs.y_kind:
        raise UserError(
            f"model.shared=true: one encoder cannot take both {pairs.x_kind}s (side x) and {pairs.y_kind}s (side y); "
            "leave it out"
        )
    if model.shared is not None:
        return model.shared
    return pairs.x_kind == pairs.y_kind != "vector" and model.y in (s.ModelSide(), model.x)


def _encoder(side: Side, name: str | None, pairs: Pairs) -> str:
    """Return the encoder of a side, after a check that it takes what the side holds."""
    kind = getattr(pairs, f"{side}_kind")
    if name is None:
        names = [DEFAULT_ENCODERS[kind]] if kind in DEFAULT_ENCODERS else encoder_names(kind)
        if len(names) != 1:
            fix = f"name one of {', '.join(names)}" if names else "register one in a plugin (register_encoder)"
            raise UserError(f"model.{side}.encoder is missing, and the data holds {kind}s there; {fix}")
        return names[0]
    if modality_of(name) not in (None, kind):
        names = encoder_names(kind)
        fix = f"name one of {', '.join(names)}" if names else "register one in a plugin (register_encoder)"
        fix = "leave it out" if kind == "vector" else f"{fix}, or a folder" if kind in DEFAULT_ENCODERS else fix
        raise UserError(f"model.{side}.encoder is {name!r}, but the data holds {kind}s there; {fix}")
    return name


def _texts(pairs: Pairs, side: Side, numbers: np.ndarray) -> Iterator[str]:
    return (str(getattr(pairs, side)(int(number))) for number in islice(numbers, TOKENIZER_TEXTS))


def _vectors(pairs: Pairs, numbers: np.ndarray, side: Side) -> Iterator[Tensor]:
    for begin in range(0, len(numbers), STANDARDIZE_BATCH):
        yield torch.from_numpy(np.asarray(pairs.items(side, numbers[begin : begin + STANDARDIZE_BATCH])))


# -- objective ---------------------------------------------------------------------------------------------------------


def make_objective(objective: s.Objective, num_samples: int) -> objectives.Objective:
    """Return the objective with one row of state per pair (or group of pairs, see `view_groups`), used or not."""
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
    if isinstance(data.val, Mapping):
        sets = {name: dataclasses.replace(own, split=val_split(data, name)) for name, own in data.val.items()}
        changes["data.val"] = sets
    elif data.val is not None:
        changes["data.val_split"] = val_split(data, "val")
    if sides.pretrained is None:
        changes["model.shared"] = model.shared
    for side in SIDES:
        pairs, encoder = source.pairs, getattr(model, side)
        if side == "x" or not data.contrasts_views:
            changes[f"data.{side}.key"] = getattr(pairs, f"{side}_key") or getattr(data, side).key
            changes[f"data.{side}.modality"] = getattr(pairs, f"{side}_kind")
        changes[f"data.{side}.name"] = getattr(pairs, f"{side}_name")
        if sides.pretrained is None:  # a pretrained model has its own image size and text length, not to be set
            chosen = getattr(sides, "x" if model.shared else side)
            changes[f"model.{side}"] = dataclasses.replace(
                chosen,
                encoder=_encoder(side, chosen.encoder, pairs),
                image_size=encoder.inputs.size if isinstance(encoder.inputs, ImageFormat) else chosen.image_size,
                max_length=encoder.inputs.max_length if isinstance(encoder.inputs, Tokenizer) else chosen.max_length,
            )
    for key, value in changes.items():
        settings = s.change(settings, key, value)
    return settings


def to_device(inputs: Any, device: torch.device) -> Any:
    """Move a tensor, or a dict of tensors, to a device; a list of items, such as texts, stays as it is."""
    if isinstance(inputs, list):
        return inputs
    if isinstance(inputs, dict):
        return {name: to_device(tensor, device) for name, tensor in inputs.items()}
    if isinstance(inputs, Tensor):
        return transfer.to_device(inputs, device)
    return inputs.to(device, non_blocking=True)  # inputs of an encoder that a plugin registers
