"""Solve the popularity problem: `solve` for a user, `Solver` for a program.

float32 input is computed in float32 down to the residual that float32 can tell at this temperature, and from there
on in float64. Every zeta is looked at in the gauge and the precision in which it would be returned, so the residual
that is reported belongs to the very numbers that the user gets.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.popularity.kernel import Kernel, State, gather_rows
from nuclr.popularity.methods import make_method
from nuclr.popularity.problem import Problem, check_vector, make_problem
from nuclr.popularity.progress import progress_bar
from nuclr.popularity.result import Result

PATIENCE = 50  # passes without a new best residual, near the limit of the arithmetic, before it is given up


class ConvergenceWarning(RuntimeWarning):
    """The solver stopped above the tolerance."""


def solve(
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    scores: Tensor | None = None,
    temperature: float,
    method: str = "auto",
    tolerance: float = 1e-4,
    max_iterations: int = 10_000,
    init: Tensor | None = None,
    progress: bool = False,
    x_weight: Tensor | None = None,
    y_weight: Tensor | None = None,
    memory: int = 2**30,
) -> Result:
    """Popularity of candidates y among anchors x: the zeta at which every candidate is chosen equally often.

    Under torch.distributed all processes give the same arguments, share the work, and get the same result.

    Args:
        x: features of the anchors, (n_x, d).
        y: features of the candidates, (n_y, d); the scores <x_i, y_j> are made tile by tile.
        scores: (n_x, n_y) in the place of features; rows are anchors.
        temperature: tau.
        method: "auto" (Anderson's acceleration of Sinkhorn's iteration), "sinkhorn" or "gradient" (the paper's).
        tolerance: for the residual, max_j |(n_y/n_x) sum_i P_ij - 1|.
        max_iterations: passes over the scores.
        init: (n_y,), a zeta to start from, such as that of a nearby temperature or of earlier features.
        progress: show the residual and the time left on stderr.
        x_weight: (n_x,), the anchors' marginal up to a factor; a weight of k stands for k copies. The residual is then
            max_j |sum_i a_i P_ij / b_j - 1|, with a and b the weights divided by their sums.
        y_weight: (n_y,), the same for the candidates.
        memory: bytes to spend on the matrix of probabilities. Where all of it fits it is kept, which makes a pass much
            cheaper; otherwise it is made tile by tile at every pass, and this bounds the tile.

    Returns:
        Result. A ConvergenceWarning tells where `converged` is False; an interrupt (Ctrl-C) ends with what there is.

    """
    problem = make_problem(x, y, scores, temperature, x_weight, y_weight)
    return Solver(method, tolerance, max_iterations, progress, memory)(problem, init)


@dataclass(frozen=True)
class Solver:
    """How to solve a Problem; the fields are arguments of `solve`."""

    method: str = "auto"
    tolerance: float = 1e-4
    max_iterations: int = 10_000
    progress: bool = False
    memory: int = 2**30

    def __post_init__(self) -> None:
        make_method(self.method, temperature=1.0)
        if not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance={self.tolerance}; give a finite number above 0")
        if self.max_iterations < 1:
            raise ValueError(f"max_iterations={self.max_iterations}; give at least 1")

    def __call__(self, problem: Problem, init: Tensor | None = None) -> Result:
        """The solution found from zeta = init, or from 0."""
        zeta = torch.zeros_like(problem.b) if init is None else check_vector("init", init, len(problem.b)).to(problem.b)
        history: list[float] = []
        reason = "rounding errors"
        with progress_bar(self.progress and distributed.rank() == 0, self.tolerance, self.max_iterations) as show:
            try:
                for residual, best, dtype in self._passes(problem, zeta):  # noqa: B007
                    history.append(residual)
                    show(history)
                    if len(history) >= self.max_iterations:
                        reason = f"max_iterations={self.max_iterations}"
                        break
            except KeyboardInterrupt:
                if not history:
                    raise
                reason = "an interrupt"
        converged = best.residual <= self.tolerance and rounding_limit(problem, dtype) <= self.tolerance
        if not converged:
            message = (
                f"residual {best.residual:.2g} after {len(history)} passes, ended by {reason} before {self.tolerance:g}"
            )
            warnings.warn(message, ConvergenceWarning, stacklevel=3)
        log_z = gather_rows(best.log_z, len(problem.a))
        return Result(problem, best.zeta.to(dtype), log_z, best.residual, converged, len(history), tuple(history))

    def _passes(self, problem: Problem, zeta: Tensor) -> Iterator[tuple[float, State, torch.dtype]]:
        """Every pass over the scores: its residual, the best state so far in this precision, and the precision."""
        for dtype in dict.fromkeys((problem.dtype, torch.float64)):
            limit = rounding_limit(problem, dtype)
            target = max(self.tolerance, limit)
            kernel, method = Kernel(problem.to(dtype), self.memory), make_method(self.method, problem.temperature)
            state = best = kernel(representable(zeta, dtype))
            yield state.residual, best, dtype
            stale = 0
            while best.residual > target and stale < PATIENCE:
                proposal = kernel(representable(method.propose(state), dtype))
                state = proposal if method.accepts(state, proposal) else state
                if proposal.residual < best.residual:
                    best, stale = proposal, 0
                elif best.residual < 1000 * limit:
                    stale += 1
                yield proposal.residual, best, dtype
            if best.residual <= self.tolerance == target:
                return
            zeta = best.zeta
            del kernel  # before the next one takes its memory


def rounding_limit(problem: Problem, dtype: torch.dtype) -> float:
    """The smallest residual that this precision can tell: some roundings of the largest exponent, and of the sums."""
    return torch.finfo(dtype).eps * (4 * problem.scale / problem.temperature + 32)


def representable(zeta: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeta as it would be returned: of mean zero, rounded to dtype; held in float64."""
    return (zeta - zeta.mean()).to(dtype).to(torch.float64)
