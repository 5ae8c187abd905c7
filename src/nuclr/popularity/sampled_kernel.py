"""A pass over a sparse part of the scores: from zeta to estimates of the column sums c and the anchors' log Z.

With A_ij = exp((s_ij - zeta_j)/tau) / Z_i, the sum over the candidates in Z_i and the sum over the anchors in c_j are
split into a *near field*, a list of pairs (i, j) that is summed exactly, and a *far field*, all other pairs, which is
estimated from a sample of the candidates or of the anchors:

    c_j = sum_{i near j} a_i A_ij + sum_{i sampled, not near j} w_i a_i A_ij,    w_i = 1 / probability of being drawn

Instead of removing near pairs from the dense product with the sample, a near pair of a sampled anchor gets the weight
1 - w_i in the near field. Any set of near pairs gives an unbiased estimate; a good one leaves little variance.

Under torch.distributed each process handles its own anchors, and one all-reduce adds the column sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.popularity.kernel import LOG2_E, State
from nuclr.popularity.problem import Problem
from nuclr.popularity.rows import Rows
from nuclr.popularity.sampling import Sample

TILE = 2**21  # scores per tile: fit into a CPU cache
CHUNK = 2**21  # near pairs per step
DRIFT = 40.0  # largest change of the logits of a kept matrix


@dataclass(frozen=True)
class Near:
    """Near pairs: anchor (of this process), candidate, both int32, and s_ij / tau; all (pairs,)."""

    anchor: Tensor
    candidate: Tensor
    logit: Tensor

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.logit)


class NearProducts:
    """Products with the sparse matrix exp(s_ij/tau - f_i - g_j) of the near pairs, for potentials f and g.

    The exponentials are kept at reference potentials and computed again only if these have moved by more than DRIFT.
    """

    def __init__(self, near: Near) -> None:
        self.near = near
        self.values = torch.empty_like(near.logit)
        self.reference: tuple[Tensor, Tensor] | None = None

    def rows(self, f: Tensor, g: Tensor, weights: Tensor) -> Tensor:
        """Return the product with weights (n_y, k), (n_x, k)."""
        at_x, at_y = self._factors(f, g)
        return at_x[:, None] * self._product(self.values, self.near.candidate, self.near.anchor, at_y, weights, len(f))

    def columns(self, f: Tensor, g: Tensor, weights: Tensor) -> Tensor:
        """Return the product of the transposed matrix with weights (n_x, k), (n_y, k)."""
        at_x, at_y = self._factors(f, g)
        return at_y[:, None] * self._product(self.values, self.near.anchor, self.near.candidate, at_x, weights, len(g))

    def squared_columns(self, f: Tensor, g: Tensor, weights: Tensor) -> Tensor:
        """Return the product of the transposed matrix of squares with weights (n_x, 1), (n_y,)."""
        at_x, at_y = (factor.square() for factor in self._factors(f, g))
        squares, near = self.values.square(), self.near
        return at_y * self._product(squares, near.anchor, near.candidate, at_x, weights, len(g))[:, 0]

    def _factors(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the kept values are to be multiplied with, per anchor and per candidate."""
        if self.reference is None or moved((f, g), self.reference) > DRIFT:
            self.reference = f, g
            for chunk in self._chunks():
                value = self.near.logit[chunk] - g.to(self.values).index_select(0, self.near.candidate[chunk])
                value.sub_(f.to(value).index_select(0, self.near.anchor[chunk]))
                self.values[chunk] = value.mul_(LOG2_E).exp2_()
        return (self.reference[0] - f).exp(), (self.reference[1] - g).exp()

    def _product(self, values: Tensor, source: Tensor, target: Tensor, at: Tensor, weights: Tensor, n: int) -> Tensor:
        out = values.new_zeros(weights.shape[1], n)
        scaled = (weights * at[:, None]).to(values).T.contiguous()
        for chunk in self._chunks():
            for sums, weight in zip(out, scaled, strict=True):
                sums.index_add_(0, target[chunk], weight.index_select(0, source[chunk]).mul_(values[chunk]))
        return out.T.to(weights)

    def _chunks(self) -> list[slice]:
        return [slice(start, start + CHUNK) for start in range(0, len(self.near), CHUNK)]


class Far:
    """Products with the matrix exp(<many_i, few_j>/tau - p_i - q_j), for potentials p and q.

    Args:
        many: Features (n, d).
        few: Features of a sample of the other side, (m, d).
        temperature: tau.
        keep: Keep the matrix in memory, at reference potentials. It is computed again only if the potentials have
            moved by more than DRIFT.

    """

    def __init__(self, many: Rows | Tensor, few: Tensor, temperature: float, keep: bool) -> None:
        self.many, self.few, self.keep = many, few / temperature, keep
        self.matrix: Tensor | None = None
        self.reference: tuple[Tensor, Tensor] | None = None

    def product(self, p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
        """Return the product of the matrix at potentials p (n,) and q (m,) with weights (m, k), (n, k) in float64."""
        out = p.new_zeros(len(p), weights.shape[1])
        if not len(self.few):
            return out
        if self.keep and self.matrix is None:
            self.matrix = self.few.new_empty(len(p), len(self.few))
        fresh = not self.keep or self.reference is None or moved((p, q), self.reference) > DRIFT
        if fresh or self.reference is None:
            self.reference = p, q
        scaled = (weights * (self.reference[1] - q).exp()[:, None]).to(self.few)
        height = max(1, TILE // len(self.few))
        buffer = None if self.matrix is not None else self.few.new_empty(min(height, len(p)), len(self.few))
        shift = (-q).to(self.few)
        for start in range(0, len(p), height):
            rows = slice(start, min(start + height, len(p)))
            block = self.matrix[rows] if self.matrix is not None else buffer[: rows.stop - start]  # type: ignore[index]
            if fresh:
                torch.addmm(shift, self.many[rows], self.few.T, out=block)
                block.sub_(p[rows, None].to(block)).mul_(LOG2_E).exp2_()  # exp2_ is faster than exp_ on CPU
            out[rows] = (block @ scaled).to(out)
        return out * (self.reference[0] - p).exp()[:, None]


def moved(potentials: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> float:
    """Return the largest change of a potential."""
    return max(float((new - old).abs().amax()) for new, old in zip(potentials, reference, strict=True) if len(new))


class SampledKernel:
    """Estimate the State at zeta from near pairs and samples.

    Args:
        problem: The problem with the anchors of this process only.
        near: Near pairs of these anchors.
        anchors: Sample of these anchors.
        candidates: Sample of the candidates.
        log_z: log Z of these anchors near the solution, (n_x,).
        memory: Bytes to spend on keeping the far field.

    """

    def __init__(
        self,
        problem: Problem,
        near: NearProducts | None,
        anchors: Sample,
        candidates: Sample,
        log_z: Tensor,
        memory: int,
    ) -> None:
        assert problem.x is not None and problem.y is not None
        self.problem, self.anchors, self.candidates = problem, anchors, candidates
        self.near = near
        self.log_z = log_z
        size = len(problem.a) * len(candidates) + len(problem.b) * len(anchors)
        keep = size * problem.dtype.itemsize <= memory
        self.rows = Far(problem.x, problem.y[candidates.index], problem.temperature, keep)
        self.columns = Far(problem.y, problem.x[anchors.index], problem.temperature, keep)
        self.row_shift, self.column_shift = torch.zeros_like(problem.a), torch.zeros_like(problem.b)

    def __call__(self, zeta: Tensor) -> State:
        """Return the state at zeta, with the shifts added to log Z and log c."""
        z, _ = self._row_sums(zeta, noise=False)
        self.log_z = self.log_z + z.log() + self.row_shift
        c, squares = self._column_sums(zeta, noise=False)
        return self._state(zeta, c.log() + self.column_shift, (1 - self.problem.b * squares / c).clamp(0, 1))

    def correct(self, fine: "SampledKernel", zeta: Tensor) -> tuple[State, Tensor, Tensor]:
        """Set the shifts such that this kernel agrees at zeta with one that has larger samples.

        Args:
            fine: Kernel of the same problem with the same near pairs.
            zeta: (n_y,).

        Returns:
            The fine kernel's state at zeta, and draws of the relative errors of its Z, (n_x,), and of its c, (n_y,).

        """
        z, _ = self._row_sums(zeta, noise=False)
        fine.log_z = self.log_z
        fine_z, noise_z = fine._row_sums(zeta, noise=True)
        self.row_shift = fine_z.log() - z.log()
        self.log_z = fine.log_z = fine.log_z + fine_z.log()
        c, _ = self._column_sums(zeta, noise=False)
        fine_c, noise_c = fine._column_sums(zeta, noise=True)
        self.column_shift = fine_c.log() - c.log()
        return self._state(zeta, fine_c.log(), torch.ones_like(c)), noise_z / fine_z, noise_c / fine_c

    def _state(self, zeta: Tensor, log_c: Tensor, curvature: Tensor) -> State:
        log_c = log_c - log_c.mean()  # the estimates need not conserve mass, and zeta is defined up to a constant
        return State(zeta, log_c, self.log_z, curvature, float(log_c.norm()))

    def _row_sums(self, zeta: Tensor, noise: bool) -> tuple[Tensor, Tensor]:
        """Return the sums over candidates, relative to exp(log_z), and with the noise's weights."""
        p, g = self.problem, zeta / self.problem.temperature
        far, near = _weights(self.candidates, len(p.b), noise)
        index = self.candidates.index
        sums = self.rows.product(self.log_z, g[index], far * p.b[index, None])
        if self.near is not None:
            sums += self.near.rows(self.log_z, g, near * p.b[:, None])
        sums[:, 0].clamp_(min=_LEAST)
        return sums[:, 0], sums[:, -1]

    def _column_sums(self, zeta: Tensor, noise: bool) -> tuple[Tensor, Tensor]:
        """Return the sums over anchors, and the sums with the noise's weights or the sums of a_i A_ij^2 (near only)."""
        p, g = self.problem, zeta / self.problem.temperature
        far, near = _weights(self.anchors, len(p.a), noise)
        index = self.anchors.index
        sums = self.columns.product(g, self.log_z[index], far * p.a[index, None])
        squares = torch.zeros_like(zeta)
        if self.near is not None:
            sums += self.near.columns(self.log_z, g, near * p.a[:, None])
            if not noise:
                squares = self.near.squared_columns(self.log_z, g, p.a[:, None])
        total = distributed.sum_over_processes(torch.cat([sums, squares[:, None]], dim=1))
        total[:, 0].clamp_(min=_LEAST)
        return total[:, 0], total[:, 1] if noise else total[:, -1]


_LEAST = 1e-35  # rounding in float32 can make a vanishing sum zero or negative


def _weights(sample: Sample, n: int, noise: bool) -> tuple[Tensor, Tensor]:
    """Return the weights in the far field, (m, 1 or 2), and those of near pairs, (n, 1 or 2)."""
    far = torch.stack([sample.weight, sample.noise] if noise else [sample.weight], dim=1)
    near = far.new_zeros(n, far.shape[1])
    near[:, 0] = 1
    near[sample.index] -= far
    return far, near


def log_sums(
    many: Rows | Tensor, few: Tensor, temperature: float, log_weight: Tensor, noise: Tensor | None = None
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
    few = few / temperature
    shift = log_weight.to(few)
    factors = torch.ones(len(few), 1 + (noise is not None), dtype=few.dtype, device=few.device)
    if noise is not None:
        factors[:, 1] = noise
    out = torch.empty(len(many), 2, dtype=torch.float64, device=few.device)
    height = max(1, TILE // max(1, len(few)))
    buffer = few.new_empty(min(height, len(many)), len(few))
    for start in range(0, len(many), height):
        rows = slice(start, min(start + height, len(many)))
        block = torch.addmm(shift, many[rows], few.T, out=buffer[: rows.stop - start])
        top = block.amax(dim=1)
        sums = block.sub_(top[:, None]).mul_(LOG2_E).exp2_() @ factors
        out[rows, 0] = top.to(out) + sums[:, 0].to(out).log()
        out[rows, 1] = (sums[:, -1] / sums[:, 0]).to(out)
    return out[:, 0], out[:, 1] if noise is not None else torch.zeros_like(out[:, 0])


def far_bytes(problem: Problem) -> int:
    """Return the bytes of the far field per sampled row of each side."""
    return (len(problem.a) + len(problem.b)) * problem.dtype.itemsize
