"""Estimate popularity from a small part of the scores, and measure how wrong the estimate is.

Two estimates exist:

sample      A sample of the anchors and a sample of the candidates form a small problem. It is solved exactly, and its
            solution is extended to all candidates. Good if each candidate is near to many anchors.
near field  Each candidate sums over its own sample of the anchors, and each anchor over its own sample of the
            candidates, drawn mostly from near ones (`cells`, `cell_kernel`). Good at all temperatures, and more
            expensive.

The sample is always solved first. If its measured error is too large, it provides the start of the near field. If the
error is still too large, the near field is drawn again at its own solution or, if the sample was better, the sample is
enlarged. The estimate with the smallest measured error is returned.

**The error.** The estimates of Z and c have sampling noise. Random signs on the samples give a draw from its
distribution. The noise that occurred is measured as well: c of some candidates and Z of some anchors are computed
exactly, from all scores of these columns and rows. The draw is scaled to have the measured root mean square. Then the
problem is solved again with the draw added to log Z and log c. By how much zeta moves is the estimated error of zeta:
unlike the residual, it accounts for noise that the solution amplifies. The error that the iteration leaves is added.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.arrays import BLOCK, Rows
from nuclr.popularity.cell_kernel import KEPT, log_sums, make_kernels
from nuclr.popularity.cells import Cell, make_cells
from nuclr.popularity.kernel import Kernel, State, gather_rows, own_rows
from nuclr.popularity.methods import Anderson
from nuclr.popularity.problem import Problem
from nuclr.popularity.sampling import draw_sample

CHECKED = 512  # rows and columns computed exactly
MEASURED = 8192  # candidates on which the error of the sample estimate is averaged
LEAST_COARSE = 128  # smallest sample per cell that is kept in memory
CORRECTIONS = 6  # of the kept sample's sums by those of the large sample, at most
ROUNDS = 2  # estimates after the first
GROWTH = 4  # factor by which the sample grows if the near field is not better
PATIENCE = 10  # passes without improvement after which the iteration stops


@dataclass(frozen=True)
class Estimate:
    """An estimate of zeta with its measured error.

    Attributes:
        kind: "sample" or "near field".
        problem: The problem whose anchors `extend` sums over: the sampled ones, or all.
        zeta: (n_y,).
        log_z: log Z of the problem's anchors.
        error: Estimated root mean square error of zeta / tau.
        residual: max |c_j - 1| over the candidates that were checked.
        settled: Whether the iteration reached its tolerance.

    """

    kind: str
    problem: Problem
    zeta: Tensor
    log_z: Tensor
    error: float
    residual: float
    settled: bool


@dataclass(frozen=True)
class SparseOptions:
    """Options of the sparse method.

    Args:
        neighbors: Number of anchors summed per candidate, and of candidates per anchor; mostly near ones, the others a
            weighted sample. 0 estimates from `sample` alone.
        sample: Number of anchors and of candidates in the small problem that is solved first.
        max_error: The result counts as converged if the estimated error of zeta (root mean square) is at most this
            times tau and at most this times the standard deviation of zeta.
        seed: Of the random numbers.

    Example:
        >>> SparseOptions(neighbors=512)
        SparseOptions(neighbors=512, sample=4096, max_error=0.1, seed=0)

    """

    neighbors: int = 2048
    sample: int = 4096
    max_error: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("neighbors", 0), ("sample", 16)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; give at least {least}")
        if not 0 < self.max_error < math.inf:
            raise ValueError(f"max_error={self.max_error}; give a finite number above 0")


@dataclass(frozen=True)
class SparseSolver:
    """How to estimate; the fields are arguments of `solve`."""

    options: SparseOptions
    max_iterations: int
    memory: int

    def __call__(
        self,
        problem: Problem,
        init: Tensor | None,
        show: Callable[[Sequence[float]], None],
    ) -> tuple[Estimate, list[float]]:
        """Return the better estimate and the history of the iteration; `show` is called with the history."""
        work = _Work(self, problem, init, show)
        best = work.from_sample(self.options.sample)
        near = self.options.neighbors > 0
        for _ in range(ROUNDS):
            if best.error <= self.target(best) or work.complete:
                break
            other = work.from_near_field() if near else work.from_sample(GROWTH * self.options.sample)
            near = near and other.error < best.error
            best = min(best, other, key=lambda estimate: estimate.error)
        return best, work.history

    def target(self, estimate: Estimate) -> float:
        """Return the largest error with which the estimate counts as converged, in units of tau."""
        spread = float(estimate.zeta.std()) / estimate.problem.temperature
        return self.options.max_error * min(1.0, spread)


class _Work:
    """The steps of both estimates, and what they share: the problem, the random numbers, the last estimate."""

    def __init__(
        self,
        solver: SparseSolver,
        problem: Problem,
        init: Tensor | None,
        show: Callable[[Sequence[float]], None],
    ) -> None:
        assert isinstance(problem.x, Rows) and isinstance(problem.y, Rows)
        self.solver = solver
        self.problem = problem
        self.init = init
        self.show = show
        self.x = problem.x
        self.y = problem.y
        self.tau = problem.temperature
        self.own_x = own_rows(len(problem.a))
        self.own_y = own_rows(len(problem.b))
        self.generator = torch.Generator().manual_seed(solver.options.seed)
        self.history: list[float] = []
        device = problem.b.device
        self.checked_y = torch.randperm(len(problem.b), generator=self.generator)[:CHECKED].sort().values.to(device)
        self.checked_x = draw_sample(problem.a, CHECKED, self.generator).index
        self.zeta = torch.zeros_like(problem.b)
        self.log_z = torch.zeros_like(problem.a)

    @property
    def tolerance(self) -> float:
        """Root mean square of log c at which the iteration stops: far below the error allowed."""
        return self.solver.options.max_error / 50

    @property
    def complete(self) -> bool:
        """Whether the sample has all anchors and all candidates."""
        return self.solver.options.sample >= max(len(self.problem.a), len(self.problem.b))

    @cached_property
    def cells(self) -> tuple[list[Cell], list[Cell]]:
        """Cells of the anchors and of the candidates."""
        size = self.solver.options.neighbors
        return make_cells(self.x, size, self.generator), make_cells(self.y, size, self.generator)

    def from_sample(self, size: int) -> Estimate:
        """Solve a sample of anchors and candidates, and extend the solution to all candidates."""
        p = self.problem
        tau = self.tau
        anchors, candidates = (draw_sample(mass, size, self.generator) for mass in (p.a, p.b))
        x = self.x[anchors.index]
        y = self.y[candidates.index]
        a = anchors.weight * p.a[anchors.index]
        b = candidates.weight * p.b[candidates.index]
        part = replace(
            p,
            a=a,
            b=b,
            x=x,
            y=y,
        )
        log_z, _ = log_sums(x, y, tau, b.log())
        start = tau * log_sums(y, x, tau, a.log() - log_z)[0] if self.init is None else self.init[candidates.index]
        kernel = Kernel(part, self.solver.memory)
        rough, _ = self._iterate(kernel, start, self.tolerance)
        state, settled = self._iterate(kernel, rough.zeta, self.tolerance / 20)
        log_z = gather_rows(state.log_z, len(a))
        shift = a.log() - log_z
        log_q, noise_c = log_sums(self.y.part(self.own_y), x, tau, shift, anchors.noise / anchors.weight)
        shift = b.log() - state.zeta / tau
        own_log_z, noise_z = log_sums(self.x.part(self.own_x), y, tau, shift, candidates.noise / candidates.weight)
        self.zeta, noise_c = (gather_rows(t, len(p.b)) for t in (tau * log_q, noise_c))
        self.log_z, noise_z = (gather_rows(t, len(p.a)) for t in (own_log_z, noise_z))
        scale_z, scale_c, residual = self._check(noise_z, noise_c, torch.zeros_like(noise_c))

        # Errors r of log Z and s of log c act as masses a exp(-r) and b exp(-s), and move zeta by tau s.
        r = scale_z * noise_z[anchors.index]
        s = scale_c * noise_c[candidates.index]
        a = a * (-r).exp()
        b = b * (-s).exp()
        kernel = Kernel(
            replace(
                part,
                a=a / a.sum() * b.sum(),
                b=b,
            ),
            self.solver.memory,
        )
        moved, _ = self._iterate(kernel, state.zeta - tau * s)
        some = torch.randperm(len(p.b), generator=self.generator)[:MEASURED].to(p.b.device)
        moved_log_z = gather_rows(moved.log_z, len(a))
        moved_zeta, _ = log_sums(self.y[some], x, tau, a.log() - moved_log_z)
        noise = float((moved_zeta - self.zeta[some] / tau + scale_c * noise_c[some]).std())
        error = math.hypot(noise, _left(rough, state, tau))
        return Estimate(
            "sample",
            replace(
                part,
                y=self.y,
                b=p.b,
            ),
            self.zeta,
            log_z,
            error,
            residual,
            settled,
        )

    def from_near_field(self) -> Estimate:
        """Sum over samples of near anchors and candidates, drawn at the last estimate and starting from it."""
        p = self.problem
        tau = self.tau
        size = min(self.solver.options.neighbors, max(len(p.a), len(p.b)))
        bytes_per_row = KEPT.itemsize * (len(p.a) + len(p.b)) // distributed.world_size()
        kept = min(size, max(LEAST_COARSE, self.solver.memory // bytes_per_row))
        seed = int(torch.randint(2**40, (), generator=self.generator))
        fine, coarse = make_kernels(p, self.cells, (self.zeta, self.log_z), (size, kept), seed)
        state, settled = self._iterate(coarse, self.zeta)
        last, noise_z, noise_c = coarse.correct(fine, state.zeta, seed)
        left = math.inf
        for _ in range(CORRECTIONS):
            moved, settled = self._iterate(coarse, last.zeta)
            state, noise_z, noise_c = coarse.correct(fine, moved.zeta, seed)
            left = _left(last, state, tau)
            last = state
            if left <= self.solver.options.max_error / 5:
                break
        self.zeta = state.zeta
        self.log_z = state.log_z
        scale_z, scale_c, residual = self._check(noise_z, noise_c, state.log_c)
        coarse.row_shift = coarse.row_shift + scale_z * noise_z
        coarse.column_shift = coarse.column_shift + scale_c * noise_c
        moved, _ = self._iterate(coarse, state.zeta)
        error = math.hypot(float((moved.zeta - state.zeta).std()) / tau, left)
        return Estimate("near field", p, state.zeta, state.log_z, error, residual, settled)

    def _iterate(
        self,
        kernel: Callable[[Tensor], State],
        zeta: Tensor,
        tolerance: float | None = None,
    ) -> tuple[State, bool]:
        """Iterate until the root mean square of log c is below a tolerance; return the best state."""
        method = Anderson(self.tau)
        tolerance = tolerance or self.tolerance
        state = best = kernel(zeta)
        stale = 0
        passes = 1
        while (size := _rms(best.log_c)) > tolerance and stale < PATIENCE and passes < self.solver.max_iterations:
            self.history.append(size)
            self.show(self.history)
            proposal = kernel(method.propose(state))
            passes += 1
            state = proposal if method.accepts(state, proposal) else state
            best, stale = (proposal, 0) if _rms(proposal.log_c) < size else (best, stale + 1)
        self.history.append(size)
        self.show(self.history)
        return best, size <= self.tolerance

    def _check(
        self,
        noise_z: Tensor,
        noise_c: Tensor,
        log_c: Tensor,
    ) -> tuple[float, float, float]:
        """Compute some rows and columns exactly, and compare them with the estimates and with the noise expected.

        Args:
            noise_z: Draw of the relative error of Z, (n_x,).
            noise_c: Draw of the relative error of c, (n_y,).
            log_c: Estimate of log c, (n_y,).

        Returns:
            The factors of the noise in Z and in c that make it as large as measured, and max |c - 1|.

        """
        p = self.problem
        tau = self.tau
        x = self.x[self.checked_x]
        y = self.y[self.checked_y]
        exact_c = _exact(y, self.x, tau, p.a.log() - self.log_z, self.own_x) - self.zeta[self.checked_y] / tau
        exact_z = _exact(x, self.y, tau, p.b.log() - self.zeta / tau, self.own_y) - self.log_z[self.checked_x]
        scale_z = _ratio(exact_z.std(), noise_z[self.checked_x].std())
        scale_c = _ratio((log_c[self.checked_y] - exact_c).std(), noise_c[self.checked_y].std())
        return scale_z, scale_c, float(torch.expm1(exact_c - exact_c.mean()).abs().amax())


def _exact(
    few: Tensor,
    many: Rows,
    tau: float,
    log_weight: Tensor,
    own: slice,
) -> Tensor:
    """Return log sum_i exp(<few_j, many_i>/tau + log_weight_i) over all i, which the processes share, (len(few),)."""
    total = log_weight.new_full((len(few),), -math.inf)
    for start in range(own.start, own.stop, BLOCK):
        rows = slice(start, min(start + BLOCK, own.stop))
        total = torch.logaddexp(total, log_sums(few, many[rows], tau, log_weight[rows])[0])
    return distributed.all_gather(total[None]).logsumexp(dim=0)


def _left(
    before: State,
    after: State,
    tau: float,
) -> float:
    """Return the error of zeta / tau that remains: log c times the movement of zeta per change of log c."""
    change = float((after.log_c - before.log_c).std())
    moved = float((after.zeta - before.zeta).std()) / tau
    return _rms(after.log_c) * (moved / change if change > 0 else 1.0)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _ratio(measured: Tensor, expected: Tensor) -> float:
    """Return measured / expected; 1 if no noise is expected, because everything was summed."""
    return float(measured / expected) if float(expected) > 0 else 1.0
