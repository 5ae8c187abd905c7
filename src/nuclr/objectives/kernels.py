"""Batch kernels of the stateful objectives: log-sums, gradients, masses and moments of both sides of a batch.

A batch has B pairs with m_x views of every x and m_y views of every y (one each, usually). Side x has anchors x and
candidates y; side y has them exchanged. With scores s(x_ik, y_jl) and S_i their mean over the views of pair i,

    e^x_ikjl = (s(x_ik, y_jl) - S_i) / tau^x_i + bias^y_j,    e^y_jlik = (s(x_ik, y_jl) - S_j) / tau^y_j + bias^x_i

are the exponents of negatives, i != j. The bias of a candidate is -zeta/tau, the same for all anchors. It belongs to
the pair, or to each of its views: bias^y_jl, bias^x_ik. Values per view are stacked as (M, 2, B), with M the larger
number of views, and nan for views that a side does not have. Both sides use one rectangular matrix of scores, with a
row per view of x and a column per view of y; the block of pair i with itself holds its positives, which are not
negatives.

An objective needs two passes. The first one gives each anchor's log mean over views of the sum over negatives,
`log_sums`. From these follow the running averages and a weight a_i per anchor. The second one, `sums`, gives the
gradient of sum_i sum_j w_ij (s_ij - S_i) / b for w_ij = a_i exp(e_ij), and what the updates of zeta (`masses`) and of
temperatures (`moments`) need.

`make_kernel` returns an object with these passes. `SharedKernel` takes one exponential per score and three matrix
products in total. `TiledKernel` is exact at every temperature and needs O(tile x B) memory. It also drops likely false
negatives, the entries with s(x_ik, y_jl) > S_i + margin_i. They
differ between the sides, so these share no exponential.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

KEPT_ELEMENTS = 1 << 24  # at most two B x B buffers are kept, up to B = 4096: 64 MiB each in float32
TILE_ELEMENTS = 1 << 21  # 8 MiB in float32: 128 rows at B = 16384
SHARED_TILE_ELEMENTS = 1 << 19  # 2 MiB in float32: a tile stays in the cache between two operations on it
LOG2_E = math.log2(math.e)


class KernelBatch(NamedTuple):
    """What the kernels need of the global batch. Tensors with one row per side have side x in row 0."""

    x: Tensor  # (B * m_x, d), the views of a pair next to each other
    y: Tensor  # (B * m_y, d)
    views: tuple[int, int]  # m_x, m_y
    bias: Tensor  # (2, B) or per view (M, 2, B), -zeta/tau of each side's candidates: those of y, then those of x
    tau: float | Tensor  # temperature of the anchors: one number, or (2, B)
    ids: Tensor | None  # (B, k): pairs that agree in a column are not negatives of each other; None: only i = j is not
    pairs: slice  # the pairs of this process
    margins: Tensor | None = None  # (B,), entries with s(x_ik, y_jl) - S_i above it are not negatives of anchor i

    @property
    def size(self) -> int:
        """B."""
        return self.bias.shape[-1]

    @property
    def whole(self) -> bool:
        """Whether this process has all pairs."""
        return self.pairs == slice(0, self.size)

    def swapped(self) -> "KernelBatch":
        """Return the batch with its sides exchanged."""
        tau = self.tau if isinstance(self.tau, float) else self.tau.flip(0)
        views = self.views[::-1]
        return KernelBatch(self.y, self.x, views, self.bias.flip(-2), tau, self.ids, self.pairs, self.margins)


class Sums(NamedTuple):
    """Results of the second pass for the b pairs of this process."""

    x: Tensor  # (b * m_x, d), gradient of this process's x
    y: Tensor  # (b * m_y, d), gradient of this process's y
    masses: Tensor | None  # (2, b) or per view (M, 2, b), if requested
    moments: Tensor | None  # (2, b), if requested
    hard: Tensor | None = None  # (b * k, d), gradient of this process's hard negatives


class BatchKernel(Protocol):
    """Two passes over the exponentials of one batch. The constructor does the first one."""

    finite: Tensor | bool  # whether all features are finite; a scalar
    log_sums: Tensor  # (2, b), log sum_{j != i} mean_kl exp(e_ikjl) of this process's anchors

    def sums(
        self,
        log_weight: Tensor,
        log_total: Tensor | None = None,
        moments: bool = False,
    ) -> Sums:
        """Compute the gradient and, on request, masses and moments.

        Args:
            log_weight: log a_i of all anchors, (2, B).
            log_total: log partition functions of all anchors, (2, B), which requests the masses; see `masses`.
            moments: whether to return sum_j w_ij (s_ij - S_i) / tau_i per anchor of this process.

        """

    def masses(self, log_total: Tensor) -> Tensor:
        """Return sum_i mean_kl exp(e_ikjl - log_total_i) per candidate of this process, (2, b).

        With log_total the log partition functions, this is the sum of the probabilities that all other anchors give a
        candidate. If each view has a bias of its own, it is sum_i mean_k exp(e_ikjl - log_total_i), (M, 2, b).
        """


class Workspace:
    """Buffers that are reused from step to step.

    New memory costs one page fault per 4 KiB, which takes longer than the arithmetic on it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(
        self,
        name: str,
        rows: int,
        columns: int,
        like: Tensor,
    ) -> Tensor:
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
                self._kept[name] = kept = torch.empty(
                    rows * columns,
                    dtype=like.dtype,
                    device=like.device,
                )
        return kept.as_strided((rows, columns), (columns, 1))

    def __reduce__(self) -> tuple[type["Workspace"], tuple[()]]:
        return Workspace, ()  # copies and pickles start empty


def make_kernel(
    batch: KernelBatch,
    workspace: Workspace,
    *,
    bounded: bool,
) -> BatchKernel:
    """Choose the faster of the kernels that are exact for this batch.

    Args:
        batch: the global batch.
        workspace: holds buffers of the size of the score matrix, which are reused from step to step.
        bounded: whether each anchor's weight in the second pass is at most a moderate multiple of
            1 / (sum of its exponentials).

    Returns:
        A kernel whose first pass is done.

    """
    small = len(batch.x) * len(batch.y) <= KEPT_ELEMENTS
    one_kernel = isinstance(batch.tau, float) and batch.margins is None  # both sides have the same terms
    # On CPU, reading a value is free and exp is expensive; on an accelerator it is the reverse.
    if bounded and small and batch.whole and one_kernel and batch.x.device.type == "cpu":
        shared = SharedKernel.if_exact(batch, cast(float, batch.tau), workspace)
        if shared is not None:
            return shared
    return TiledKernel(batch, workspace)


# ---------------------------------------------------------------------------------------------------------------------
# Pairs, views and masks
# ---------------------------------------------------------------------------------------------------------------------


def spread(values: Tensor, views: int) -> Tensor:
    """Repeat values per pair, (..., B), for each view: (..., B * views)."""
    return values if views == 1 else values.repeat_interleave(views, dim=-1)


def pool(values: Tensor, views: int) -> Tensor:
    """Sum values per view, (..., B * views), over the views of each pair: (..., B)."""
    return values if views == 1 else values.view(*values.shape[:-1], -1, views).sum(-1)


def stack_views(of_y: Tensor, of_x: Tensor) -> Tensor:
    """Stack values per view of both sides' candidates, (B, m_y) and (B, m_x), as (M, 2, B)."""
    most = max(of_y.shape[1], of_x.shape[1])
    padded = [torch.nn.functional.pad(values, (0, most - values.shape[1]), value=math.nan) for values in (of_y, of_x)]
    return torch.stack(padded).permute(2, 0, 1)


def of_views(
    values: Tensor,
    row: int,
    views: int,
) -> Tensor:
    """Return a row of values per pair, (2, B), or per view, (M, 2, B), for each view: (B * views,)."""
    return spread(values[row], views) if values.ndim == 2 else values[:views, row].T.reshape(-1)


def _as_masses(
    on_y: Tensor,
    on_x: Tensor,
    views: tuple[int, int],
    per_view: bool,
) -> Tensor:
    """Return sums over anchors, one per view and divided by the number of views, in the shape of `masses`."""
    m_x, m_y = views
    if not per_view:
        return torch.stack([pool(on_y, m_y), pool(on_x, m_x)])
    return stack_views(on_y.view(-1, m_y) * m_y, on_x.view(-1, m_x) * m_x)


def mean_of_views(features: Tensor, views: int) -> Tensor:
    """Return the mean over the views of each pair, (B, d), of features (B * views, d)."""
    return features if views == 1 else features.view(-1, views, features.shape[1]).mean(1)


def positive_scores(
    x: Tensor,
    y: Tensor,
    views: tuple[int, int],
) -> Tensor:
    """Return S_i, the mean over both sets of views of s(x_ik, y_il), (B,)."""
    return (mean_of_views(x, views[0]) * mean_of_views(y, views[1])).sum(dim=1)


def _by_pair(matrix: Tensor, views: tuple[int, int]) -> Tensor:
    """View a matrix with a row per view of x and a column per view of y as (pairs, m_x, B, m_y)."""
    m_x, m_y = views
    return matrix.view(len(matrix) // m_x, m_x, matrix.shape[1] // m_y, m_y)


def _positives(
    matrix: Tensor,
    views: tuple[int, int],
    first: int,
) -> Tensor:
    """View the entries of the positives, (..., pairs), in the rows of pairs `first`, `first` + 1, ..."""
    if views == (1, 1):
        return matrix.diagonal(first)
    return _by_pair(matrix, views).diagonal(
        first,
        dim1=0,
        dim2=2,
    )


def is_excluded(
    ids: Tensor,
    pairs: slice,
    workspace: Workspace,
) -> Tensor:
    """Return which pairs are not negatives of each other.

    Args:
        ids: (B, k), one or more ids per pair.
        pairs: the b anchors to look at.
        workspace: holds the result.

    Returns:
        (b, B) bool: True if anchor and candidate agree in a column.

    """
    mine, flag = ids[pairs], ids.new_empty(0, dtype=torch.bool)
    excluded, same = (workspace.take(name, len(mine), len(ids), flag) for name in ("excluded", "same"))
    torch.eq(mine[:, None, 0], ids[:, 0], out=excluded)
    for column in range(1, ids.shape[1]):
        excluded.logical_or_(torch.eq(mine[:, None, column], ids[:, column], out=same))
    return excluded


def _mask(
    matrix: Tensor,
    views: tuple[int, int],
    excluded: Tensor,
    value: float,
) -> None:
    """Write `value` to the entries of excluded pairs, (pairs, B) bool."""
    _by_pair(matrix, views).masked_fill_(excluded[:, None, :, None], value)


# ---------------------------------------------------------------------------------------------------------------------
# One exponential for both sides
# ---------------------------------------------------------------------------------------------------------------------


class SharedKernel:
    """A kernel that uses E = 2^(s log2(e)/tau - shift) for both sides.

    The other terms of an exponent depend only on the row or only on the column. They are applied as one factor per row
    and one factor per column.

    The kernel is exact if neither E nor its products with the factors leave the floating-point range. `if_exact` checks
    this: with h the half-range of the exponents of E, and z that of zeta/tau over both sides, h + 2z must be below 0.85
    of the largest exponent. Let a_i be the factor of anchor i, including its weight, and b_j that of candidate j. Since
    the weights are bounded, a_i b_j is at most a moderate multiple of e^(h + 2z) for every pair of samples, including
    masked ones, and sums over B stay finite.

    Writing to memory that another core has just read can be ten times slower if the cores do not share a cache.
    Therefore all operations between the matrix products use the same tiles, and the weights do not overwrite E.
    """

    def __init__(
        self,
        batch: KernelBatch,
        exponents: Tensor,
        factors: Tensor,
        offsets: Tensor,
        workspace: Workspace,
    ) -> None:
        self.batch, self.workspace = batch, workspace
        self.finite: Tensor | bool = True  # `if_exact` has seen that all scores are finite
        self.factors = factors  # (2, B) or per view (M, 2, B), of the candidates of both sides
        # (B,), log of each pair's anchor factor without its weight, equal on both sides; includes the mean over views
        self.offsets = offsets
        m_x, m_y = batch.views
        self.of_y, self.of_x = of_views(factors, 0, m_y), of_views(factors, 1, m_x)
        along_rows, along_columns = torch.empty_like(self.of_x), torch.empty_like(self.of_y)
        self.kernel = exponents
        for rows in _shared_tiles(*self.kernel.shape):
            tile = self.kernel[rows].exp2_()
            torch.mv(tile, self.of_y, out=along_rows[rows])
            along_columns.addmv_(tile.T, self.of_x[rows], beta=_beta(rows))
        self.totals = torch.stack([pool(along_rows, m_x), pool(along_columns, m_y)])
        self.log_sums = self.totals.log().add_(offsets)

    @classmethod
    def if_exact(
        cls,
        batch: KernelBatch,
        tau: float,
        workspace: Workspace,
    ) -> "SharedKernel | None":
        """Return the kernel of this batch, or None if the range of its exponents is too wide."""
        biases = batch.bias if batch.bias.ndim == 2 else batch.bias[~batch.bias.isnan()]
        least, most = (bound.item() for bound in biases.aminmax())
        center = (least + most) / 2
        allowed = 0.85 * math.log(torch.finfo(batch.x.dtype).max) - (most - least)
        scaled = workspace.take("scores", len(batch.x), len(batch.y), batch.x)
        scaled.addmm_(
            batch.x,
            batch.y.T,
            beta=0,
            alpha=LOG2_E / tau,
        )
        positives = _positives(scaled, batch.views, 0)
        m_x, m_y = batch.views
        scaled_positive = positives if m_x == m_y == 1 else positives.mean(dim=(0, 1))
        offsets = torch.rsub(scaled_positive, center - math.log(m_x * m_y), alpha=1 / LOG2_E)
        positives.copy_(scaled[0, m_y])  # a negative's score: positives are not part of the range
        bounds = [bound.item() for rows in _shared_tiles(*scaled.shape) for bound in scaled[rows].aminmax()]
        if not math.isfinite(sum(bounds)):
            return None
        low, high = min(bounds), max(bounds)
        if not max(high, -low) / LOG2_E <= allowed:
            shift = (high + low) / 2
            if not (high - shift) / LOG2_E <= allowed:
                return None
            scaled.sub_(shift)
            offsets += shift / LOG2_E
        positives.fill_(-math.inf)
        if batch.ids is not None:
            _mask(scaled, batch.views, is_excluded(batch.ids, slice(None), workspace), -math.inf)
        return cls(batch, scaled, (batch.bias - center).exp_(), offsets, workspace)

    def sums(
        self,
        log_weight: Tensor,
        log_total: Tensor | None = None,
        moments: bool = False,
    ) -> Sums:
        """Compute the gradient and, on request, the masses; see `BatchKernel`."""
        assert not moments, "moments need one temperature per anchor; use TiledKernel"
        (m_x, m_y), pairs = self.batch.views, self.batch.size
        weights = torch.exp(self.offsets + log_weight)
        weight_x, weight_y = spread(weights[0], m_x), spread(weights[1], m_y)
        masses = None if log_total is None else _Masses(self, log_total)
        matrix = self.workspace.take("weights", len(self.kernel), self.kernel.shape[1], self.kernel)
        for rows in _shared_tiles(*self.kernel.shape):
            tile, weighted = self.kernel[rows], matrix[rows]
            if masses is not None:
                masses.add(tile, rows)
            torch.mul(weight_x[rows, None], self.of_y, out=weighted)
            weighted.addcmul_(self.of_x[rows, None], weight_y).mul_(tile)
        pull, positives = weights.mul_(self.totals), _positives(matrix, self.batch.views, 0)
        if m_x == m_y == 1:
            positives.sub_(pull[0]).sub_(pull[1])
        else:
            positives.sub_(pull.sum(dim=0) / (m_x * m_y))
        return Sums(
            _product(matrix, self.batch.y, pairs),
            _product(matrix.T, self.batch.x, pairs),
            None if masses is None else masses.result(),
            None,
        )

    def masses(self, log_total: Tensor) -> Tensor:
        """Return the masses of the candidates; see `BatchKernel`."""
        masses = _Masses(self, log_total)
        for rows in _shared_tiles(*self.kernel.shape):
            masses.add(self.kernel[rows], rows)
        return masses.result()


class _Masses:
    """Masses of the candidates of a SharedKernel, summed tile by tile."""

    def __init__(self, kernel: SharedKernel, log_total: Tensor) -> None:
        self._kernel, (self._m_x, self._m_y) = kernel, kernel.batch.views
        scales = torch.exp(kernel.offsets - log_total)
        self._scale_x, self._scale_y = spread(scales[0], self._m_x), spread(scales[1], self._m_y)
        self._on_y, self._on_x = torch.empty_like(kernel.of_y), torch.empty_like(kernel.of_x)

    def add(self, tile: Tensor, rows: slice) -> None:
        self._on_y.addmv_(tile.T, self._scale_x[rows], beta=_beta(rows))
        torch.mv(tile, self._scale_y, out=self._on_x[rows])

    def result(self) -> Tensor:
        factors = self._kernel.factors
        return _as_masses(self._on_y, self._on_x, self._kernel.batch.views, factors.ndim == 3).mul_(factors)


# ---------------------------------------------------------------------------------------------------------------------
# Exponents of each side on their own
# ---------------------------------------------------------------------------------------------------------------------


class TiledKernel:
    """A kernel that computes the exponents of each side separately, in row tiles, with one maximum per log-sum.

    On one process, a tile has its rows as anchors of side x and all columns as anchors of side y. With several
    processes, each one needs its x against all y and its y against all x: the same loop, once per side.
    """

    def __init__(self, batch: KernelBatch, workspace: Workspace) -> None:
        self.batch = batch
        positives = positive_scores(batch.x, batch.y, batch.views)
        # one nan or inf anywhere makes the sum nan or inf
        self.finite: Tensor | bool = positives.sum().isfinite()
        self.blocks = [_Block(batch, positives, workspace, "scores")]
        if not batch.whole:
            self.blocks.append(_Block(batch.swapped(), positives, workspace, "scores of side y"))
        self.log_mean = -math.log(batch.views[0] * batch.views[1])
        self.log_sums = self._log_sums() + self.log_mean

    def _log_sums(self) -> Tensor:
        sums = []
        for block in self.blocks:
            m_row, m_column = block.batch.views
            along_rows, along_columns = [], torch.full_like(block.column_positive, -math.inf)
            for tile in block.tiles():
                along_rows.append(_log_sum_exp_(block.row_exponents(tile), dim=1))
                if self.batch.whole:
                    along_columns = torch.logaddexp(along_columns, _log_sum_exp_(block.column_exponents(tile), dim=0))
            sums.append(_log_pool(torch.cat(along_rows), m_row))
            if self.batch.whole:
                sums.append(_log_pool(along_columns, m_column))
        return torch.stack(sums)

    def sums(
        self,
        log_weight: Tensor,
        log_total: Tensor | None = None,
        moments: bool = False,
    ) -> Sums:
        """Compute the gradient and, on request, masses and moments; see `BatchKernel`."""
        pull = (log_weight[:, self.batch.pairs] + self.log_sums).exp_().sum(dim=0)
        log_weight = log_weight + self.log_mean
        masses = None if log_total is None else log_total - self.log_mean
        first = self.blocks[0].sums(pull, log_weight, masses, moments)
        if self.batch.whole:
            return first
        # the second block has the sides swapped; only the rows of a block are complete
        second = self.blocks[1].sums(pull, log_weight.flip(0), None if masses is None else masses.flip(0), moments)
        both = torch.stack
        return Sums(
            first.x,
            second.x,
            None if first.masses is None or second.masses is None else _of_rows(second.masses, first.masses),
            None if first.moments is None or second.moments is None else both([first.moments[0], second.moments[0]]),
        )

    def masses(self, log_total: Tensor) -> Tensor:
        """Return the masses of the candidates; see `BatchKernel`."""
        log_total = log_total - self.log_mean
        if self.batch.whole:
            return self.blocks[0].masses(log_total)
        return _of_rows(self.blocks[1].masses(log_total.flip(0)), self.blocks[0].masses(log_total))


def _of_rows(second: Tensor, first: Tensor) -> Tensor:
    """Return the masses of both sides from those of the rows of each block, which are complete."""
    return torch.stack([second[..., 1, :], first[..., 1, :]], dim=-2)


class _Tile(NamedTuple):
    pairs: slice  # of the global batch
    rows: slice  # of all x
    local: slice  # of this process's x
    scores: Tensor  # (rows, B * m_y); must not be overwritten
    excluded: Tensor | None  # (pairs, B) bool, pairs that share an id


class _Block:
    """Scores of this process's x against all y. Small ones are kept, large ones are recomputed in each pass.

    Rows are anchors of side x and candidates of side y; columns are the reverse. Columns are complete only if this
    process has all pairs.
    """

    def __init__(
        self,
        batch: KernelBatch,
        positives: Tensor,
        workspace: Workspace,
        name: str,
    ) -> None:
        self.batch, self.workspace, self.name = batch, workspace, name
        m_x, m_y = batch.views
        tau = batch.tau if isinstance(batch.tau, Tensor) else batch.bias.new_full((2, batch.size), batch.tau)
        self.row_positive, self.column_positive = spread(positives, m_x), spread(positives, m_y)
        self.row_tau, self.column_tau = spread(tau[0], m_x), spread(tau[1], m_y)
        self.row_bias, self.column_bias = of_views(batch.bias, 1, m_x), of_views(batch.bias, 0, m_y)  # as candidates
        margins = batch.margins
        self.row_margin = None if margins is None else spread(margins, m_x)
        self.column_margin = None if margins is None else spread(margins, m_y)
        rows = slice(batch.pairs.start * m_x, batch.pairs.stop * m_x)
        self.start, self.count = rows.start, rows.stop - rows.start
        self.kept = self._scores(rows) if self.count * len(batch.y) <= KEPT_ELEMENTS else None

    def tiles(self) -> Iterator[_Tile]:
        """Iterate over the rows of this process in tiles of whole pairs."""
        m_x = self.batch.views[0]
        for pairs in score_tiles(self.batch.pairs, m_x * len(self.batch.y)):
            rows = slice(pairs.start * m_x, pairs.stop * m_x)
            local = slice(rows.start - self.start, rows.stop - self.start)
            scores = self._scores(rows) if self.kept is None else self.kept[local]
            ids = self.batch.ids
            yield _Tile(pairs, rows, local, scores, None if ids is None else is_excluded(ids, pairs, self.workspace))

    def _scores(self, rows: slice) -> Tensor:
        x, y = self.batch.x[rows], self.batch.y
        return torch.mm(x, y.T, out=self.workspace.take(self.name, len(x), len(y), y))

    def row_exponents(self, tile: _Tile) -> Tensor:
        """Return e^x with rows as anchors, in a buffer."""
        exponents = torch.sub(tile.scores, self.row_positive[tile.rows, None], out=self._like("rows", tile.scores))
        dropped = self._dropped(exponents, None if self.row_margin is None else self.row_margin[tile.rows, None])
        exponents.div_(self.row_tau[tile.rows, None]).add_(self.column_bias)
        return self._negatives_only(exponents, tile, dropped)

    def column_exponents(self, tile: _Tile) -> Tensor:
        """Return e^y with columns as anchors, in a buffer."""
        exponents = torch.sub(tile.scores, self.column_positive, out=self._like("columns", tile.scores))
        dropped = self._dropped(exponents, self.column_margin)
        exponents.div_(self.column_tau).add_(self.row_bias[tile.rows, None])
        return self._negatives_only(exponents, tile, dropped)

    def _dropped(self, differences: Tensor, margins: Tensor | None) -> Tensor | None:
        """Return where s - S of the anchor exceeds the margin, in a buffer; None without a margin."""
        if margins is None:
            return None
        flag = differences.new_empty(0, dtype=torch.bool)
        rows, columns = differences.shape
        return torch.gt(differences, margins, out=self.workspace.take("dropped", rows, columns, flag))

    def _negatives_only(
        self,
        exponents: Tensor,
        tile: _Tile,
        dropped: Tensor | None,
    ) -> Tensor:
        # the lowest finite number instead of -inf: its exponential is 0 as well, and 0 times it is 0, not nan
        lowest, views = torch.finfo(exponents.dtype).min, self.batch.views
        _positives(exponents, views, tile.pairs.start).fill_(lowest)
        if tile.excluded is not None:
            _mask(exponents, views, tile.excluded, lowest)
        return exponents if dropped is None else exponents.masked_fill_(dropped, lowest)

    def sums(
        self,
        pull: Tensor,
        log_weight: Tensor,
        log_total: Tensor | None,
        moments: bool,
    ) -> Sums:
        """Compute the sums of `BatchKernel.sums` over this block; `pull` is the total weight of each pair, (b,)."""
        (m_x, m_y), whole, b = self.batch.views, self.batch.whole, len(pull)
        x, y, new = self.batch.x, self.batch.y, pull.new_zeros
        row_weight, column_weight = spread(log_weight[0], m_x), spread(log_weight[1], m_y)
        grad_x, grad_y = new(self.count, x.shape[1]), new(len(y) if whole else 0, x.shape[1])
        row_moments, column_moments = new(self.count), new(len(y))
        on_rows, on_columns = new(self.count), new(len(y))
        # probability / weight; it is <= 1 if xi bounds zeta, since the total includes the positive's exp(-zeta/tau)
        row_ratio = column_ratio = None
        if log_total is not None:
            ratio = (log_total + log_weight).neg_().exp_().clamp_(max=torch.finfo(log_total.dtype).max)
            row_ratio, column_ratio = spread(ratio[0], m_x), spread(ratio[1], m_y)
        for tile in self.tiles():
            exponents = self.row_exponents(tile)
            weights = torch.add(
                exponents,
                row_weight[tile.rows, None],
                out=self._like("weights", tile.scores) if moments else exponents,
            ).exp_()
            if moments:  # without the bias, which does not depend on the anchor's temperature
                row_moments[tile.local] = exponents.mul_(weights).sum(dim=1) - weights.mv(self.column_bias)
            if row_ratio is not None and whole:
                on_columns += weights.T.mv(row_ratio[tile.rows])
            exponents = self.column_exponents(tile)
            others = torch.add(
                exponents, column_weight, out=self._like("other weights", tile.scores) if moments else exponents
            ).exp_()
            if moments and whole:
                column_moments += exponents.mul_(others).sum(dim=0) - others.T.mv(self.row_bias[tile.rows])
            if column_ratio is not None:
                on_rows[tile.local] = others.mv(column_ratio)
            weights += others
            own = pull[tile.pairs.start - self.batch.pairs.start : tile.pairs.stop - self.batch.pairs.start]
            _positives(weights, self.batch.views, tile.pairs.start).sub_(own / (m_x * m_y))
            grad_x[tile.local].addmm_(
                weights,
                y,
                beta=0,
                alpha=1 / b,
            )
            if whole:
                grad_y.addmm_(weights.T, x[tile.rows], alpha=1 / b)
        masses = None if log_total is None else self._per_candidate(on_columns, on_rows)
        return Sums(grad_x, grad_y, masses, self._per_anchor(row_moments, column_moments) if moments else None)

    def masses(self, log_total: Tensor) -> Tensor:
        """Return the masses of the candidates; those of the columns, row 0, only if this process has all pairs."""
        m_x, m_y = self.batch.views
        row_total, column_total = spread(log_total[0], m_x), spread(log_total[1], m_y)
        on_rows, on_columns = row_total.new_zeros(self.count), row_total.new_zeros(len(self.batch.y))
        for tile in self.tiles():
            if self.batch.whole:
                on_columns += self.row_exponents(tile).sub_(row_total[tile.rows, None]).exp_().sum(dim=0)
            on_rows[tile.local] = self.column_exponents(tile).sub_(column_total).exp_().sum(dim=1)
        return self._per_candidate(on_columns, on_rows)

    def _per_candidate(self, on_columns: Tensor, on_rows: Tensor) -> Tensor:
        m_y = self.batch.views[1]
        own = on_columns[self.batch.pairs.start * m_y : self.batch.pairs.stop * m_y]
        return _as_masses(own, on_rows, self.batch.views, self.batch.bias.ndim == 3)

    def _per_anchor(self, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        m_x, m_y = self.batch.views
        return torch.stack([pool(of_rows, m_x), pool(of_columns, m_y)[self.batch.pairs]])

    def _like(self, name: str, tile: Tensor) -> Tensor:
        return self.workspace.take(name, tile.shape[0], tile.shape[1], tile)


# ---------------------------------------------------------------------------------------------------------------------
# Tiles and sums
# ---------------------------------------------------------------------------------------------------------------------


def _beta(rows: slice) -> int:
    """Return the factor of the old sum when this tile is added: 0 for the first tile, else 1."""
    return int(rows.start > 0)


def _product(
    weights: Tensor,
    features: Tensor,
    pairs: int,
) -> Tensor:
    """Return weights @ features / pairs."""
    return features.new_empty(len(weights), features.shape[1]).addmm_(
        weights,
        features,
        beta=0,
        alpha=1 / pairs,
    )


def score_tiles(rows: slice, columns: int) -> Iterator[slice]:
    """Split rows of a matrix with this many columns into tiles of a few MiB."""
    tiles = _tiles(rows.stop - rows.start, TILE_ELEMENTS // columns)
    return (slice(rows.start + tile.start, rows.start + tile.stop) for tile in tiles)


def _shared_tiles(rows: int, columns: int) -> Iterator[slice]:
    return _tiles(rows, SHARED_TILE_ELEMENTS // columns)


def _tiles(total: int, size: int) -> Iterator[slice]:
    size = max(size, 1)
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _log_sum_exp_(exponents: Tensor, dim: int) -> Tensor:
    """Return log sum exp along `dim`, overwriting the exponents; -inf if all terms are excluded."""
    largest = exponents.amax(dim, keepdim=True)
    sums = exponents.sub_(largest).exp_().sum(dim)
    none = largest.squeeze(dim) == torch.finfo(exponents.dtype).min
    return torch.where(none, -math.inf, sums.log_() + largest.squeeze(dim))


def _log_pool(values: Tensor, views: int) -> Tensor:
    """Return log sum exp over the views of each pair."""
    return values if views == 1 else values.view(-1, views).logsumexp(dim=1)
