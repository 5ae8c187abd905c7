"""Popularity: how many queries would pick an item. `solve` finds it, `correction` uses it to improve retrieval."""

from nuclr.popularity.correction import Bank, Correction, append_bias, append_one, bias_from_scores, gallery_bias
from nuclr.popularity.problem import Problem
from nuclr.popularity.result import Result
from nuclr.popularity.solver import ConvergenceWarning, Solver, solve

__all__ = [
    "Bank",
    "ConvergenceWarning",
    "Correction",
    "Problem",
    "Result",
    "Solver",
    "append_bias",
    "append_one",
    "bias_from_scores",
    "gallery_bias",
    "solve",
]
