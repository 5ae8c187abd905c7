"""Evaluation: pure functions from features or scores to metrics. Ties count with their expectation over random orders.

Modules: `ranks` (rank of each query's best partner), `retrieval` (both directions), `zero_shot`, `corrected` (choosing
a popularity correction on validation pairs), `metric_names` (three naming conventions), `test_sets` (standard sets).
"""

from nuclr.evaluation.corrected import choose_correction, cross_validated_ranks
from nuclr.evaluation.metric_names import metrics_by_convention
from nuclr.evaluation.ranks import Ranks, query_ranks, query_ranks_from_scores, rank_correlation
from nuclr.evaluation.retrieval import links_with_copies, retrieval_metrics, retrieval_ranks, summarize_ranks
from nuclr.evaluation.zero_shot import class_features, zero_shot_metrics

__all__ = [
    "Ranks",
    "choose_correction",
    "class_features",
    "cross_validated_ranks",
    "links_with_copies",
    "metrics_by_convention",
    "query_ranks",
    "query_ranks_from_scores",
    "rank_correlation",
    "retrieval_metrics",
    "retrieval_ranks",
    "summarize_ranks",
    "zero_shot_metrics",
]
