"""Pairs on disk -> numbered samples -> batches.

A newcomer's way through: `pairs` (what every source looks like), one file a format (`caption_list`, `table`, `parquet`,
`hf`, `tars`, `vectors`, and `builtin`), `open` (a path -> pairs), `check` and `keep` (which samples are used),
`batches` (in which order), `loader` (pixels and texts), `transforms` (augmentation); `labelled` for classification.
"""

from nuclr.data.batches import all_batches, batches, epoch_order, steps_per_epoch
from nuclr.data.check import check_samples, usable, write_bad_samples
from nuclr.data.keep import read_keep
from nuclr.data.labelled import open_labelled
from nuclr.data.loader import Batch, Loader
from nuclr.data.open import open_pairs
from nuclr.data.pairs import BadSample, Pairs
from nuclr.data.transforms import Augment, normalise

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
    "normalise",
    "open_labelled",
    "open_pairs",
    "read_keep",
    "steps_per_epoch",
    "usable",
    "write_bad_samples",
]
