"""Methods that choose the next zeta after a pass over the scores.

gradient    zeta + step (c - 1), the paper's gradient descent; the step is halved if the objective would rise
sinkhorn    zeta + tau log c: never raises the objective, converges linearly, slowly at low temperature
anderson    Sinkhorn's map extrapolated from its last steps (Walker and Ni, "Anderson acceleration for fixed-point
            iterations", 2011)
sparse      steps to the solution of a sparse model of the problem, extrapolated in the same way
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from nuclr.popularity.kernel import Kernel, State
from nuclr.popularity.sparse import Model


class Method(Protocol):
    """Proposes the next zeta and accepts or rejects the state there; after a rejection the old state is kept."""

    def propose(self, state: State) -> Tensor:
        """Return the next zeta to evaluate."""

    def accepts(self, state: State, proposal: State) -> bool:
        """Return whether to continue from the proposal."""


def improves(state: State, proposal: State) -> bool:
    """Return whether the objective is smaller or, if rounding hides the difference, the norm of log c."""
    return proposal.objective < state.objective or bool(proposal.log_c.norm() < state.log_c.norm())


def mixture(differences: Tensor, value: Tensor) -> Tensor:
    """Return the mix of the rows of `differences` that is nearest to a value in the least squares sense."""
    gram = differences @ differences.T
    gram.diagonal().add_(1e-12 * gram.diagonal().sum() + torch.finfo(gram.dtype).tiny)
    mix: Tensor = torch.linalg.solve(gram, differences @ value)
    return mix


class Gradient:
    """Gradient descent along 1 - c, which is n_y times the objective's gradient."""

    def __init__(self, temperature: float) -> None:
        self.step = temperature

    def propose(self, state: State) -> Tensor:
        """Return zeta after one gradient step."""
        return state.zeta + self.step * torch.expm1(state.log_c)

    def accepts(self, state: State, proposal: State) -> bool:
        """Accept an improvement and lengthen the step a little; otherwise halve the step."""
        good = improves(state, proposal)
        self.step *= 1.1 if good else 0.5
        return good


class Sinkhorn:
    """The fixed-point iteration zeta + tau log c, which cannot raise the objective."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def propose(self, state: State) -> Tensor:
        """Return zeta after one iteration."""
        return state.zeta + self.temperature * state.log_c

    def accepts(self, state: State, proposal: State) -> bool:  # noqa: ARG002
        """Accept always."""
        return True


class Anderson:
    """Anderson acceleration of Sinkhorn's steps divided by the curvature, extrapolated to the smallest log c.

    Near a solution Sinkhorn's map is a lazy random walk among the candidates: the more the anchors of a candidate
    choose only this candidate, the more slowly the walk leaves it. Dividing by the curvature removes the laziness. No
    step is longer than Sinkhorn's own step or REACH temperatures, whichever is larger.

    If a point does not improve on the last one, it is dropped and the history is cleared. Then one Sinkhorn step is
    taken, which cannot raise the objective, and small curvatures are trusted less for a while.
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
        """Return the extrapolated point, or one Sinkhorn step after a rejection."""
        if self.fall_back:
            return state.zeta + self.temperature * state.log_c
        self.past = [*self.past, state][-self.MEMORY - 1 :]
        d_zeta = torch.stack([s.zeta for s in self.past]).diff(dim=0)
        d_log_c = torch.stack([s.log_c for s in self.past]).diff(dim=0)
        mix = mixture(d_log_c, state.log_c)
        rest = (state.log_c - mix @ d_log_c) / state.curvature.clamp_min(self.floor)
        reach = self.temperature * state.log_c.abs().clamp_min(self.REACH)
        return state.zeta + (self.temperature * rest - mix @ d_zeta).clamp(-reach, reach)

    def accepts(self, state: State, proposal: State) -> bool:
        """Accept Sinkhorn steps always, extrapolated steps if they improve."""
        good = self.fall_back or improves(state, proposal)
        self.past = self.past if good else []
        self.floor = max(self.floor * self.SHRINK, self.LEAST_CURVATURE) if good else min(self.GROW * self.floor, 1.0)
        self.fall_back = not good
        return good


class Sparse:
    """Anderson acceleration of steps to the solution of a sparse model of the problem (`sparse`).

    If a point does not improve on the last one, the history is cleared. If there was none, one Sinkhorn step is taken.
    Passes over a kept matrix cost less than a model, so the first of them use Anderson acceleration without one.
    """

    MEMORY = 10
    REDUCTION = 0.1
    MOST_EVALUATIONS = 30
    SMALLEST_LOG_C = -20.0
    FIRST = 6  # passes over a kept matrix without a model
    REACH = 3.0  # temperatures by which zeta moves before large entries are collected again

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.problem = kernel.problem
        self.past: list[tuple[Tensor, Tensor]] = []
        self.first = Anderson(self.problem.temperature)
        self.rest = self.FIRST if kernel.keep else 0
        self.fall_back = self.rest == 0

    def propose(self, state: State) -> Tensor:
        """Return the extrapolated point, or one Sinkhorn step at the start and after rejections."""
        if self.rest > 0:
            self.rest -= 1
            return self.first.propose(state)
        if self.fall_back or state.near is None or float(state.log_c.amin()) < self.SMALLEST_LOG_C:
            return state.zeta + self.problem.temperature * state.log_c
        step = self._solve_model(state) - state.zeta
        step = step - step.mean()
        self.past = [*self.past, (state.zeta, step)][-self.MEMORY - 1 :]
        d_zeta = torch.stack([zeta for zeta, _ in self.past]).diff(dim=0)
        d_step = torch.stack([step for _, step in self.past]).diff(dim=0)
        return state.zeta + step - mixture(d_step, step) @ (d_zeta + d_step)

    def accepts(self, state: State, proposal: State) -> bool:
        """Accept Sinkhorn steps always, other steps if they improve."""
        if proposal.near is None:
            return self.first.accepts(state, proposal)
        good = self.fall_back or improves(state, proposal)
        self.fall_back = not good and len(self.past) <= 1
        self.past = self.past if good else []
        return good

    def collects(self, zeta: Tensor) -> bool:
        """Return whether the pass at zeta should collect large entries."""
        near = self.kernel.near
        reach = self.REACH * self.problem.temperature
        return self.rest == 0 and (near is None or float((zeta - near.zeta).abs().amax()) > reach)

    def _solve_model(self, state: State) -> Tensor:
        assert state.near is not None
        model = Model(self.problem, state, state.near)
        method = Anderson(self.problem.temperature)
        target = self.REDUCTION * float(state.log_c.norm())
        here = best = model(state.zeta)
        for _ in range(self.MOST_EVALUATIONS):
            proposal = model(method.propose(here))
            here = proposal if method.accepts(here, proposal) else here
            best = proposal if proposal.log_c.norm() < best.log_c.norm() else best
            if float(best.log_c.norm()) <= target:
                break
        return best.zeta


METHODS: dict[str, Callable[[Kernel], Method]] = {
    "auto": Sparse,
    "sparse": Sparse,
    "anderson": lambda kernel: Anderson(kernel.problem.temperature),
    "sinkhorn": lambda kernel: Sinkhorn(kernel.problem.temperature),
    "gradient": lambda kernel: Gradient(kernel.problem.temperature),
}


def check_method(name: str) -> None:
    """Raise a ValueError if there is no method of this name."""
    if name not in METHODS:
        raise ValueError(f"method={name!r}; give one of {', '.join(METHODS)}")
