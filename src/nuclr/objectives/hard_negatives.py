"""Hard negatives: candidates that were mined for each anchor, next to the other pairs of the batch.

Pair i has k hard negatives h_i1 .. h_ik. They are candidates of side x only (documents that are near to the query x_i,
and not its answer); side y, whose candidates are x, does not see them. As with MultipleNegativesRankingLoss of
sentence-transformers, an anchor sees those of the whole global batch, its own and those of the other pairs.

Objectives without state add them to the candidates of the batch: `clip` takes the cross-entropy over B + B k scores.

The stateful objectives estimate a sum over a population. With hard negatives the population of anchor i consists of the
y_j of the n - 1 other pairs, which count exp((s_ij - s_ii)/tau_i - zeta_j/tau) as before, and of the hard negatives of
all n pairs, which count e_il = sum_t exp((s(x_i, h_lt) - s_ii)/tau_i - zeta_h/tau). Each visit of pair i brings its own
hard negatives: this part of the sum is known, so they count once. Those of the other pairs come with their pairs, a
uniform sample of c_i among n - 1, so they have the same factor as the y_j of these pairs:

    phi_i = (n-1)/c_i sum_{j != i} exp((s_ij - s_ii)/tau_i - zeta_j/tau)  +  e_ii  +  (n-1)/c_i sum_{l != i} e_il

This is unbiased for the sum over the population, however the hard negatives were mined, as long as those of a pair stay
the same. If they are drawn again at each visit, k of a longer list, the sum is that over the expected draw: the longer
list with the probability of each draw as its weight. A hard negative that is also the y_j of a pair is in the
population once for each time it is listed.

They have no state. zeta_h is the initial zeta of the table, that of a candidate which was never visited, or the
prediction of the network for `popularity="network"`. The probability that anchors give to them is missing in the column
sums of the y_j, whose mean is then below 1. `nuclr` with "unbiased" steps keeps the mean of zeta, and only the
differences between candidates matter; with "paper", all zeta drift down together.

Masks: the hard negatives of pair l are masked for anchor i when y_l is (the pairs share an id); an anchor always keeps
its own. With `negative_id`, a hard negative with the id of y_i is not in the population of anchor i, whoever brings it:
what was mined for one query may be the answer to another. Without these ids, an answer counts as its own negative.
`false_negative_margin` applies to each of them. An anchor whose pairs are all masked contributes nothing to the
stateful objectives, since the sum over the other pairs cannot be estimated.

Relations: without hard negatives, all formulas are those of `stateful`. With zeta = 0, if y_i itself is the one hard
negative of each pair, phi_i becomes 2 phi_i + 1.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.objectives.kernels import (
    BatchKernel,
    KernelBatch,
    Sums,
    _log_pool,
    _log_sum_exp_,
    mean_of_views,
    pool,
    positive_scores,
    score_tiles,
    spread,
)


class HardNegativesKernel:
    """A `BatchKernel` that adds the hard negatives of the batch to the candidates of side x.

    The exponents of an anchor's own hard negatives are lowered by its log((n-1)/c_i), which is added to all of them.

    Args:
        kernel: the kernel of the pairs.
        batch: the pairs.
        hard: (B * k, d), the hard negatives of all pairs.
        bias: -zeta_h/tau: one number, or (B * k,).
        log_scale: log((n-1)/c_i): one number, or (B,).
        excluded: from anchors and the pairs that own the hard negatives to the mask, `GatheredBatch.excluded_hard`.

    """

    def __init__(
        self,
        kernel: BatchKernel,
        batch: KernelBatch,
        hard: Tensor,
        bias: float | Tensor,
        log_scale: float | Tensor,
        excluded: Callable[[slice, slice], Tensor | None],
    ) -> None:
        self.kernel = kernel
        self.finite = kernel.finite
        self.excluded = excluded
        self.batch = batch
        self.hard = hard
        self.bias = torch.as_tensor(bias, dtype=hard.dtype, device=hard.device).expand(len(hard))
        self.per_pair = len(hard) // batch.size
        self.everyone = slice(0, batch.size)
        tau = batch.tau[0] if isinstance(batch.tau, Tensor) else hard.new_tensor(batch.tau)
        self.tau = tau.expand(batch.size)
        self.log_scale = torch.as_tensor(log_scale, dtype=hard.dtype, device=hard.device).expand(batch.size)
        self.positives = positive_scores(batch.x, batch.y, batch.views)
        sums = [_log_sum_exp_(exponents, dim=1) for _, exponents in self._tiles(batch.pairs, self.everyone)]
        # (b,), log of the mean over views of the sum over hard negatives
        self.log_hard = _log_pool(torch.cat(sums), batch.views[0]) - math.log(batch.views[0])
        of_x = torch.logaddexp(kernel.log_sums[0], self.log_hard)
        self.log_sums = torch.stack([of_x, kernel.log_sums[1]])

    def sums(
        self,
        log_weight: Tensor,
        log_total: Tensor | None = None,
        moments: bool = False,
    ) -> Sums:
        """Compute the gradient and, on request, masses and moments; see `BatchKernel`."""
        result = self.kernel.sums(log_weight, log_total, moments)
        pairs = self.batch.pairs
        b = pairs.stop - pairs.start
        m_x, m_y = self.batch.views
        hard_gradient = self.hard.new_zeros(b * self.per_pair, self.hard.shape[1])
        for tile, weights in self._weights(pairs, self.everyone, log_weight):
            local = slice((tile.start - pairs.start) * m_x, (tile.stop - pairs.start) * m_x)
            result.x[local].addmm_(weights, self.hard, alpha=1 / b)
            if self.batch.whole:
                hard_gradient.addmm_(weights.T, self._rows_of_x(tile), alpha=1 / b)
            if result.moments is not None:
                moment = (weights * self._scaled(tile, self.everyone)).sum(dim=1)
                result.moments[0, tile.start - pairs.start : tile.stop - pairs.start] += pool(moment, m_x)
        if not self.batch.whole:
            for tile, weights in self._weights(self.everyone, pairs, log_weight):
                hard_gradient.addmm_(weights.T, self._rows_of_x(tile), alpha=1 / b)
        pull = torch.exp(log_weight[0, pairs] + self.log_hard)[:, None] / b
        result.x.sub_((pull * mean_of_views(self.batch.y, m_y)[pairs] / m_x).repeat_interleave(m_x, dim=0))
        result.y.sub_((pull * mean_of_views(self.batch.x, m_x)[pairs] / m_y).repeat_interleave(m_y, dim=0))
        return result._replace(hard=hard_gradient)

    def masses(self, log_total: Tensor) -> Tensor:
        """Return the masses of the candidates that belong to pairs; see `BatchKernel`."""
        return self.kernel.masses(log_total)

    def bias_moment(self, log_weight: Tensor) -> Tensor:
        """Return sum_i sum_h w_ih (-zeta_h/tau) over the hard negatives h and all anchors."""
        tiles = self._weights(self.batch.pairs, self.everyone, log_weight)
        local = torch.stack([weights.mv(self.bias).sum() for _, weights in tiles]).sum()
        return distributed.sum_over_processes(local)

    def _weights(
        self,
        anchors: slice,
        owners: slice,
        log_weight: Tensor,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over tiles of w_ih, divided by the number of views of x."""
        m_x = self.batch.views[0]
        for tile, exponents in self._tiles(anchors, owners):
            yield tile, exponents.add_(spread(log_weight[0, tile] - math.log(m_x), m_x)[:, None]).exp_()

    def _tiles(self, anchors: slice, owners: slice) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over tiles of the exponents of these pairs' x and the hard negatives of the pairs `owners`."""
        m_x = self.batch.views[0]
        lowest = torch.finfo(self.hard.dtype).min
        numbers = torch.arange(self.batch.size, device=self.hard.device)
        columns = (owners.stop - owners.start) * self.per_pair
        for tile in score_tiles(anchors, m_x * columns):
            scaled = self._scaled(tile, owners)
            exponents = scaled + self.bias[owners.start * self.per_pair : owners.stop * self.per_pair]
            by_pair = exponents.view(tile.stop - tile.start, m_x, owners.stop - owners.start, self.per_pair)
            own = numbers[tile, None] == numbers[owners]
            by_pair.sub_((own * self.log_scale[tile, None])[:, None, :, None])
            excluded = self.excluded(tile, owners)
            if excluded is not None:
                by_pair.masked_fill_(excluded[:, None], lowest)
            if self.batch.margins is not None:
                limits = spread(self.batch.margins[tile] / self.tau[tile], m_x)
                exponents.masked_fill_(scaled > limits[:, None], lowest)
            yield tile, exponents

    def _scaled(self, tile: slice, owners: slice) -> Tensor:
        """Return (s - S_i)/tau_i of these pairs' x and the hard negatives of the pairs `owners`."""
        m_x = self.batch.views[0]
        hard = self.hard[owners.start * self.per_pair : owners.stop * self.per_pair]
        differences = self._rows_of_x(tile) @ hard.T - spread(self.positives[tile], m_x)[:, None]
        return differences.div_(spread(self.tau[tile], m_x)[:, None])

    def _rows_of_x(self, tile: slice) -> Tensor:
        m_x = self.batch.views[0]
        return self.batch.x[tile.start * m_x : tile.stop * m_x]
