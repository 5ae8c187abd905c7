"""Pairs on disk -> numbered samples -> batches.

Reading order: `pairs` (the interface of every source), `formats/` (one file per format) and `builtin/` (generated
pairs), `open` (a path -> pairs), `selection` (which samples are used), `epochs` (in which order),
`view_groups` (several captions of an image at once), `loader` (batches), `modalities/` (what a side can hold: images,
texts, vectors), `labeled` (images with classes), `prompts` (texts of classes), `texts` (compact storage of many texts),
`key_index` (stable numbers for samples of a stream).
"""

from nuclr.data.epochs import all_batches, batches, epoch_order, steps_per_epoch
from nuclr.data.key_index import KeyIndex
from nuclr.data.labeled import open_labeled
from nuclr.data.loader import Batch, Loader
from nuclr.data.modalities import ImageOptions, Modality, get_modality, register_modality
from nuclr.data.modalities.augment import Augment, normalize
from nuclr.data.open import open_pairs
from nuclr.data.pairs import BadSample, Pairs, Sample
from nuclr.data.selection import check_samples, read_keep, usable, write_bad_samples
from nuclr.data.view_groups import ViewGroups

__all__ = [
    "Augment",
    "BadSample",
    "Batch",
    "ImageOptions",
    "KeyIndex",
    "Loader",
    "Modality",
    "Pairs",
    "Sample",
    "ViewGroups",
    "all_batches",
    "batches",
    "check_samples",
    "epoch_order",
    "get_modality",
    "normalize",
    "open_labeled",
    "open_pairs",
    "read_keep",
    "register_modality",
    "steps_per_epoch",
    "usable",
    "write_bad_samples",
]
