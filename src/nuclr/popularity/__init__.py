"""Popularity: how many queries would pick an item. `solve` finds it, `PopularityCorrection` corrects search."""

from nuclr.popularity.conditional import sample_conditional
from nuclr.popularity.correction import PopularityCorrection
from nuclr.popularity.hubs import Hubness, chance_hubness, hubness
from nuclr.popularity.problem import Problem
from nuclr.popularity.result import Result
from nuclr.popularity.solver import ConvergenceWarning, Solver, solve

__all__ = [
    "ConvergenceWarning",
    "Hubness",
    "PopularityCorrection",
    "Problem",
    "Result",
    "Solver",
    "chance_hubness",
    "hubness",
    "sample_conditional",
    "solve",
]
