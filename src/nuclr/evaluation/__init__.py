"""Evaluation: features or scores -> numbers. Pure functions; ties are counted as a random order would break them.

`ranks` (every query by itself), `retrieval` (both directions), `duplicates` (copies of a caption), `zero_shot`,
`correction` (hubs), `names` (whose names), `sets` (the usual test sets as they lie on disk).
"""

from nuclr.evaluation.correction import Bank, Correction, append_bias, append_one, bias_of_scores, choose, gallery_bias
from nuclr.evaluation.duplicates import with_copies
from nuclr.evaluation.metric_names import conventions
from nuclr.evaluation.ranks import Ranks, ranks, ranks_of_scores
from nuclr.evaluation.retrieval import both, retrieval, summary
from nuclr.evaluation.zero_shot import class_features, zero_shot

__all__ = [
    "Bank",
    "Correction",
    "Ranks",
    "append_bias",
    "append_one",
    "bias_of_scores",
    "both",
    "choose",
    "class_features",
    "conventions",
    "gallery_bias",
    "ranks",
    "ranks_of_scores",
    "retrieval",
    "summary",
    "with_copies",
    "zero_shot",
]
