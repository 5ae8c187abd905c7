"""Popularity: how many queries would pick an item. `solve` finds it, `PopularityCorrection` corrects search."""

from nuclr.popularity.correction import PopularityCorrection
from nuclr.popularity.hubs import Hubness, chance_hubness, hubness
from nuclr.popularity.importance_sampling import sample_conditional
from nuclr.popularity.problem import Problem
from nuclr.popularity.result import Result
from nuclr.popularity.solver import ConvergenceWarning, Solver, solve
from nuclr.popularity.texts import pseudo_queries

__all__ = [
    "ConvergenceWarning",
    "Hubness",
    "PopularityCorrection",
    "Problem",
    "Result",
    "Solver",
    "chance_hubness",
    "hubness",
    "pseudo_queries",
    "sample_conditional",
    "solve",
]
