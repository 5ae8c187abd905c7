"""Pairs on disk -> numbered samples -> batches.

Reading order: `side` and `pairs` (the interface of every source), `formats/` (one file per format) and `builtin/`
(generated pairs), `opening` (a path -> pairs), `selection` (which samples are used), `epochs` (in which order,
and several captions of an image at once), `loader` (batches), `modalities/` (what a side can hold: images,
texts, vectors), `labeled` (images with classes, and their prompts), `vectors` (rows of one array).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nuclr.data.epochs import ViewGroups, all_batches, batches, epoch_order, steps_per_epoch
    from nuclr.data.formats.choose import SideChoice
    from nuclr.data.loader import Batch, Loader
    from nuclr.data.modalities import ImageOptions, Modality, get_modality, register_modality
    from nuclr.data.modalities.augment import Augment
    from nuclr.data.opening import open, open_labeled, open_pairs
    from nuclr.data.pairs import BadSample, Labeled, Pairs, Sample
    from nuclr.data.selection import check_samples, read_keep, usable, write_bad_samples
    from nuclr.data.side import Side
    from nuclr.data.vectors import Vectors

__all__ = [
    "Augment",
    "BadSample",
    "Batch",
    "ImageOptions",
    "Labeled",
    "Loader",
    "Modality",
    "Pairs",
    "Sample",
    "Side",
    "SideChoice",
    "Vectors",
    "ViewGroups",
    "all_batches",
    "batches",
    "check_samples",
    "epoch_order",
    "get_modality",
    "open",
    "open_labeled",
    "open_pairs",
    "read_keep",
    "register_modality",
    "steps_per_epoch",
    "usable",
    "write_bad_samples",
]

# Modules are imported on first use: vectors in a file need neither formats nor images.
_MODULES = {
    "epochs": (
        "ViewGroups",
        "all_batches",
        "batches",
        "epoch_order",
        "steps_per_epoch",
    ),
    "formats.choose": ("SideChoice",),
    "loader": (
        "Batch",
        "Loader",
    ),
    "modalities": (
        "ImageOptions",
        "Modality",
        "get_modality",
        "register_modality",
    ),
    "modalities.augment": ("Augment",),
    "opening": (
        "open",
        "open_labeled",
        "open_pairs",
    ),
    "pairs": (
        "BadSample",
        "Labeled",
        "Pairs",
        "Sample",
    ),
    "selection": (
        "check_samples",
        "read_keep",
        "usable",
        "write_bad_samples",
    ),
    "side": ("Side",),
    "vectors": ("Vectors",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"nuclr.data.{module}"), name)
    raise AttributeError(f"module 'nuclr.data' has no attribute {name!r}")
