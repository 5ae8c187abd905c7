"""Evaluation: features -> numbers. Pure functions; ties are counted as a random order would break them."""

from nuclr.evaluation.retrieval import retrieval
from nuclr.evaluation.zero_shot import class_features, zero_shot

__all__ = ["class_features", "retrieval", "zero_shot"]
