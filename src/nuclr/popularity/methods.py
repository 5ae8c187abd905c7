"""Ways to step from one pass over the scores to the next zeta.

gradient    zeta + step (c - 1), the paper's descent, with a step that shrinks where the objective would rise
sinkhorn    zeta + tau log c: never raises the objective, converges linearly, slowly at low temperature
anderson    Sinkhorn's map extrapolated from its last steps (Walker and Ni, "Anderson acceleration for fixed-point
            iterations", 2011)
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from nuclr.popularity.kernel import State


class Method(Protocol):
    """Proposes a zeta and judges what was found there; if it declines, it is asked again at the old state."""

    def propose(self, state: State) -> Tensor:
        """The next zeta to look at."""

    def accepts(self, state: State, proposal: State) -> bool:
        """Whether to go on from the proposal."""


def improves(state: State, proposal: State) -> bool:
    """Nearer to the solution by the objective or, where rounding hides its differences, by log c."""
    return proposal.objective < state.objective or bool(proposal.log_c.norm() < state.log_c.norm())


class Gradient:
    """Descent along 1 - c, which is n_y times the objective's gradient."""

    def __init__(self, temperature: float) -> None:
        self.step = temperature

    def propose(self, state: State) -> Tensor:
        """One step down the gradient."""
        return state.zeta + self.step * torch.expm1(state.log_c)

    def accepts(self, state: State, proposal: State) -> bool:
        """Where it went down; the step grows a little, or is halved."""
        good = improves(state, proposal)
        self.step *= 1.1 if good else 0.5
        return good


class Sinkhorn:
    """The fixed-point iteration zeta + tau log c, which cannot raise the objective."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def propose(self, state: State) -> Tensor:
        """One iteration."""
        return state.zeta + self.temperature * state.log_c

    def accepts(self, state: State, proposal: State) -> bool:  # noqa: ARG002
        """Always."""
        return True


class Anderson:
    """Sinkhorn's steps over the curvature, extrapolated from the last points to where log c would be smallest.

    Near a solution Sinkhorn's is a lazy random walk among the candidates, the lazier the more a candidate has an
    anchor to itself; dividing by the curvature takes the laziness out. No step leaves the range of Sinkhorn's own or
    of REACH temperatures. A point that is no better than the last one is dropped, the past forgotten, one step of
    Sinkhorn's taken, which cannot raise the objective, and small curvatures are trusted less for a while.
    """

    MEMORY = 20
    LEAST_CURVATURE = 0.05
    SHRINK = 0.9
    GROW = 4.0
    REACH = 2.0

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.past: list[State] = []
        self.fall_back = False
        self.floor = self.LEAST_CURVATURE

    def propose(self, state: State) -> Tensor:
        """The extrapolated point."""
        if self.fall_back:
            return state.zeta + self.temperature * state.log_c
        self.past = [*self.past, state][-self.MEMORY - 1 :]
        d_zeta = torch.stack([s.zeta for s in self.past]).diff(dim=0)
        d_log_c = torch.stack([s.log_c for s in self.past]).diff(dim=0)
        gram = d_log_c @ d_log_c.T
        gram.diagonal().add_(1e-12 * gram.diagonal().sum() + torch.finfo(gram.dtype).tiny)
        mix: Tensor = torch.linalg.solve(gram, d_log_c @ state.log_c)
        rest = (state.log_c - mix @ d_log_c) / state.curvature.clamp_min(self.floor)
        reach = self.temperature * state.log_c.abs().clamp_min(self.REACH)
        return state.zeta + (self.temperature * rest - mix @ d_zeta).clamp(-reach, reach)

    def accepts(self, state: State, proposal: State) -> bool:
        """Sinkhorn's own steps always, extrapolated ones where they improve."""
        good = self.fall_back or improves(state, proposal)
        self.past = self.past if good else []
        self.floor = max(self.floor * self.SHRINK, self.LEAST_CURVATURE) if good else min(self.GROW * self.floor, 1.0)
        self.fall_back = not good
        return good


METHODS: dict[str, Callable[[float], Method]] = {
    "auto": Anderson,
    "anderson": Anderson,
    "sinkhorn": Sinkhorn,
    "gradient": Gradient,
}


def make_method(name: str, temperature: float) -> Method:
    """The method of this name; "auto" is the fastest."""
    if name not in METHODS:
        raise ValueError(f"method={name!r}; give one of {', '.join(METHODS)}")
    return METHODS[name](temperature)
