"""Exact popularity: `solve` finds the zeta at which every candidate is chosen equally often by the anchors."""

from nuclr.popularity.problem import Problem
from nuclr.popularity.result import Result
from nuclr.popularity.solver import ConvergenceWarning, Solver, solve

__all__ = ["ConvergenceWarning", "Problem", "Result", "Solver", "solve"]
