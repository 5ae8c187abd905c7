"""Evaluation: features -> numbers. Pure functions; ties are counted as a random order would break them."""

from nuclr.evaluation.ranks import Ranks, ranks, ranks_of_scores
from nuclr.evaluation.retrieval import retrieval
from nuclr.evaluation.zero_shot import class_features, zero_shot

__all__ = ["Ranks", "class_features", "ranks", "ranks_of_scores", "retrieval", "zero_shot"]
