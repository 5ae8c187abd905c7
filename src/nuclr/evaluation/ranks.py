"""Where each query's best partner stands in the gallery, with equal scores counted fairly.

Scores s_ij = <q_i, g_j> - bias_j; partners R_i of query i, at least one; b_i = max_{j in R_i} s_ij. All that recall and
ranks need is how many candidates stand above b_i (all of them wrong), and how many wrong and right ones stand on it: a
random order of the tied ones then has an expected hit and an expected rank in closed form, so that a collapsed model,
whose scores are all the same, has chance level and not 100 %. Made tile by tile: 100,000 x 100,000 scores never exist.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 2**22  # scores at a time; more is slower, for they leave the caches


@dataclass(frozen=True)
class Ranks:
    """One entry a query that has a partner; all (n,), int64.

    query     row of the query
    above     candidates with a higher score than its best partner
    tied      wrong candidates with the same score
    own       partners with the same score, the best one among them
    partners  partners in all
    gallery   number of candidates (a plain int)
    """

    query: Tensor
    above: Tensor
    tied: Tensor
    own: Tensor
    partners: Tensor
    gallery: int

    def __len__(self) -> int:
        """Number of queries."""
        return len(self.query)

    def hits(self, k: int) -> Tensor:
        """(n,) float64: probability that a partner is among the first k; 0 or 1 where nothing is tied."""
        return within(k - self.above, self.tied, self.own)

    def chance(self, k: int) -> Tensor:
        """(n,) float64: the same for a random ranking."""
        return within(torch.full_like(self.partners, k), self.gallery - self.partners, self.partners)

    def expected(self) -> Tensor:
        """(n,) float64: expected rank of the best partner, 1 for the first place.

        Of t wrong ones in a random order with o right ones, t / (o + 1) stand before the first right one on average.
        """
        return 1 + self.above + self.tied / (self.own + 1).double()


def ranks(queries: Tensor, gallery: Tensor, links: Tensor, bias: Tensor | None = None) -> Ranks:
    """Ranks from features.

    Args:
        queries: (n_queries, d).
        gallery: (n_gallery, d).
        links: (n, 2), rows (query, partner in the gallery); queries without a partner are left out.
        bias: (n_gallery,), subtracted from the scores, such as the popularity of the candidates.

    """
    queries, gallery = (side.float() if side.dtype.itemsize < 4 else side for side in (queries, gallery))
    for name, side in (("queries", queries), ("gallery", gallery)):
        if not side.isfinite().all():
            row = int((~side.isfinite().all(dim=1)).nonzero()[0])
            raise ValueError(f"{name}: row {row} holds a NaN or an infinity, which has no rank")
    return _ranks(lambda rows: queries[rows] @ gallery.T, len(queries), len(gallery), links, bias)


def ranks_of_scores(scores: Tensor, links: Tensor, bias: Tensor | None = None) -> Ranks:
    """The same from a matrix of scores (n_queries, n_gallery)."""
    if scores.isnan().any():
        raise ValueError("scores hold a NaN, which has no rank")
    scores = scores if scores.is_floating_point() else scores.double()
    return _ranks(lambda rows: scores[rows], scores.shape[0], scores.shape[1], links, bias)


@torch.no_grad()
def _ranks(
    scores_of: Callable[[Tensor], Tensor], n_queries: int, n_gallery: int, links: Tensor, bias: Tensor | None
) -> Ranks:
    _check(links, n_queries, n_gallery, bias)
    links = torch.unique(links, dim=0)  # by query, so that a tile's links lie together
    asked, count = torch.unique_consecutive(links[:, 0], return_counts=True)
    rows_a_tile = max(1, TILE // n_gallery)
    # Made before the loop: what each tile leaves behind would pin the heap, which then grows by a tile at a time.
    found = links.new_empty(3, len(asked))
    for rows, counts, right, outcome in zip(
        asked.split(rows_a_tile),
        count.split(rows_a_tile),
        links[:, 1].split([int(part.sum()) for part in count.split(rows_a_tile)]),
        found.split(rows_a_tile, dim=1),
        strict=True,
    ):
        scores = scores_of(rows)
        if bias is not None:
            scores -= bias.to(scores)  # in place: they are this tile's own
        row = torch.repeat_interleave(torch.arange(len(rows), device=links.device), counts)
        partner = scores[row, right]
        best = partner.new_full((len(rows),), -torch.inf).scatter_reduce(0, row, partner, "amax")
        above = (scores > best[:, None]).sum(dim=1, dtype=torch.int32).long()  # int32: twice as fast
        level = (scores == best[:, None]).sum(dim=1, dtype=torch.int32).long()
        own = torch.zeros_like(level).index_add(0, row, (partner == best[row]).long())
        outcome.copy_(torch.stack([above, level - own, own]))
    above, tied, own = found
    return Ranks(asked, above, tied, own, count, n_gallery)


def _check(links: Tensor, n_queries: int, n_gallery: int, bias: Tensor | None) -> None:
    if links.ndim != 2 or links.shape[1] != 2 or len(links) == 0:
        raise ValueError(f"links has shape {tuple(links.shape)}; needs (n, 2), rows (query, partner), at least one")
    for column, size, name in ((0, n_queries, "queries"), (1, n_gallery, "gallery")):
        low, high = (int(end) for end in links[:, column].aminmax())
        if low < 0 or high >= size:
            raise ValueError(f"links names row {high if high >= size else low} of the {name}, which has {size}")
    if bias is not None and bias.shape != (n_gallery,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; needs ({n_gallery},), one for each candidate")


def within(places: Tensor, wrong: Tensor, right: Tensor) -> Tensor:
    """Probability that one of `right` is among the first `places` of a random order of right and wrong ones, float64.

    The first i of the order are all wrong with probability prod_{j < i} (wrong - j) / (wrong + right - j).
    """
    miss = torch.ones(places.shape, dtype=torch.float64, device=places.device)
    for j in range(int(places.max().clamp(min=0))):
        left = (wrong - j).clamp(min=0).double() / (wrong + right - j).clamp(min=1)
        miss = torch.where(places > j, miss * left, miss)
    return 1 - miss
