"""Popularity: how many queries would pick an item. `solve` finds it, `PopularityCorrection` improves search with it."""

from nuclr.popularity.correction import PopularityCorrection
from nuclr.popularity.problem import Problem
from nuclr.popularity.result import Result
from nuclr.popularity.solver import ConvergenceWarning, Solver, solve

__all__ = [
    "ConvergenceWarning",
    "PopularityCorrection",
    "Problem",
    "Result",
    "Solver",
    "solve",
]
