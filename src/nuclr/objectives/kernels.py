"""Pure pieces of the stateful objectives: log-domain averages, and both sides' exponentials of one batch.

For B pairs with scores s_ij = <x_i, y_j>, side x has anchors x and candidates y, side y the other way round:

    e^x_ij = (s_ij - s_ii) / tau^x_i - zeta^y_j / tau,    e^y_ij = (s_ij - s_jj) / tau^y_j - zeta^x_i / tau

SogCLR, iSogCLR and NUCLR all need, first, the log-sums of exp(e^x) along rows and of exp(e^y) along columns over the
pairs that are negatives; then, once the running averages are known and with them a weight a_i per anchor,

    W_ij = exp(e^x_ij) a^x_i + exp(e^y_ij) a^y_j,    W_ii = -(what both anchors of pair i give to their negatives),

W y / b, W^T x / b, the gradient of this process's b pairs, and column and row sums for zeta.

`contrast` returns an object with these two passes. `SharedContrast` takes one exponential for everything and three
matrix products in all; `TiledContrast` is exact for every temperature and needs O(tile x B) memory.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

KEPT_ELEMENTS = 1 << 24  # B x B buffers, two at most, are kept up to B = 4096: 64 MiB each in float32
TILE_ELEMENTS = 1 << 21  # 8 MiB in float32: 128 rows at B = 16384
SHARED_TILE_ELEMENTS = 1 << 19  # 2 MiB: what one step leaves of a tile in the cache the next one finds there
LOG2_E = math.log2(math.e)


def running_log_mean(log_u: Tensor, log_phi: Tensor, gamma: float) -> Tensor:
    """log((1 - gamma) u + gamma phi), element by element; a sample never seen, log u = -inf, starts at phi."""
    log_old = log_u + (math.log1p(-gamma) if gamma < 1 else -math.inf)
    mixed = torch.logaddexp(log_old, log_phi + math.log(gamma))
    return torch.where(log_u.isneginf(), log_phi, mixed)


class Pairs(NamedTuple):
    """The global batch, of which `rows` are this process's; tensors of both sides have side x in row 0."""

    x: Tensor  # (B, d)
    y: Tensor  # (B, d)
    log_own: Tensor  # (2, B), -zeta/tau of each side's candidates: y's, then x's; it is theirs as positives, too
    tau: float | Tensor  # (2, B), of each side's anchors, where it differs
    ids: Tensor | None  # (B, 2): pairs that agree in a column are no negatives of each other; None: only i = j is out
    rows: slice

    @property
    def whole(self) -> bool:
        """Whether this is the only process."""
        return self.rows == slice(0, len(self.x))

    def swapped(self) -> "Pairs":
        """The same with the sides exchanged."""
        tau = self.tau if isinstance(self.tau, float) else self.tau.flip(0)
        return Pairs(self.y, self.x, self.log_own.flip(0), tau, self.ids, self.rows)


class Gradients(NamedTuple):
    """What the second pass returns for this process's b pairs."""

    x: Tensor  # (b, d)  sum_j W_ij y_j / b
    y: Tensor  # (b, d)  sum_i W_ij x_i / b
    extra: Tensor | None  # (2, b), masses or moments, as asked for


class Contrast(Protocol):
    """Two passes over the exponentials of one batch, the first when it is made."""

    finite: Tensor | bool  # whether all features are; a scalar
    log_sums: Tensor  # (2, b), log sum_j exp(e^x_ij) and log sum_i exp(e^y_ij) over the negatives of own anchors

    def gradients(self, log_weight: Tensor, log_total: Tensor | None = None, moments: bool = False) -> Gradients:
        """Weighted sums over the negatives.

        Args:
            log_weight: log a^x and log a^y of all anchors, (2, B).
            log_total: log partition functions of all anchors, (2, B), to ask for masses, what the anchors' probability
                lays on this process's candidates, (2, b): sum_i exp(e^x_ij - log_total^x_i) for each y_j, and
                sum_j exp(e^y_ij - log_total^y_j) for each x_i.
            moments: ask for sum_j a^x_i exp(e^x_ij) e^x_ij of this process's anchors, and for side y, (2, b).

        """


class Workspace:
    """Buffers that live from step to step: fresh memory costs a page fault every 4 KiB, more than the arithmetic."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
        """(rows, columns), uninitialized, in the dtype and on the device of `like`; voids the one of this name."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < rows * columns or kept.dtype != like.dtype or kept.device != like.device:
            with torch.inference_mode(False):  # or an evaluation under it would leave one that training cannot write
                self._kept[name] = kept = torch.empty(rows * columns, dtype=like.dtype, device=like.device)
        return kept.as_strided((rows, columns), (columns, 1))

    def __reduce__(self) -> tuple[type["Workspace"], tuple[()]]:
        return Workspace, ()  # copies and pickles start empty


def contrast(pairs: Pairs, workspace: Workspace, *, bounded: bool) -> Contrast:
    """Choose the faster exact way for this batch; what is B x B may stay in the workspace.

    bounded: each anchor's weight to come is at most 1/gamma over the sum of its exponentials.
    """
    small = len(pairs.x) ** 2 <= KEPT_ELEMENTS
    # Looking at values is free on a CPU and exponentials are dear there; on an accelerator it is the other way round.
    if bounded and small and pairs.whole and isinstance(pairs.tau, float) and pairs.x.device.type == "cpu":
        shared = SharedContrast.where_exact(pairs, pairs.tau, workspace)
        if shared is not None:
            return shared
    return TiledContrast(pairs, workspace)


def is_excluded(ids: Tensor, rows: slice, workspace: Workspace) -> Tensor:
    """Pairs that are no negatives: (b, B), true where one of the columns of ids (B, 2) agrees."""
    mine, flag = ids[rows], ids.new_empty(0, dtype=torch.bool)
    x, y = (workspace.take(f"same {side}", len(mine), len(ids), flag) for side in "xy")
    torch.eq(mine[:, None, 0], ids[:, 0], out=x)
    torch.eq(mine[:, None, 1], ids[:, 1], out=y)
    return x.logical_or_(y)


class SharedContrast:
    """E_ij = 2^(s_ij log2(e)/tau - shift) serves both sides: the rest of each exponent is a row or a column factor.

    Exact where no E and no product with the factors leaves the floating-point range, which `where_exact` checks: with
    h the half-range of the exponents of E and z that of zeta/tau, both sides together, h + 2z below 0.85 of the largest
    exponent. Then, weights being bounded, also a_i b_j <= e^(h + 2z) / gamma for every pair, the left-out ones
    included, and sums over B stay finite.

    What another core has read is slow to write to where the two share no cache: up to ten times. So all steps between
    the matrix products go over the same tiles, and W does not overwrite E, which both have read.
    """

    def __init__(self, pairs: Pairs, exponents: Tensor, factors: Tensor, offsets: Tensor, workspace: Workspace) -> None:
        self.pairs, self.workspace = pairs, workspace
        self.finite: Tensor | bool = True  # or the range of the exponents would not be
        self.factors = factors  # (2, B), of both sides' candidates
        self.offsets = offsets  # (B,), the rest of the exponents of a pair's anchors
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
    def where_exact(cls, pairs: Pairs, tau: float, workspace: Workspace) -> "SharedContrast | None":
        """The shared form of this batch, or None where its exponents span too much."""
        least, most = (bound.item() for bound in pairs.log_own.aminmax())
        center = (least + most) / 2
        allowed = 0.85 * math.log(torch.finfo(pairs.x.dtype).max) - (most - least)
        size = len(pairs.x)
        scaled = workspace.take("scores", size, size, pairs.x)
        scaled.addmm_(pairs.x, pairs.y.T, beta=0, alpha=LOG2_E / tau)
        diagonal = scaled.diagonal()
        offsets = torch.rsub(diagonal, center, alpha=1 / LOG2_E)
        diagonal.copy_(scaled[0, 1])  # positives do not count in the range
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
        if pairs.ids is not None:
            scaled.masked_fill_(is_excluded(pairs.ids, slice(None), workspace), -math.inf)
        return cls(pairs, scaled, (pairs.log_own - center).exp_(), offsets, workspace)

    def gradients(self, log_weight: Tensor, log_total: Tensor | None = None, moments: bool = False) -> Gradients:
        """See `Contrast`."""
        assert not moments, "moments need a temperature per anchor, which TiledContrast serves"
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
        return Gradients(_mean(weights, self.pairs.y), _mean(weights.T, self.pairs.x), masses)


class TiledContrast:
    """Row tiles of the scores, each side's exponent on its own, every log-sum with its own maximum.

    On one process a tile serves its rows as anchors of side x and all columns as anchors of side y. On several, a
    process needs the rows of its x against all y and of its y against all x: the same loop, once per side.
    """

    def __init__(self, pairs: Pairs, workspace: Workspace) -> None:
        self.pairs, self.workspace = pairs, workspace
        self.positives = (pairs.x * pairs.y).sum(dim=1)
        # a single nan or inf spoils the sum, wherever it stands
        self.finite: Tensor | bool = self.positives.sum().isfinite()
        self.blocks = [_Block(pairs, workspace, "scores")]
        if not pairs.whole:
            self.blocks.append(_Block(pairs.swapped(), workspace, "scores of side y"))
        self.log_sums = self._log_sums()

    def _log_sums(self) -> Tensor:
        whole, sums = self.pairs.whole, []
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
        """See `Contrast`."""
        pull = (log_weight[:, self.pairs.rows] + self.log_sums).exp_().sum(dim=0)
        one = self._block_gradients(self.blocks[0], pull, log_weight, log_total, moments)
        if self.pairs.whole:
            return one
        # the second block has the sides swapped
        two = self._block_gradients(
            self.blocks[1], pull, log_weight.flip(0), None if log_total is None else log_total.flip(0), moments
        )
        extra = None
        if one.extra is not None and two.extra is not None:
            # of each block only the rows are complete: masses on row candidates, moments of row anchors
            extra = torch.stack([one.extra[0], two.extra[0]] if moments else [two.extra[1], one.extra[1]])
        return Gradients(one.x, two.x, extra)

    def _block_gradients(
        self, block: "_Block", pull: Tensor, log_weight: Tensor, log_total: Tensor | None, moments: bool
    ) -> Gradients:
        x, y, whole = block.pairs.x, block.pairs.y, block.pairs.whole
        start, count, new = block.pairs.rows.start, len(pull), pull.new_zeros
        grad_x, grad_y, extra = new(count, x.shape[1]), new(count if whole else 0, x.shape[1]), new(2, count)
        # of probability to weight, <= 1 where xi bounds zeta: the total holds the positive's own term, exp(-zeta/tau)
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
        return None if self.pairs.ids is None else is_excluded(self.pairs.ids, rows, self.workspace)

    def _of_rows(self, block: "_Block", rows: slice, scores: Tensor, excluded: Tensor | None) -> Tensor:
        """Exponents of the rows as anchors, (tile, B)."""
        exponents = torch.sub(scores, self.positives[rows, None], out=self._like("rows", scores))
        exponents.div_(block.tau[0, rows, None]).add_(block.pairs.log_own[0])
        return _without_positives(exponents, rows, excluded)

    def _of_columns(self, block: "_Block", rows: slice, scores: Tensor, excluded: Tensor | None) -> Tensor:
        """Exponents of the columns as anchors, (tile, B)."""
        exponents = torch.sub(scores, self.positives, out=self._like("columns", scores))
        exponents.div_(block.tau[1]).add_(block.pairs.log_own[1, rows, None])
        return _without_positives(exponents, rows, excluded)

    def _like(self, name: str, tile: Tensor) -> Tensor:
        return self.workspace.take(name, tile.shape[0], tile.shape[1], tile)


class _Block:
    """Scores of own x against all y; kept where they are small, multiplied again at each pass otherwise."""

    def __init__(self, pairs: Pairs, workspace: Workspace, name: str) -> None:
        self.pairs, self.workspace, self.name = pairs, workspace, name
        self.tau = pairs.tau if isinstance(pairs.tau, Tensor) else torch.full_like(pairs.log_own, pairs.tau)
        keep = (pairs.rows.stop - pairs.rows.start) * len(pairs.y) <= KEPT_ELEMENTS
        self.kept = self._scores(pairs.rows) if keep else None

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Pairs of global row numbers and their scores (tile, B), which are not to be written to."""
        start, stop = self.pairs.rows.start, self.pairs.rows.stop
        for local in _tiles(stop - start, TILE_ELEMENTS // len(self.pairs.y)):
            rows = slice(start + local.start, start + local.stop)
            yield rows, self._scores(rows) if self.kept is None else self.kept[local]

    def _scores(self, rows: slice) -> Tensor:
        x, y = self.pairs.x[rows], self.pairs.y
        return torch.mm(x, y.T, out=self.workspace.take(self.name, len(x), len(y), y))


def _without_positives(exponents: Tensor, rows: slice, excluded: Tensor | None) -> Tensor:
    # the lowest finite number, not -inf: its exponential is 0 as well, and 0 times it is 0
    lowest = torch.finfo(exponents.dtype).min
    exponents.diagonal(rows.start).fill_(lowest)
    return exponents if excluded is None else exponents.masked_fill_(excluded, lowest)


def _beta(rows: slice) -> int:
    """What is kept of a sum over tiles when that of these rows is added: of the first one nothing."""
    return int(rows.start > 0)


def _mean(weights: Tensor, features: Tensor) -> Tensor:
    """weights (b, B) @ features (B, d) / b."""
    return features.new_empty(len(weights), features.shape[1]).addmm_(weights, features, beta=0, alpha=1 / len(weights))


def _shared_tiles(total: int) -> Iterator[slice]:
    return _tiles(total, SHARED_TILE_ELEMENTS // total)


def _tiles(total: int, size: int) -> Iterator[slice]:
    size = max(size, 1)
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _log_sum_exp_(exponents: Tensor, dim: int) -> Tensor:
    """Log sum exp along dim, in place; -inf where all terms are left out."""
    largest = exponents.amax(dim, keepdim=True)
    sums = exponents.sub_(largest).exp_().sum(dim)
    none = largest.squeeze(dim) == torch.finfo(exponents.dtype).min
    return torch.where(none, -math.inf, sums.log_() + largest.squeeze(dim))
