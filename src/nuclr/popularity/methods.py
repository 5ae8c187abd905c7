"""Ways to step from one pass over the scores to the next zeta.

gradient    zeta + step (c - 1), the paper's descent, with a step that shrinks where the objective would rise
sinkhorn    zeta + tau log c: never raises the objective, converges linearly, slowly at low temperature
anderson    Sinkhorn's map extrapolated from its last steps (Walker and Ni, "Anderson acceleration for fixed-point
            iterations", 2011)
"""

from typing import Protocol

import torch
from torch import Tensor

from nuclr.popularity.problem import State


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


class Anderson:
    """Sinkhorn's map at the combination of the last `memory` + 1 points that makes log c smallest.

    A point that is no better than the last one is dropped and the memory emptied. What follows is Sinkhorn's own
    step, which cannot raise the objective: this converges wherever Sinkhorn does. memory = 0 is Sinkhorn.
    """

    def __init__(self, temperature: float, memory: int) -> None:
        self.temperature, self.memory = temperature, memory
        self.points: list[tuple[Tensor, Tensor]] = []

    def propose(self, state: State) -> Tensor:
        """The extrapolated point, or Sinkhorn's where there is nothing to extrapolate from."""
        f = self.temperature * state.log_c
        self.points = [*self.points, (f, state.zeta + f)][-self.memory - 1 :]
        fs, gs = (torch.stack(vectors) for vectors in zip(*self.points, strict=True))
        df, dg = fs.diff(dim=0), gs.diff(dim=0)
        gram = df @ df.T
        gram.diagonal().add_(1e-12 * gram.diagonal().sum())
        mix: Tensor = torch.linalg.solve(gram, df @ f)
        return gs[-1] - mix @ dg

    def accepts(self, state: State, proposal: State) -> bool:
        """Sinkhorn's own steps always, extrapolated ones where they improve."""
        if len(self.points) == 1 or improves(state, proposal):
            return True
        self.points = []
        return False


METHODS = ("auto", "anderson", "sinkhorn", "gradient")


def make_method(name: str, temperature: float) -> Method:
    """The method of this name; "auto" is the fastest."""
    if name not in METHODS:
        raise ValueError(f"method={name!r}; give one of {', '.join(METHODS)}")
    if name == "gradient":
        return Gradient(temperature)
    return Anderson(temperature, memory=0 if name == "sinkhorn" else 10)
