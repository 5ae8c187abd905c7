"""The components of a run, built from its settings: data, model, objective."""

import dataclasses
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr import arrays
from nuclr.data import Loader, SideChoice, ViewGroups, check_samples, open_labeled, open_pairs, read_keep, usable
from nuclr.data.builtin import BuiltinLabeled, BuiltinPairs
from nuclr.data.modalities import ImageOptions, TextOptions
from nuclr.data.pairs import SIDES, Pairs, SideName
from nuclr.data.selection import Source
from nuclr.errors import UserError
from nuclr.evaluation.test_sets import RETRIEVAL, open_standard_pairs, parse_standard
from nuclr.models import DualEncoder, Encoder, EncoderSide, ImageFormat, Tokenizer, build_model
from nuclr.models.presets import default_encoder
from nuclr.models.towers import VectorTower
from nuclr.remote import is_url, local_copy
from nuclr.runs import settings as s

TOKENIZER_TEXTS = 1_000_000  # more texts do not change a small vocabulary
STANDARDIZE_BATCH = 4096
DEFAULT_IMAGE_SIZE = 224  # of loaders for models that do not read images

# Loaders shared by several runs on the same pairs, so that images are decoded once for all of them.
Loaders = dict[tuple[Any, ...], Loader]

# -- data --------------------------------------------------------------------------------------------------------------


def open_train(data: s.Data, check: bool = True) -> Source:
    """Open the training pairs: split, columns and `data.keep` as set, without bad samples."""
    pairs = open_pairs_of_run(
        data,
        str(data.train),
        data.root,
        data.split,
    )
    keep = None if data.keep is None else read_keep(below(data.root, data.keep), len(pairs))
    return _check(data, pairs, check, keep)


def open_held_out(data: s.Data, check: bool = True) -> dict[str, Source]:
    """Open all sets of held-out pairs by name, without bad samples.

    Raises:
        UserError: if one cannot be opened; it names the setting.

    """
    opened = {}
    for name in data.val:
        try:
            opened[name] = _open_val_set(data, name, check)
        except UserError as error:
            raise UserError(f"{data.val_key(name)}: {error}") from None
    return opened


def val_split(data: s.Data, name: str) -> str | None:
    """Return the split of one of the sets of held-out pairs: its own, `data.val_split`, or the default.

    The default is "val" for standard sets. For a path without a name it is `data.split`, since one file may hold both.
    """
    split = data.val[name].split or data.val_split
    if split is None and parse_standard(data.val[name].path, RETRIEVAL, data.val_key(name)) is not None:
        return "val"
    return split or (data.split if name == s.UNNAMED else None)


def _open_val_set(
    data: s.Data,
    name: str,
    check: bool,
) -> Source:
    chosen = data.val[name]
    split = val_split(data, name)
    standard = parse_standard(chosen.path, RETRIEVAL, data.val_key(name))
    if standard is not None:
        pairs, _ = open_standard_pairs(*standard, str(split), data.allow_outside, data.x.name, data.y.name)
        return Source(pairs, np.arange(len(pairs)), {})
    if chosen.x_key is not None:
        data = s.change(data, "x", s.DataSide(key=chosen.x_key, name=data.x.name))
    if chosen.y_key is not None:
        data = s.change(data, "y", s.DataSide(key=chosen.y_key, name=data.y.name))
    open_set = open_pairs_of_run if name == s.UNNAMED else open_pairs_like_run
    return _check(data, open_set(data, chosen.path, chosen.root or data.root, split), check)


def _check(
    data: s.Data,
    pairs: Pairs,
    check: bool,
    keep: np.ndarray | None = None,
) -> Source:
    """Return pairs without the bad ones."""
    bad = check_samples(pairs, keep, data.max_bad_share, data.workers) if check else {}
    return Source(pairs, usable(pairs, bad, keep), bad)


def open_pairs_of_run(
    data: s.Data,
    path: str,
    root: str | None,
    split: str | None,
) -> Pairs:
    """Open pairs with the columns, modalities, names and views that `data` sets."""
    return open_pairs(
        path,
        root,
        x=SideChoice(data.x.key, data.x.modality, data.x.name),
        y=SideChoice(data.y.key, data.y.modality, data.y.name),
        split=split,
        allow_outside=data.allow_outside,
        views=data.contrasts_views,
    )


def open_pairs_like_run(
    data: s.Data,
    path: str,
    root: str | None,
    split: str | None,
) -> Pairs:
    """Open other pairs than a run's own, with its columns and modalities, or the usual ones if these do not exist.

    If a side of the run was not read from a column, such as an array of an embedding file, the modality of that side is
    recognized from the new pairs and not taken from the run.
    """
    for side in SIDES:
        if getattr(data, side).key is None:
            data = s.change(data, f"{side}.modality", None)
    try:
        return open_pairs_of_run(data, path, root, split)
    except UserError as error:
        usual = dataclasses.replace(
            data,
            x=s.DataSide(name=data.x.name),
            y=s.DataSide(name=data.y.name),
        )
        try:
            return open_pairs_of_run(usual, path, root, split)
        except UserError:
            raise error from None


def view_groups(data: s.Data, source: Source) -> ViewGroups | None:
    """Return the groups of pairs that views come from; None if every visit is of one pair.

    Raises:
        UserError: if the groups have fewer items than `views`.

    """
    views = {}
    for side in SIDES:  # views of images are crops of one image
        has_crops = source.pairs.sides[side].modality.has_crops
        views[side] = 1 if has_crops else getattr(data, side).views
    if max(views.values()) == 1:
        return None
    return ViewGroups(
        source.pairs,
        views["x"],
        views["y"],
        source.numbers,
    )


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
    x = _side_options(data, pairs, "x", x_encoder, smallest_crop)
    y = _side_options(data, pairs, "y", y_encoder, smallest_crop)
    shared = {} if loaders is None else loaders
    key = (pairs.fingerprint, type(pairs).__name__, x, y)
    if key not in shared:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        pin_memory = arrays.can_pin(device)
        shared[key] = Loader(
            pairs,
            x,
            y,
            data.workers,
            memory=data.memory * 2**20,
            pin_memory=pin_memory,
        )
    return shared[key]


def _side_options(
    data: s.Data,
    pairs: Pairs,
    side: SideName,
    encoder: Encoder,
    smallest_crop: float | None,
) -> ImageOptions | TextOptions | None:
    """Return the options of a side's modality; None for its defaults."""
    kind = pairs.sides[side].modality.name
    if kind == "image":
        size = encoder.inputs.size if isinstance(encoder.inputs, ImageFormat) else DEFAULT_IMAGE_SIZE
        return ImageOptions(size, data.fit, smallest_crop)
    text = getattr(data, side).text
    return TextOptions(text) if kind == "text" and text != "plain" else None


def make_class_loader(
    data: s.Data,
    classes: Any,
    model: DualEncoder,
    loaders: Loaders | None = None,
) -> Loader:
    """Return a loader of the labeled images of `data.classes`, whose x is for the side that takes images."""
    encoder = model.x if model.x.modality == "image" else model.y
    return make_loader(
        data,
        classes,
        model,
        loaders,
        encoders=(encoder, encoder),
    )


def name_sides(data: s.Data, pairs: Pairs) -> s.Data:
    """Return the settings with the names that the pairs gave to the sides, so that all sources use the same names."""
    for side in SIDES:
        data = s.change(data, f"{side}.name", pairs.sides[side].name)
    return data


# -- model -------------------------------------------------------------------------------------------------------------


def make_model(
    model: s.Model,
    source: Source,
    seed: int,
) -> DualEncoder:
    """Return the dual encoder for these pairs; its random weights depend only on the seed."""
    torch.manual_seed(seed)
    shared = model.shared
    if shared is None and model.pretrained is None:
        x, y = source.pairs.modalities
        shared = x == y != "vector" and model.y in (s.ModelSide(), model.x)
    built = build_model(
        x=_encoder_side(model, source, "x"),
        y=_encoder_side(model, source, "y"),
        shared=bool(shared),
        pretrained=model.pretrained,
        width=model.width,
    )
    if model.standardize and model.pretrained is None:
        # A shared encoder is fitted to the vectors of both sides.
        encoders: list[list[SideName]] = [["x", "y"]] if built.shared else [["x"], ["y"]]
        for sides in encoders:
            tower = getattr(built, sides[0]).tower
            if isinstance(tower, VectorTower):
                tower.fit(chain.from_iterable(_vectors(source, side) for side in sides))
    return built


def _encoder_side(
    model: s.Model,
    source: Source,
    side: SideName,
) -> EncoderSide:
    """Return the settings of one side, with what the pairs say: modality, width of vectors, texts for a tokenizer."""
    pairs = source.pairs
    kind = pairs.sides[side].modality.name
    options = dataclasses.asdict(getattr(model, side))
    if model.pretrained is None and kind == "image" and isinstance(pairs, BuiltinPairs):
        options["image_size"] = options["image_size"] or pairs.size
    options["width"] = source.width(side)
    texts = (str(pairs.item(side, int(number))) for number in islice(source.numbers, TOKENIZER_TEXTS))
    return EncoderSide(
        **options,
        modality=kind,
        texts=texts if kind == "text" else None,
    )


def matryoshka_widths(settings: s.Settings, model: DualEncoder) -> list[int]:
    """Return the widths that `model.matryoshka` asks for and the full one, in ascending order; by default none.

    Raises:
        UserError: if the features are not as wide, or their width is not known.

    """
    widths = settings.model.matryoshka
    width = model.width or 0
    if widths and widths[-1] > width:
        raise UserError(
            f"model.matryoshka is {widths}, but the width of the features is {width or 'not known'}; leave out "
            "what is wider, or set model.width and a head"
        )
    return sorted({*widths, width}) if widths else []


def check_tower_widths(model: DualEncoder) -> None:
    """Refuse `evaluate.head=false` if the towers have different numbers of features, which cannot be compared."""
    x, y = (getattr(side.head, "in_width", model.width) for side in (model.x, model.y))
    if x != y:
        raise UserError(
            f"evaluate.head is false, but the towers have {x} and {y} features, which cannot be compared; leave it out"
        )


def _vectors(source: Source, side: SideName) -> Iterator[Tensor]:
    for begin in range(0, len(source.numbers), STANDARDIZE_BATCH):
        numbers = source.numbers[begin : begin + STANDARDIZE_BATCH]
        yield torch.from_numpy(np.asarray(source.pairs.items(side, numbers)))


# -- resolved settings -------------------------------------------------------------------------------------------------


def resolve(
    settings: s.Settings,
    out: Path,
    device: torch.device,
    source: Source,
    model: DualEncoder,
) -> s.Settings:
    """Return the settings with every default replaced by the value that is used."""
    data = settings.data
    pairs = source.pairs
    own_encoders = settings.model.pretrained is None  # a pretrained model has its own image size and text length
    changes: dict[str, Any] = {
        "out": str(out),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "plugins": tuple(str(Path(p).resolve()) if p.endswith(".py") else p for p in settings.plugins),
        "objective": dataclasses.replace(settings.objective, options=settings.objective.arguments()),
        "model.width": model.width,
        "model.matryoshka": matryoshka_widths(settings, model),
        "data.val": {name: dataclasses.replace(own, split=val_split(data, name)) for name, own in data.val.items()},
    }
    if own_encoders:
        changes["model.shared"] = model.shared
    for side in SIDES:
        if side == "x" or not data.contrasts_views:
            changes[f"data.{side}.key"] = pairs.sides[side].key or getattr(data, side).key
            changes[f"data.{side}.modality"] = pairs.sides[side].modality.name
        changes[f"data.{side}.name"] = pairs.sides[side].name
        if own_encoders:
            chosen = getattr(settings.model, "x" if model.shared else side)
            inputs = getattr(model, side).inputs
            changes[f"model.{side}"] = dataclasses.replace(
                chosen,
                encoder=chosen.encoder or default_encoder(pairs.sides[side].modality.name, f"model.{side}"),
                image_size=inputs.size if isinstance(inputs, ImageFormat) else chosen.image_size,
                max_length=inputs.max_length if isinstance(inputs, Tokenizer) else chosen.max_length,
            )
    for key, value in changes.items():
        settings = s.change(settings, key, value)
    return settings


def to_device(inputs: Any, device: torch.device) -> Any:
    """Move a tensor, or a dict of tensors, to a device; a list of items, such as texts, stays as it is."""
    if isinstance(inputs, dict):
        return {name: to_device(tensor, device) for name, tensor in inputs.items()}
    if isinstance(inputs, Tensor):
        return arrays.to_device(inputs, device)
    # An encoder that a plugin registers may take inputs of a class of its own.
    return inputs if isinstance(inputs, list) else inputs.to(device, non_blocking=True)
