"""A pass over a sparse part of the scores: from zeta to estimates of the column sums c and the anchors' log Z.

With A_ij = exp((s_ij - zeta_j)/tau) / Z_i, the sum over the candidates in Z_i and the sum over the anchors in c_j are
estimated from a weighted sample per cell (`cells`). Under torch.distributed the processes share the cells.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.arrays import Rows
from nuclr.popularity.cells import Cell, Draws, draw_rows
from nuclr.popularity.kernel import LOG2_E, State, own_rows
from nuclr.popularity.problem import Problem

TILE = 2**21  # scores per tile: fit into a CPU cache
DRIFT = 12.0  # largest change of the logits of a kept block
KEPT = torch.float16


class CellSums:
    """Sums over the rows drawn for each cell: log sum_i exp(<many_j, few_i>/tau + q_i), estimated.

    Args:
        many: Features of the rows in the cells, (n, d).
        few: Features of the other side, (m, d).
        temperature: tau.
        cells: Cells of this process.
        draws: What was drawn for each of them.
        size: How many of the rows drawn to use.
        keep: Keep the exponentials, at a reference q, in half precision. They are computed again only if q has moved by
            more than DRIFT.

    """

    def __init__(
        self,
        many: Rows,
        few: Rows,
        temperature: float,
        cells: Sequence[Cell],
        draws: Draws,
        size: int,
        keep: bool,
    ) -> None:
        self.many = many
        self.few = few
        self.temperature = temperature
        self.keep = keep
        self.cells = cells
        self.draws = draws
        self.size = min(size, len(few))
        self.reference: Tensor | None = None
        self.kept = torch.empty(
            0,
            dtype=KEPT,
            device=few.device,
        )
        self.top = torch.empty(0)

    def log_sums(self, q: Tensor) -> Tensor:
        """Return the logarithms of the sums, (n,) float64."""
        out = q.new_zeros(len(self.many))
        if not self.keep:
            for rows, index, log_weight in self._samples():
                out[rows] = log_sums(self.many[rows], self.few[index], self.temperature, q[index] + log_weight)[0]
            return distributed.sum_over_processes(out)
        if self.reference is None or float((q - self.reference).nan_to_num().abs().amax()) > DRIFT:
            self._fill(q)
        assert self.reference is not None
        factor = (q - self.reference).nan_to_num().exp().to(self.many.dtype)
        for (rows, index, _), block in zip(self._samples(), self._blocks(), strict=True):
            out[rows] = self.top[rows] + (block.to(factor) @ factor[index]).to(out).log()
        return distributed.sum_over_processes(out)

    def noise(self, q: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the sums and a draw from the distribution of their errors, (n,) and (n,)."""
        out = q.new_zeros(2, len(self.many))
        generator = torch.Generator()
        for rows, index, log_weight in self._samples():
            generator.manual_seed(seed + int(rows[0]))
            signs = 2.0 * torch.randint(2, (len(index),), generator=generator).to(q) - 1
            noise = signs * (1 - (-log_weight).exp()).clamp_min(0).sqrt()
            sums = log_sums(self.many[rows], self.few[index], self.temperature, q[index] + log_weight, noise)
            out[:, rows] = torch.stack(sums)
        total = distributed.sum_over_processes(out)
        return total[0], total[1]

    def _fill(self, q: Tensor) -> None:
        if self.reference is None:
            self.kept = self.kept.new_empty(sum(len(cell.rows) for cell in self.cells) * self.size)
            self.top = q.new_zeros(len(self.many))
        self.reference = q
        for (rows, index, log_weight), kept in zip(self._samples(), self._blocks(), strict=True):
            shift = (q[index] + log_weight).to(self.many.dtype)
            block = torch.addmm(
                shift,
                self.many[rows],
                self.few[index].T,
                alpha=1 / self.temperature,
            )
            top = block.amax(dim=1)
            kept.copy_(block.sub_(top[:, None]).mul_(LOG2_E).exp2_())
            self.top[rows] = top.to(q)

    def _samples(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield, per cell, its rows, the rows drawn for it, and the logarithms of their weights."""
        for number, cell in enumerate(self.cells):
            yield cell.rows, *self.draws.first(number, self.size)

    def _blocks(self) -> Iterator[Tensor]:
        """Yield the kept matrix of each cell."""
        start = 0
        for cell in self.cells:
            stop = start + len(cell.rows) * self.size
            yield self.kept[start:stop].view(len(cell.rows), self.size)
            start = stop


@dataclass
class CellKernel:
    """Estimate the State at zeta from the cells' samples.

    Attributes:
        problem: The problem.
        rows: Sums over candidates, for cells of anchors.
        columns: Sums over anchors, for cells of candidates.
        row_shift: Added to log Z, (n_x,).
        column_shift: Added to log c, (n_y,).

    """

    problem: Problem
    rows: CellSums
    columns: CellSums
    row_shift: Tensor
    column_shift: Tensor

    def __call__(self, zeta: Tensor) -> State:
        """Return the state at zeta, with the shifts added to log Z and log c."""
        p = self.problem
        log_z = self.rows.log_sums(p.b.log() - zeta / p.temperature) + self.row_shift
        log_q = self.columns.log_sums(p.a.log() - log_z) + self.column_shift
        return _state(zeta, log_q - zeta / p.temperature, log_z)

    def correct(
        self,
        fine: "CellKernel",
        zeta: Tensor,
        seed: int,
    ) -> tuple[State, Tensor, Tensor]:
        """Set the shifts such that this kernel agrees at zeta with one that has larger samples.

        Args:
            fine: Kernel of the same problem.
            zeta: (n_y,).
            seed: Of the noise.

        Returns:
            The fine kernel's state at zeta, and draws of the relative errors of its Z, (n_x,), and of its c, (n_y,).

        """
        p = self.problem
        log_b = p.b.log() - zeta / p.temperature
        log_a = p.a.log()
        log_z, noise_z = fine.rows.noise(log_b, seed)
        self.row_shift = log_z - self.rows.log_sums(log_b)
        log_q, noise_c = fine.columns.noise(log_a - log_z, seed + 1)
        self.column_shift = log_q - self.columns.log_sums(log_a - log_z)
        return _state(zeta, log_q - zeta / p.temperature, log_z), noise_z, noise_c


def make_kernels(
    problem: Problem,
    cells: tuple[list[Cell], list[Cell]],
    potentials: tuple[Tensor, Tensor],
    sizes: tuple[int, int],
    seed: int,
) -> tuple[CellKernel, CellKernel]:
    """Draw the rows for all cells, and return a kernel with all of them and one that keeps a part in memory.

    Args:
        problem: The problem.
        cells: Of the anchors and of the candidates.
        potentials: Estimates of zeta, (n_y,), and of log Z, (n_x,).
        sizes: Number of rows per cell of each kernel.
        seed: Of the random numbers.

    Returns:
        The kernels.

    """
    x = problem.x
    y = problem.y
    tau = problem.temperature
    assert isinstance(x, Rows) and isinstance(y, Rows)
    zeta, log_z = potentials
    of_x, of_y = (part[own_rows(len(part))] for part in cells)
    for_x = draw_rows(of_x, x, y, tau, problem.b.log() - zeta / tau, max(sizes), seed)
    for_y = draw_rows(of_y, y, x, tau, problem.a.log() - log_z, max(sizes), seed + 1)
    zeros = torch.zeros_like(problem.a), torch.zeros_like(problem.b)
    fine, coarse = (
        CellKernel(
            problem,
            CellSums(x, y, tau, of_x, for_x, size, keep),
            CellSums(y, x, tau, of_y, for_y, size, keep),
            *zeros,
        )
        for size, keep in zip(sizes, (False, True), strict=True)
    )
    return fine, coarse


def _state(
    zeta: Tensor,
    log_c: Tensor,
    log_z: Tensor,
) -> State:
    log_c = log_c - log_c.mean()  # the estimates need not conserve mass, and zeta is defined up to a constant
    return State(zeta, log_c, log_z, torch.ones_like(zeta), float(log_c.norm()))


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
    height = max(1, TILE // max(1, len(few)))
    buffer = few.new_empty(min(height, len(many)), len(few))
    for start in range(0, len(many), height):
        rows = slice(start, min(start + height, len(many)))
        block = torch.addmm(
            shift,
            many[rows],
            few.T,
            alpha=1 / temperature,
            out=buffer[: rows.stop - start],
        )
        top = block.amax(dim=1)
        sums = block.sub_(top[:, None]).mul_(LOG2_E).exp2_() @ factors
        out[rows, 0] = top.to(out) + sums[:, 0].to(out).log()
        out[rows, 1] = (sums[:, -1] / sums[:, 0]).to(out)
    return out[:, 0], out[:, 1] if noise is not None else torch.zeros_like(out[:, 0])
