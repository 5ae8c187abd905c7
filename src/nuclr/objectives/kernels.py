"""Batch kernels of the stateful objectives: running averages in logs, and the exponentials of both sides of a batch.

For B pairs with scores s_ij = <x_i, y_j>, side x has anchors x and candidates y; side y has them exchanged:

    e^x_ij = (s_ij - s_ii) / tau^x_i - zeta^y_j / tau,    e^y_ij = (s_ij - s_jj) / tau^y_j - zeta^x_i / tau

SogCLR, iSogCLR and NUCLR need two passes over these exponents. The first computes the log-sums of exp(e^x) along rows
and of exp(e^y) along columns, over the negatives only. From these follow the running averages and a weight a_i per
anchor. The second computes

    W_ij = exp(e^x_ij) a^x_i + exp(e^y_ij) a^y_j,    W_ii = -sum_j (exp(e^x_ij) a^x_i + exp(e^y_ji) a^y_i),

with the sum over the negatives of both anchors of pair i. It then computes W y / b and W^T x / b, the gradient of the b
pairs of this process, and the row and column sums from which zeta is updated.

`make_kernel` returns an object with these two passes. `SharedKernel` takes one exponential per pair of samples and
three matrix products in total. `TiledKernel` is exact at every temperature and needs O(tile x B) memory.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

KEPT_ELEMENTS = 1 << 24  # at most two B x B buffers are kept, up to B = 4096: 64 MiB each in float32
TILE_ELEMENTS = 1 << 21  # 8 MiB in float32: 128 rows at B = 16384
SHARED_TILE_ELEMENTS = 1 << 19  # 2 MiB in float32: a tile stays in the cache between two operations on it
LOG2_E = math.log2(math.e)


def running_log_mean(log_u: Tensor, log_phi: Tensor, gamma: float) -> Tensor:
    """Return log((1 - gamma) u + gamma phi) element by element; an unseen sample, log u = -inf, starts at phi.

    Args:
        log_u: log of the old averages, any shape.
        log_phi: log of the new values, the same shape.
        gamma: weight of the new values, in (0, 1].

    Returns:
        Log of the new averages.

    Example:
        >>> running_log_mean(torch.tensor([0.0, -math.inf]), torch.tensor([3.0, 4.0]), gamma=1.0)
        tensor([3., 4.])

    """
    log_old = log_u + (math.log1p(-gamma) if gamma < 1 else -math.inf)
    mixed = torch.logaddexp(log_old, log_phi + math.log(gamma))
    return torch.where(log_u.isneginf(), log_phi, mixed)


class KernelBatch(NamedTuple):
    """What the kernels need of the global batch. Tensors with one row per side have side x in row 0."""

    x: Tensor  # (B, d)
    y: Tensor  # (B, d)
    log_own: Tensor  # (2, B), -zeta/tau of each side's candidates: those of y, then those of x
    tau: float | Tensor  # temperature of the anchors: one number, or (2, B)
    ids: Tensor | None  # (B, k): pairs that agree in a column are not negatives of each other; None: only i = j is not
    rows: slice  # the pairs of this process

    @property
    def whole(self) -> bool:
        """Whether this process has all pairs."""
        return self.rows == slice(0, len(self.x))

    def swapped(self) -> "KernelBatch":
        """Return the batch with its sides exchanged."""
        tau = self.tau if isinstance(self.tau, float) else self.tau.flip(0)
        return KernelBatch(self.y, self.x, self.log_own.flip(0), tau, self.ids, self.rows)


class Gradients(NamedTuple):
    """Results of the second pass for the b pairs of this process."""

    x: Tensor  # (b, d)  sum_j W_ij y_j / b
    y: Tensor  # (b, d)  sum_i W_ij x_i / b
    extra: Tensor | None  # (2, b), the masses or the moments, if requested


class BatchKernel(Protocol):
    """Two passes over the exponentials of one batch. The constructor does the first one."""

    finite: Tensor | bool  # whether all features are finite; a scalar
    log_sums: Tensor  # (2, b), log sum_j exp(e^x_ij) and log sum_i exp(e^y_ij) over negatives of this process's anchors

    def gradients(self, log_weight: Tensor, log_total: Tensor | None = None, moments: bool = False) -> Gradients:
        """Compute weighted sums over the negatives.

        Args:
            log_weight: log a^x and log a^y of all anchors, (2, B).
            log_total: log partition functions of all anchors, (2, B), which requests the masses. The mass of a
                candidate is the sum of the probabilities that all anchors give it:
                sum_i exp(e^x_ij - log_total^x_i) for y_j, and sum_j exp(e^y_ij - log_total^y_j) for x_i.
            moments: whether to return sum_j a^x_i exp(e^x_ij) e^x_ij per anchor of this process, and the same for
                side y.

        Returns:
            The gradients, and in `extra` the masses or moments, (2, b).

        """


class Workspace:
    """Buffers that are reused from step to step.

    New memory costs one page fault per 4 KiB, which takes longer than the arithmetic on it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return an uninitialized buffer.

        Args:
            name: name of the buffer. A second call with this name may return the same memory.
            rows: number of rows.
            columns: number of columns.
            like: a tensor with the dtype and device to use.

        Returns:
            A (rows, columns) tensor.

        """
        kept = self._kept.get(name)
        if kept is None or kept.numel() < rows * columns or kept.dtype != like.dtype or kept.device != like.device:
            with torch.inference_mode(False):  # training cannot write to a buffer made in inference mode
                self._kept[name] = kept = torch.empty(rows * columns, dtype=like.dtype, device=like.device)
        return kept.as_strided((rows, columns), (columns, 1))

    def __reduce__(self) -> tuple[type["Workspace"], tuple[()]]:
        return Workspace, ()  # copies and pickles start empty


def make_kernel(batch: KernelBatch, workspace: Workspace, *, bounded: bool) -> BatchKernel:
    """Choose the faster of the kernels that are exact for this batch.

    Args:
        batch: the global batch.
        workspace: holds B x B buffers, which are reused from step to step.
        bounded: whether each anchor's weight in the second pass is at most 1 / (gamma * sum of its exponentials).

    Returns:
        A kernel whose first pass is done.

    """
    small = len(batch.x) ** 2 <= KEPT_ELEMENTS
    # On CPU, reading a value is free and exp is expensive; on an accelerator it is the reverse.
    if bounded and small and batch.whole and isinstance(batch.tau, float) and batch.x.device.type == "cpu":
        shared = SharedKernel.if_exact(batch, batch.tau, workspace)
        if shared is not None:
            return shared
    return TiledKernel(batch, workspace)


def is_excluded(ids: Tensor, rows: slice, workspace: Workspace) -> Tensor:
    """Return which pairs of samples are not negatives of each other.

    Args:
        ids: (B, k), one or more ids per pair.
        rows: the b anchors to look at.
        workspace: holds the result.

    Returns:
        (b, B) bool: True if anchor and candidate agree in a column.

    """
    mine, flag = ids[rows], ids.new_empty(0, dtype=torch.bool)
    excluded, same = (workspace.take(name, len(mine), len(ids), flag) for name in ("excluded", "same"))
    torch.eq(mine[:, None, 0], ids[:, 0], out=excluded)
    for column in range(1, ids.shape[1]):
        excluded.logical_or_(torch.eq(mine[:, None, column], ids[:, column], out=same))
    return excluded


class SharedKernel:
    """A kernel that uses E_ij = 2^(s_ij log2(e)/tau - shift) for both sides.

    The other terms of an exponent depend only on the row or only on the column. They are applied as one factor per row
    and one factor per column.

    The kernel is exact if neither E nor its products with the factors leave the floating-point range. `if_exact` checks
    this: with h the half-range of the exponents of E, and z that of zeta/tau over both sides, h + 2z must be below 0.85
    of the largest exponent. Let a_i be the factor of anchor i, including its weight, and b_j that of candidate j. Since
    the weights are bounded, a_i b_j <= e^(h + 2z) / gamma then holds for every pair of samples, including masked ones,
    and sums over B stay finite.

    Writing to memory that another core has just read can be ten times slower if the cores do not share a cache.
    Therefore all operations between the matrix products use the same tiles, and W does not overwrite E.
    """

    def __init__(
        self, batch: KernelBatch, exponents: Tensor, factors: Tensor, offsets: Tensor, workspace: Workspace
    ) -> None:
        self.batch, self.workspace = batch, workspace
        self.finite: Tensor | bool = True  # `if_exact` has seen that all scores are finite
        self.factors = factors  # (2, B), of the candidates of both sides
        self.offsets = offsets  # (B,), log of each pair's anchor factor without its weight, equal on both sides
        self.of_y, self.of_x = factors.unbind()
        sums = torch.empty_like(factors)
        self.along_rows, self.along_columns = sums.unbind()
        self.kernel = exponents
        for rows in _shared_tiles(len(self.kernel)):
            tile = self.kernel[rows].exp2_()
            torch.mv(tile, self.of_y, out=self.along_rows[rows])
            self.along_columns.addmv_(tile.T, self.of_x[rows], beta=_beta(rows))
        self.log_sums = sums.log().add_(offsets)

    @classmethod
    def if_exact(cls, batch: KernelBatch, tau: float, workspace: Workspace) -> "SharedKernel | None":
        """Return the kernel of this batch, or None if the range of its exponents is too wide."""
        least, most = (bound.item() for bound in batch.log_own.aminmax())
        center = (least + most) / 2
        allowed = 0.85 * math.log(torch.finfo(batch.x.dtype).max) - (most - least)
        size = len(batch.x)
        scaled = workspace.take("scores", size, size, batch.x)
        scaled.addmm_(batch.x, batch.y.T, beta=0, alpha=LOG2_E / tau)
        diagonal = scaled.diagonal()
        offsets = torch.rsub(diagonal, center, alpha=1 / LOG2_E)
        diagonal.copy_(scaled[0, 1])  # positives are not part of the range
        bounds = [bound.item() for rows in _shared_tiles(size) for bound in scaled[rows].aminmax()]
        if not math.isfinite(sum(bounds)):
            return None
        low, high = min(bounds), max(bounds)
        if not max(high, -low) / LOG2_E <= allowed:
            shift = (high + low) / 2
            if not (high - shift) / LOG2_E <= allowed:
                return None
            scaled.sub_(shift)
            offsets += shift / LOG2_E
        diagonal.fill_(-math.inf)
        if batch.ids is not None:
            scaled.masked_fill_(is_excluded(batch.ids, slice(None), workspace), -math.inf)
        return cls(batch, scaled, (batch.log_own - center).exp_(), offsets, workspace)

    def gradients(self, log_weight: Tensor, log_total: Tensor | None = None, moments: bool = False) -> Gradients:
        """Compute weighted sums over the negatives; see `BatchKernel`."""
        assert not moments, "moments need one temperature per anchor; use TiledKernel"
        weight_x, weight_y = torch.exp(self.offsets + log_weight).unbind()
        masses = None
        if log_total is not None:
            mass_x, mass_y = torch.exp(self.offsets - log_total).unbind()
            masses = torch.empty_like(self.factors)
            on_y, on_x = masses.unbind()
        size = len(self.kernel)
        weights = self.workspace.take("weights", size, size, self.kernel)
        for rows in _shared_tiles(size):
            tile, weighted = self.kernel[rows], weights[rows]
            if masses is not None:
                on_y.addmv_(tile.T, mass_x[rows], beta=_beta(rows))
                torch.mv(tile, mass_y, out=on_x[rows])
            torch.mul(weight_x[rows, None], self.of_y, out=weighted)
            weighted.addcmul_(self.of_x[rows, None], weight_y).mul_(tile)
        if masses is not None:
            masses.mul_(self.factors)
        diagonal = weights.diagonal()
        diagonal.addcmul_(weight_x, self.along_rows, value=-1).addcmul_(weight_y, self.along_columns, value=-1)
        return Gradients(_mean(weights, self.batch.y), _mean(weights.T, self.batch.x), masses)


class TiledKernel:
    """A kernel that computes the exponents of each side separately, in row tiles, with one maximum per log-sum.

    On one process, a tile has its rows as anchors of side x and all columns as anchors of side y. With several
    processes, each one needs its x against all y and its y against all x: the same loop, once per side.
    """

    def __init__(self, batch: KernelBatch, workspace: Workspace) -> None:
        self.batch, self.workspace = batch, workspace
        self.positives = (batch.x * batch.y).sum(dim=1)
        # one nan or inf anywhere makes the sum nan or inf
        self.finite: Tensor | bool = self.positives.sum().isfinite()
        self.blocks = [_ScoreBlock(batch, workspace, "scores")]
        if not batch.whole:
            self.blocks.append(_ScoreBlock(batch.swapped(), workspace, "scores of side y"))
        self.log_sums = self._log_sums()

    def _log_sums(self) -> Tensor:
        whole, sums = self.batch.whole, []
        for block in self.blocks:
            along_rows, along_columns = [], torch.full_like(self.positives, -math.inf)
            for rows, scores in block.tiles():
                excluded = self._excluded(rows)
                exponents = self._of_rows(block, rows, scores, excluded)
                along_rows.append(_log_sum_exp_(exponents, dim=1))
                if whole:
                    exponents = self._of_columns(block, rows, scores, excluded)
                    along_columns = torch.logaddexp(along_columns, _log_sum_exp_(exponents, dim=0))
            sums.append(torch.cat(along_rows))
            if whole:
                sums.append(along_columns)
        return torch.stack(sums)

    def gradients(self, log_weight: Tensor, log_total: Tensor | None = None, moments: bool = False) -> Gradients:
        """Compute weighted sums over the negatives; see `BatchKernel`."""
        pull = (log_weight[:, self.batch.rows] + self.log_sums).exp_().sum(dim=0)
        one = self._block_gradients(self.blocks[0], pull, log_weight, log_total, moments)
        if self.batch.whole:
            return one
        # the second block has the sides swapped
        two = self._block_gradients(
            self.blocks[1], pull, log_weight.flip(0), None if log_total is None else log_total.flip(0), moments
        )
        extra = None
        if one.extra is not None and two.extra is not None:
            # only the rows of a block are complete: masses of row candidates, moments of row anchors
            extra = torch.stack([one.extra[0], two.extra[0]] if moments else [two.extra[1], one.extra[1]])
        return Gradients(one.x, two.x, extra)

    def _block_gradients(
        self, block: "_ScoreBlock", pull: Tensor, log_weight: Tensor, log_total: Tensor | None, moments: bool
    ) -> Gradients:
        x, y, whole = block.batch.x, block.batch.y, block.batch.whole
        start, count, new = block.batch.rows.start, len(pull), pull.new_zeros
        grad_x, grad_y, extra = new(count, x.shape[1]), new(count if whole else 0, x.shape[1]), new(2, count)
        # probability / weight; it is <= 1 if xi bounds zeta, since the total includes the positive's exp(-zeta/tau)
        ratio = None
        if log_total is not None:
            ratio = (log_total + log_weight).neg_().exp_().clamp_(max=torch.finfo(log_total.dtype).max)
        for rows, scores in block.tiles():
            local = slice(rows.start - start, rows.stop - start)
            excluded = self._excluded(rows)
            exponents = self._of_rows(block, rows, scores, excluded)
            if moments:
                weights = torch.add(exponents, log_weight[0, rows, None], out=self._like("weights", scores)).exp_()
                extra[0, local] = exponents.mul_(weights).sum(dim=1)
            else:
                weights = exponents.add_(log_weight[0, rows, None]).exp_()
            if ratio is not None and whole:
                extra[0] += weights.T.mv(ratio[0, rows])
            exponents = self._of_columns(block, rows, scores, excluded)
            if moments and whole:
                others = torch.add(exponents, log_weight[1], out=self._like("other weights", scores)).exp_()
                extra[1] += exponents.mul_(others).sum(dim=0)
            else:
                others = exponents.add_(log_weight[1]).exp_()
            if ratio is not None:
                extra[1, local] = others.mv(ratio[1])
            weights += others
            weights.diagonal(rows.start).sub_(pull[local])
            grad_x[local].addmm_(weights, y, beta=0, alpha=1 / count)
            if whole:
                grad_y.addmm_(weights.T, x[rows], alpha=1 / count)
        return Gradients(grad_x, grad_y, extra if moments or ratio is not None else None)

    def _excluded(self, rows: slice) -> Tensor | None:
        return None if self.batch.ids is None else is_excluded(self.batch.ids, rows, self.workspace)

    def _of_rows(self, block: "_ScoreBlock", rows: slice, scores: Tensor, excluded: Tensor | None) -> Tensor:
        """Return the exponents with rows as anchors, (tile, B)."""
        exponents = torch.sub(scores, self.positives[rows, None], out=self._like("rows", scores))
        exponents.div_(block.tau[0, rows, None]).add_(block.batch.log_own[0])
        return _without_positives(exponents, rows, excluded)

    def _of_columns(self, block: "_ScoreBlock", rows: slice, scores: Tensor, excluded: Tensor | None) -> Tensor:
        """Return the exponents with columns as anchors, (tile, B)."""
        exponents = torch.sub(scores, self.positives, out=self._like("columns", scores))
        exponents.div_(block.tau[1]).add_(block.batch.log_own[1, rows, None])
        return _without_positives(exponents, rows, excluded)

    def _like(self, name: str, tile: Tensor) -> Tensor:
        return self.workspace.take(name, tile.shape[0], tile.shape[1], tile)


class _ScoreBlock:
    """Scores of this process's x against all y. Small ones are kept, large ones are recomputed in each pass."""

    def __init__(self, batch: KernelBatch, workspace: Workspace, name: str) -> None:
        self.batch, self.workspace, self.name = batch, workspace, name
        self.tau = batch.tau if isinstance(batch.tau, Tensor) else torch.full_like(batch.log_own, batch.tau)
        keep = (batch.rows.stop - batch.rows.start) * len(batch.y) <= KEPT_ELEMENTS
        self.kept = self._scores(batch.rows) if keep else None

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over global row numbers and their scores (tile, B), which must not be overwritten."""
        start = self.batch.rows.start
        for rows in score_tiles(self.batch.rows, len(self.batch.y)):
            yield rows, self._scores(rows) if self.kept is None else self.kept[rows.start - start : rows.stop - start]

    def _scores(self, rows: slice) -> Tensor:
        x, y = self.batch.x[rows], self.batch.y
        return torch.mm(x, y.T, out=self.workspace.take(self.name, len(x), len(y), y))


def _without_positives(exponents: Tensor, rows: slice, excluded: Tensor | None) -> Tensor:
    # the lowest finite number instead of -inf: its exponential is 0 as well, and 0 times it is 0, not nan
    lowest = torch.finfo(exponents.dtype).min
    exponents.diagonal(rows.start).fill_(lowest)
    return exponents if excluded is None else exponents.masked_fill_(excluded, lowest)


def _beta(rows: slice) -> int:
    """Return the factor of the old sum when this tile is added: 0 for the first tile, else 1."""
    return int(rows.start > 0)


def _mean(weights: Tensor, features: Tensor) -> Tensor:
    """Return weights (b, B) @ features (B, d) / b."""
    return features.new_empty(len(weights), features.shape[1]).addmm_(weights, features, beta=0, alpha=1 / len(weights))


def score_tiles(rows: slice, columns: int) -> Iterator[slice]:
    """Split rows of a matrix with this many columns into tiles of a few MiB."""
    tiles = _tiles(rows.stop - rows.start, TILE_ELEMENTS // columns)
    return (slice(rows.start + tile.start, rows.start + tile.stop) for tile in tiles)


def _shared_tiles(total: int) -> Iterator[slice]:
    return _tiles(total, SHARED_TILE_ELEMENTS // total)


def _tiles(total: int, size: int) -> Iterator[slice]:
    size = max(size, 1)
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _log_sum_exp_(exponents: Tensor, dim: int) -> Tensor:
    """Return log sum exp along `dim`, overwriting the exponents; -inf if all terms are excluded."""
    largest = exponents.amax(dim, keepdim=True)
    sums = exponents.sub_(largest).exp_().sum(dim)
    none = largest.squeeze(dim) == torch.finfo(exponents.dtype).min
    return torch.where(none, -math.inf, sums.log_() + largest.squeeze(dim))
