"""Estimate popularity from a sample of anchors and candidates, and measure how wrong the estimate is.

The sample is a small problem, which is solved exactly. Its solution is extended to all candidates in one pass that
reads each row once, so the cost grows with n_x + n_y.

**The error.** The estimates of Z and c have sampling noise. Random signs on the samples give a draw from its
distribution. The noise that occurred is measured as well: c of some candidates and Z of some anchors are computed
exactly, from all scores of these columns and rows. The draw is scaled to have the measured root mean square. Then the
small problem is solved again with the draw added to log Z and log c. By how much zeta moves is the estimated error of
zeta: unlike the residual, it accounts for noise that the solution amplifies.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.arrays import Rows, slices
from nuclr.popularity.kernel import LOG2_E, gather_rows, own_rows
from nuclr.popularity.problem import Problem
from nuclr.popularity.result import Result
from nuclr.popularity.sampling import draw_sample
from nuclr.popularity.threads import in_order

CHECKED = 512  # rows and columns computed exactly
MEASURED = 8192  # candidates on which the error is averaged
TILE = 2**21  # scores per tile: fit into a CPU cache


RowMap = Callable[[str, Rows, Callable[[Rows, slice], Tensor]], Tensor]


@dataclass(frozen=True)
class Estimator:
    """Estimate the solution of a problem whose features are Rows.

    Args:
        solver: Solves the small problem, from zeta = init.
        size: Number of anchors and of candidates in the sample.
        seed: Of the random numbers.
        row_map: Maps a function of consecutive rows over all rows. None: calls it once.

    """

    solver: Callable[[Problem, Tensor | None], Result]
    size: int
    seed: int = 0
    row_map: RowMap | None = None

    def __call__(self, problem: Problem, init: Tensor | None = None) -> Result:
        """Return the estimate; its `converged` is False, and `residual` is that of the candidates that were checked."""
        p = problem
        tau = p.temperature
        assert isinstance(p.x, Rows) and isinstance(p.y, Rows)
        generator = torch.Generator().manual_seed(self.seed)
        checked_y = torch.randperm(len(p.b), generator=generator)[:CHECKED].sort().values.to(p.b.device)
        checked_x = draw_sample(p.a, CHECKED, generator).index
        anchors, candidates = (draw_sample(mass, self.size, generator) for mass in (p.a, p.b))
        x = p.x[anchors.index]
        y = p.y[candidates.index]
        a = anchors.weight * p.a[anchors.index]
        b = candidates.weight * p.b[candidates.index]
        part = replace(
            p,
            a=a * (b.sum() / a.sum()),
            b=b,
            x=x,
            y=y,
        )
        solved = self.solver(part, None if init is None else init[candidates.index])
        small_zeta = solved.zeta.to(b)
        log_q, noise_c = self._extended(
            "zeta", p.y, x, tau, part.a.log() - solved.log_z, anchors.noise / anchors.weight
        )
        log_z, noise_z = self._extended(
            "log-z", p.x, y, tau, b.log() - small_zeta / tau, candidates.noise / candidates.weight
        )
        zeta = tau * log_q
        exact_c = _exact(p.y[checked_y], p.x, tau, p.a.log() - log_z) - log_q[checked_y]
        exact_z = _exact(p.x[checked_x], p.y, tau, p.b.log() - log_q) - log_z[checked_x]

        # Errors r of log Z and s of log c act as masses a exp(-r) and b exp(-s), and move zeta by tau s.
        s = noise_c * _ratio(exact_c.std(), noise_c[checked_y].std())
        r = noise_z * _ratio(exact_z.std(), noise_z[checked_x].std())
        a = part.a * (-r[anchors.index]).exp()
        b = b * (-s[candidates.index]).exp()
        a = a * (b.sum() / a.sum())
        moved = self.solver(
            replace(
                part,
                a=a,
                b=b,
            ),
            small_zeta - tau * s[candidates.index],
        )
        some = torch.randperm(len(p.b), generator=generator)[:MEASURED].to(p.b.device)
        moved_q, _ = log_sums(p.y[some], x, tau, a.log() - moved.log_z)
        error = float((moved_q - log_q[some] + s[some]).std())

        mean = zeta.mean()
        return Result(
            replace(
                part,
                y=p.y,
                b=p.b,
            ),
            (zeta - mean).to(p.dtype),
            solved.log_z + mean / tau,
            float(torch.expm1(exact_c - exact_c.mean()).abs().amax()),
            converged=False,
            iterations=solved.iterations,
            history=solved.history,
            method="sample",
            error=error,
        )

    def _extended(
        self,
        name: str,
        many: Rows,
        few: Tensor,
        temperature: float,
        log_weight: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return `log_sums` of all rows, which the processes share."""

        def sums(rows: Rows, _: slice | None = None) -> Tensor:
            return torch.stack(log_sums(rows, few, temperature, log_weight, noise), dim=1)

        rows = many.part(own_rows(len(many)))
        own = sums(rows) if self.row_map is None else self.row_map(name, rows, sums)
        log_sum, relative = (gather_rows(column, len(many)) for column in own.T)
        return log_sum, relative


def log_sums(
    many: Rows | Tensor,
    few: Tensor,
    temperature: float,
    log_weight: Tensor,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log sum_j exp(<many_i, few_j>/tau + log_weight_j) safely at any scale, and the noise relative to the sum.

    Args:
        many: Features (n, d).
        few: Features (m, d).
        temperature: tau.
        log_weight: (m,).
        noise: Factor of each term in the noise, (m,).

    Returns:
        (n,) and (n,), float64.

    """
    shift = log_weight.to(few)
    factors = torch.ones(
        len(few),
        1 + (noise is not None),
        dtype=few.dtype,
        device=few.device,
    )
    if noise is not None:
        factors[:, 1] = noise
    out = torch.empty(
        len(many),
        2,
        dtype=torch.float64,
        device=few.device,
    )

    def sum_rows(rows: slice) -> tuple[slice, Tensor, Tensor]:
        block = torch.addmm(shift, many[rows], few.T, alpha=1 / temperature)
        top = block.amax(dim=1)
        sums = block.sub_(top[:, None]).mul_(LOG2_E).exp2_() @ factors
        return rows, top.to(out) + sums[:, 0].to(out).log(), sums[:, -1] / sums[:, 0]

    def store(part: tuple[slice, Tensor, Tensor]) -> None:
        rows, out[rows, 0], out[rows, 1] = part

    height = max(1, TILE // max(1, len(few)))
    in_order(sum_rows, slices(len(many), height), few.device, store)
    return out[:, 0], out[:, 1] if noise is not None else torch.zeros_like(out[:, 0])


def _exact(
    few: Tensor,
    many: Rows,
    temperature: float,
    log_weight: Tensor,
) -> Tensor:
    """Return log sum_i exp(<few_j, many_i>/tau + log_weight_i) over all i, which the processes share, (len(few),)."""
    own = own_rows(len(many))
    total = log_weight.new_full((len(few),), -math.inf)
    for rows, block in many.part(own).blocks():
        total = torch.logaddexp(total, log_sums(few, block, temperature, log_weight[own][rows])[0])
    return distributed.all_gather(total[None]).logsumexp(dim=0)


def _ratio(measured: Tensor, expected: Tensor) -> float:
    """Return measured / expected; 1 if no noise is expected, because everything was summed."""
    return float(measured / expected) if expected > 0 else 1.0
