"""Pairs on disk -> numbered samples -> batches.

A newcomer's way through: `pairs` (what every source looks like), one file a format (`caption_list`, `table`, `parquet`,
`hf`, `tars`, `vectors`, and `builtin`), `open` (a path -> pairs), `check` and `keep` (which samples are used),
`batches` (in which order), `loader` (pixels and texts), `transforms` (augmentation); `labeled` for classification.
"""

from nuclr.data.epochs import all_batches, batches, epoch_order, steps_per_epoch
from nuclr.data.labeled import open_labeled
from nuclr.data.loader import Batch, Loader
from nuclr.data.modalities.augment import Augment, normalize
from nuclr.data.open import open_pairs
from nuclr.data.pairs import BadSample, Pairs
from nuclr.data.selection import check_samples, read_keep, usable, write_bad_samples

__all__ = [
    "Augment",
    "BadSample",
    "Batch",
    "Loader",
    "Pairs",
    "all_batches",
    "batches",
    "check_samples",
    "epoch_order",
    "normalize",
    "open_labeled",
    "open_pairs",
    "read_keep",
    "steps_per_epoch",
    "usable",
    "write_bad_samples",
]
