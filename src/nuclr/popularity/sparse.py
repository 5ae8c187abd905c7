"""Estimate popularity from a small part of the scores, and measure how wrong the estimate is.

Two estimates exist. Which of them is better depends on the temperature and on the number of anchors near a candidate:

sample      A sample of the anchors and a sample of the candidates form a small problem. It is solved exactly, and its
            solution is extended to all candidates. Good if each candidate is near to many anchors.
near field  Near pairs are summed exactly, and the rest is estimated from a sample (`sampled_kernel`, `near_field`).
            Good if a few near anchors determine the popularity of a candidate.

The sample is always solved first. If its measured error is too large, the exact column sums of some candidates show how
much of the error's variance comes from near pairs, and so whether a near field or a larger sample promises the smaller
error. The estimate with the smaller measured error is returned.

**The error.** The estimates of Z and c have sampling noise. Random signs on the samples give a draw from its
distribution (`sampling`). The noise that occurred is measured as well: c of some candidates and Z of some anchors are
computed exactly, from all scores of these columns and rows. The draw is scaled to have the measured root mean square.
Then the problem is solved again with the draw added to log Z and log c. By how much zeta moves is the estimated error
of zeta: unlike the residual, it accounts for noise that the solution amplifies.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.popularity.kernel import State, gather_rows, own_rows
from nuclr.popularity.methods import Anderson
from nuclr.popularity.near_field import find_near, make_cells
from nuclr.popularity.problem import Problem
from nuclr.popularity.rows import Rows
from nuclr.popularity.sampled_kernel import NearProducts, SampledKernel, far_bytes, log_sums
from nuclr.popularity.sampling import Sample, draw_sample

CHECKED = 512  # rows and columns computed exactly
MEASURED = 8192  # candidates on which the error of the sample estimate is averaged
GROWTH = 4  # factor by which a sample that is too small grows
LEAST_COARSE = 128  # smallest sample for the far field of the iteration
CORRECTIONS = 4  # of the iteration's far field by that of the large sample
ROUNDS = 2  # searches for near pairs, each at the last estimate of zeta
EXCESS = 1.3  # ratio of the noise to that of the best near pairs, above which another search pays
PAIR_BYTES = 16  # per near pair: two indices, the score and its exponential
PATIENCE = 10  # passes without improvement after which the iteration stops
LEAST_LOG, STEPS_PER_LOG, BINS = -24.0, 8, 256  # histogram of log A_ij


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
class _Histogram:
    """Per bin of log A_ij, over exact columns: how many pairs there are, and their share of the sampling variance."""

    pairs: Tensor
    variance: Tensor

    def threshold(self, pairs_per_candidate: float) -> tuple[float, float]:
        """Return the log A_ij above which a candidate has so many pairs, and the share of the variance below it."""
        above = self.pairs.flip(0).cumsum(0).flip(0)
        first = int((above > pairs_per_candidate).sum())
        below = float(self.variance[:first].sum() / self.variance.sum())
        return LEAST_LOG + first / STEPS_PER_LOG, below

    def noise(self, pairs_per_candidate: float, sample: Sample, mass: Tensor) -> float:
        """Return the noise in c (root mean square) if exactly the largest pairs are summed exactly."""
        _, below = self.threshold(pairs_per_candidate)
        weight = float((mass[sample.index] * (sample.weight - 1).clamp_min(0)).mean())
        return math.sqrt(below * float(self.variance.sum()) * weight) + torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class SparseSolver:
    """How to estimate; the fields are arguments of `solve`."""

    neighbors: int
    sample: int
    max_error: float
    max_iterations: int
    seed: int
    memory: int

    def __post_init__(self) -> None:
        for name, least in (("neighbors", 0), ("sample", 16), ("max_iterations", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; give at least {least}")
        if not 0 < self.max_error < math.inf:
            raise ValueError(f"max_error={self.max_error}; give a finite number above 0")

    def __call__(
        self, problem: Problem, init: Tensor | None, show: Callable[[Sequence[float]], None]
    ) -> tuple[Estimate, list[float]]:
        """Return the better estimate and the history of the iteration; `show` is called with the history."""
        work = _Work(self, problem, init, show)
        best = work.from_sample(self.sample)
        if best.error > self.target(best) and work.larger_sample_or_near_field_helps(self.sample):
            share = work.variance_below
            near = self.neighbors > 0 and share < 1 / GROWTH
            for _ in range(ROUNDS if near else 1):
                other = work.from_near_field() if near else work.from_sample(GROWTH * self.sample)
                best = min(best, other, key=lambda estimate: estimate.error)
                if best.error <= self.target(best) or work.excess < EXCESS:
                    break
        return best, work.history

    def target(self, estimate: Estimate) -> float:
        """Return the largest error with which the estimate counts as converged, in units of tau."""
        spread = float(estimate.zeta.std()) / estimate.problem.temperature
        return self.max_error * min(1.0, spread)


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
        self.solver, self.whole, self.init, self.show = solver, problem, init, show
        self.x, self.y = problem.x, problem.y
        self.own = problem.part(own_rows(len(problem.a)))
        self.own_x = problem.x.part(own_rows(len(problem.a)))
        self.columns = own_rows(len(problem.b))  # candidates that this process handles if all anchors are at hand
        self.tau = problem.temperature
        self.generator = torch.Generator().manual_seed(solver.seed)
        self.history: list[float] = []
        device = problem.b.device
        self.checked_y = torch.randperm(len(problem.b), generator=self.generator)[:CHECKED].sort().values.to(device)
        self.checked_x = draw_sample(problem.a, CHECKED, self.generator).index
        self.zeta, self.own_log_z = torch.zeros_like(problem.b), torch.zeros_like(self.own.a)
        self.histogram: _Histogram | None = None
        self.variance_below = 1.0
        self.excess = 0.0

    @property
    def tolerance(self) -> float:
        """Root mean square of log c at which the iteration stops: far below the error allowed."""
        return self.solver.max_error / 50

    @property
    def neighbors(self) -> int:
        """Number of near pairs per candidate: what the user asks for, or less if memory is short."""
        pairs = self.solver.memory * distributed.world_size() // (PAIR_BYTES * len(self.whole.b))
        return min(self.solver.neighbors, max(1, pairs))

    @property
    def coarse_size(self) -> int:
        """Number of anchors and of candidates whose far field fits into memory."""
        kept = self.solver.memory * distributed.world_size() // far_bytes(self.whole)
        return max(LEAST_COARSE, min(self.solver.sample, kept))

    def larger_sample_or_near_field_helps(self, size: int) -> bool:
        """Return whether not all rows were in the sample, and set what a near field leaves of the variance."""
        assert self.histogram is not None
        self.variance_below = self.histogram.threshold(self.neighbors)[1]
        return size < max(len(self.whole.a), len(self.whole.b))

    def from_sample(self, size: int) -> Estimate:
        """Solve a sample of anchors and candidates, and extend the solution to all candidates."""
        p = self.whole
        anchors, candidates = (draw_sample(mass, size, self.generator) for mass in (p.a, p.b))
        x, y = self.x[anchors.index], self.y[candidates.index]
        a, b = anchors.weight * p.a[anchors.index], candidates.weight * p.b[candidates.index]
        rows = own_rows(len(a))
        part = replace(p, a=a[rows], b=b, x=x[rows], y=y)
        log_z, _ = log_sums(x, y, self.tau, b.log())
        zeta = self.tau * log_sums(y, x, self.tau, a.log() - log_z)[0]
        if self.init is not None:
            zeta = self.init[candidates.index]
        log_z, _ = log_sums(x[rows], y, self.tau, b.log() - zeta / self.tau)
        all_anchors, all_candidates = (_everything(len(t), p.b) for t in (part.a, b))
        kernel = SampledKernel(part, None, all_anchors, all_candidates, log_z, self.solver.memory)
        state, settled = self._iterate(kernel, zeta, self.tolerance / 20)  # passes over the sample cost little
        log_z = gather_rows(state.log_z, len(a))
        y_own = self.y.part(self.columns)
        log_q, noise_c = log_sums(y_own, x, self.tau, a.log() - log_z, anchors.noise / anchors.weight)
        self.zeta = gather_rows(self.tau * log_q, len(p.b))
        noise_c = gather_rows(noise_c, len(p.b))
        log_weight = b.log() - state.zeta / self.tau
        self.own_log_z, noise_z = log_sums(self.own_x, y, self.tau, log_weight, candidates.noise / candidates.weight)
        scale_z, scale_c, residual = self._check(noise_z, noise_c, torch.zeros_like(noise_c))

        kernel.row_shift = scale_z * gather_rows(noise_z, len(p.a))[anchors.index][rows]
        kernel.column_shift = scale_c * noise_c[candidates.index]
        moved, _ = self._iterate(kernel, state.zeta)
        moved_log_z = gather_rows(moved.log_z, len(a))
        some = torch.randperm(len(p.b), generator=self.generator)[:MEASURED].to(p.b.device)
        moved_zeta, _ = log_sums(self.y[some], x, self.tau, a.log() - moved_log_z)
        noise = float((moved_zeta - self.zeta[some] / self.tau + scale_c * noise_c[some]).std())
        error = math.hypot(noise, _rms(state.log_c))
        return Estimate("sample", replace(p, a=a, x=x), self.zeta, log_z, error, residual, settled)

    def from_near_field(self) -> Estimate:
        """Sum near pairs exactly and estimate the rest from a sample, starting from the last estimate."""
        p, own, rows = self.whole, self.own, own_rows(len(self.whole.a))
        assert self.histogram is not None
        centers = make_cells(self.x, p.a, self.generator), make_cells(self.y, p.b, self.generator)
        samples = [
            [draw_sample(mass, size, self.generator) for mass in (p.a, p.b)]
            for size in (self.solver.sample, self.coarse_size)
        ]
        threshold, _ = self.histogram.threshold(self.neighbors)
        most = 2 * self.neighbors * len(p.b)
        near = NearProducts(find_near(own, self.zeta, self.own_log_z, threshold, centers, most))
        fine, coarse = (
            SampledKernel(own, near, x.part(rows), y, self.own_log_z, memory)
            for (x, y), memory in zip(samples, (0, self.solver.memory), strict=True)
        )
        state, settled = self._iterate(coarse, self.zeta)
        for correction in range(CORRECTIONS):
            state, noise_z, noise_c = coarse.correct(fine, state.zeta)
            if _rms(state.log_c) <= 5 * self.tolerance or correction == CORRECTIONS - 1:
                break
            state, settled = self._iterate(coarse, state.zeta)
        self.zeta, self.own_log_z = state.zeta, state.log_z
        scale_z, scale_c, residual = self._check(noise_z, noise_c, state.log_c)
        best_noise = self.histogram.noise(self.neighbors, samples[0][0], p.a)
        self.excess = float(scale_c * noise_c.std()) / best_noise
        coarse.row_shift = coarse.row_shift + scale_z * noise_z
        coarse.column_shift = coarse.column_shift + scale_c * noise_c
        moved, _ = self._iterate(coarse, state.zeta)
        error = math.hypot(float(((moved.zeta - state.zeta) / self.tau).std()), _rms(state.log_c))
        log_z = gather_rows(state.log_z, len(p.a))
        return Estimate("near field", p, state.zeta, log_z, error, residual, settled)

    def _iterate(self, kernel: SampledKernel, zeta: Tensor, tolerance: float | None = None) -> tuple[State, bool]:
        """Iterate until the root mean square of log c is below a tolerance; return the best state."""
        method, tolerance = Anderson(self.tau), tolerance or self.tolerance
        state = best = kernel(zeta)
        stale, passes = 0, 1
        while (size := _rms(best.log_c)) > tolerance and stale < PATIENCE and passes < self.solver.max_iterations:
            self.history.append(size)
            self.show(self.history)
            proposal = kernel(method.propose(state))
            passes += 1
            state = proposal if method.accepts(state, proposal) else state
            best, stale = (proposal, 0) if proposal.objective < best.objective else (best, stale + 1)
        self.history.append(size)
        self.show(self.history)
        return best, size <= self.tolerance

    def _check(self, noise_z: Tensor, noise_c: Tensor, log_c: Tensor) -> tuple[float, float, float]:
        """Compute some rows and columns exactly, and compare them with the estimates and with the noise expected.

        Args:
            noise_z: Draw of the relative error of Z of this process's anchors, (n,).
            noise_c: Draw of the relative error of c, (n_y,).
            log_c: Estimate of log c, (n_y,).

        Returns:
            The factors of the noise in Z and in c that make it as large as measured, and max |c - 1|.

        """
        p, own, tau = self.whole, self.own, self.tau
        # Exact columns, given the estimate of Z: sums over all anchors.
        y = self.y[self.checked_y]
        counts, variances, sums = (p.b.new_zeros(size) for size in (BINS, BINS, len(y)))
        shift = (-self.zeta[self.checked_y] / tau).to(y)
        for rows in self.own_x.tiles(4096):
            log_a = torch.addmm(shift, self.own_x[rows], y.T / tau).sub_(self.own_log_z[rows, None].to(y))
            mass = own.a[rows, None].to(y)
            share = log_a.exp().mul_(mass)
            sums += share.sum(dim=0)
            bins = log_a.sub_(LEAST_LOG).mul_(STEPS_PER_LOG).clamp_(0, BINS - 1).long().flatten()
            counts += torch.bincount(bins, minlength=BINS)
            variances += torch.bincount(bins, weights=(share.square_() / mass).flatten(), minlength=BINS)
        total = distributed.sum_over_processes(torch.cat([counts, variances, sums]))
        self.histogram = _Histogram(total[:BINS] / len(y), total[BINS : 2 * BINS] / len(y))
        exact_c = total[2 * BINS :].log()
        # Exact rows: sums over all candidates, which the processes share.
        x = self.x[self.checked_x]
        columns, sums = self.columns, p.b.new_zeros(len(x))
        checked_log_z = gather_rows(self.own_log_z, len(p.a))[self.checked_x]
        for part in self.y.part(columns).tiles(4096):
            where = slice(columns.start + part.start, columns.start + part.stop)
            shift = (p.b[where].log() - self.zeta[where] / tau).to(x)
            sums += (torch.addmm(shift, x / tau, self.y[where].T) - checked_log_z[:, None].to(x)).exp().sum(dim=1)
        exact_z = distributed.sum_over_processes(sums).log()
        expected_z = gather_rows(noise_z, len(p.a))[self.checked_x]
        measured_c = log_c[self.checked_y] - exact_c
        scale_z = _ratio(exact_z.std(), expected_z.std())
        scale_c = _ratio(measured_c.std(), noise_c[self.checked_y].std())
        return scale_z, scale_c, float(torch.expm1(exact_c - exact_c.mean()).abs().amax())


def _everything(size: int, like: Tensor) -> Sample:
    index = torch.arange(size, device=like.device)
    return Sample(index, like.new_ones(size), like.new_zeros(size))


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _ratio(measured: Tensor, expected: Tensor) -> float:
    """Return measured / expected; 1 if no noise is expected, because everything was summed."""
    return float(measured / expected) if float(expected) > 0 else 1.0
