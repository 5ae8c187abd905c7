"""Evaluation: pure functions from features or scores to metrics. Ties count with their expectation over random orders.

Modules: `ranks` (rank of each query's best partner), `retrieval` (both directions), `graded_retrieval` (nDCG, MRR,
recall and MAP with graded relevance and trec_eval's ties), `zero_shot`, `probe` (k-nearest neighbors, linear probe),
`corrected` (choosing a popularity correction on validation pairs), `held_out_hubness` (what a correction changes),
`metric_names` (three naming conventions), `test_sets` (standard sets).
"""

from nuclr.evaluation.corrected import Bank, Correction, choose_correction, cross_validated_ranks
from nuclr.evaluation.graded_retrieval import DocumentRanks, document_ranks, ranking_metrics
from nuclr.evaluation.held_out_hubness import hubness_change, popularity_agreement
from nuclr.evaluation.metric_names import metrics_by_convention
from nuclr.evaluation.probe import knn_accuracy, knn_metrics, linear_probe_accuracy
from nuclr.evaluation.ranks import Ranks, query_ranks, query_ranks_from_scores, rank_correlation
from nuclr.evaluation.retrieval import links_with_copies, retrieval_metrics, retrieval_ranks, summarize_ranks
from nuclr.evaluation.zero_shot import class_features, zero_shot_metrics

__all__ = [
    "Bank",
    "Correction",
    "DocumentRanks",
    "Ranks",
    "choose_correction",
    "class_features",
    "cross_validated_ranks",
    "document_ranks",
    "hubness_change",
    "knn_accuracy",
    "knn_metrics",
    "linear_probe_accuracy",
    "links_with_copies",
    "metrics_by_convention",
    "popularity_agreement",
    "query_ranks",
    "query_ranks_from_scores",
    "rank_correlation",
    "ranking_metrics",
    "retrieval_metrics",
    "retrieval_ranks",
    "summarize_ranks",
    "zero_shot_metrics",
]
