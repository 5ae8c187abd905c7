"""Evaluation: pure functions from features or scores to metrics. Ties count with their expectation over random orders.

Modules: `ranks` (rank of each query's best partner), `retrieval` (both directions), `graded_retrieval` (nDCG, MRR,
recall and MAP with graded relevance and trec_eval's ties), `zero_shot`, `probe` (k-nearest neighbors, linear probe),
`corrected` (choosing a popularity correction on validation pairs), `metrics` (the registry), `intervals` (bootstrap,
halves), `test_sets` (standard sets).
"""

from nuclr.evaluation.corrected import (
    Bank,
    Correction,
    bank_rows,
    choose_correction,
    cross_validated_ranks,
    popularity_agreement,
)
from nuclr.evaluation.graded_retrieval import DocumentRanks, document_ranks, ranking_metrics
from nuclr.evaluation.intervals import Interval, change_interval, cut_halves
from nuclr.evaluation.metrics import METRICS, Metric, register_metric
from nuclr.evaluation.probe import knn_accuracy, knn_metrics, linear_probe_accuracy
from nuclr.evaluation.ranks import Ranks, query_ranks, query_ranks_from_scores, rank_correlation
from nuclr.evaluation.retrieval import metrics_of_widths, retrieval_metrics, retrieval_ranks, summarize_ranks
from nuclr.evaluation.zero_shot import class_features, zero_shot_metrics

__all__ = [
    "METRICS",
    "Bank",
    "Correction",
    "DocumentRanks",
    "Interval",
    "Metric",
    "Ranks",
    "bank_rows",
    "change_interval",
    "choose_correction",
    "class_features",
    "cross_validated_ranks",
    "cut_halves",
    "document_ranks",
    "knn_accuracy",
    "knn_metrics",
    "linear_probe_accuracy",
    "metrics_of_widths",
    "popularity_agreement",
    "query_ranks",
    "query_ranks_from_scores",
    "rank_correlation",
    "ranking_metrics",
    "register_metric",
    "retrieval_metrics",
    "retrieval_ranks",
    "summarize_ranks",
    "zero_shot_metrics",
]
