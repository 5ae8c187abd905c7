"""Rank of each query's best partner in a gallery; ties count with their expectation over random orders.

Scores are s_ij = <q_i, g_j> - bias_j. R_i is the set of partners of query i and b_i = max_{j in R_i} s_ij is the score
of its best partner. Recall and ranks only need three counts per query: the candidates with a score above b_i (all of
them wrong), the wrong candidates with a score of exactly b_i, and the partners with a score of exactly b_i. For a
random order of the tied candidates, the expected hit and the expected rank have a closed form. A collapsed model, which
gives all candidates the same score, therefore gets the chance level and not 100 %.

Scores are computed tile by tile: a 100,000 x 100,000 matrix is never held in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr.arrays import (
    Array,
    Features,
    Integers,
    Vector,
    as_features,
    as_links,
    as_tensor,
    as_vector,
    describe,
)

TILE = 2**22  # scores per tile; larger tiles no longer fit into the caches and are slower


@dataclass(frozen=True, repr=False)
class Ranks:
    """Counts from which hits and ranks follow: one entry per query that has a partner, all (n,) int64.

    Attributes:
        query: Row of the query.
        above: Number of candidates with a higher score than the best partner.
        tied: Number of wrong candidates with the same score as the best partner.
        own: Number of partners with the same score as the best partner, itself included.
        partners: Number of partners.
        gallery: Number of candidates (an int).

    """

    query: Tensor
    above: Tensor
    tied: Tensor
    own: Tensor
    partners: Tensor
    gallery: int

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self.query)

    def __repr__(self) -> str:
        """Return one line with the sizes and two headline values."""
        recall = float(self.hits(1).mean())
        rank = float(self.expected().mean())
        return f"Ranks(queries={len(self)}, gallery={self.gallery}, recall@1={recall:.4g}, mean_rank={rank:.4g})"

    def hits(self, k: int) -> Tensor:
        """Return the probability that a partner is among the first k, (n,) float64; 0 or 1 if nothing is tied."""
        return hit_probability(k - self.above, self.tied, self.own)

    def chance(self, k: int) -> Tensor:
        """Return the same probability for a random ranking, (n,) float64."""
        return hit_probability(torch.full_like(self.partners, k), self.gallery - self.partners, self.partners)

    def expected(self) -> Tensor:
        """Return the expected rank of the best partner, (n,) float64; the first rank is 1.

        In a random order of t wrong and o right candidates, t / (o + 1) wrong ones precede the first right one on
        average.
        """
        return 1 + self.above + self.tied / (self.own + 1).double()


def query_ranks(
    queries: Features,
    gallery: Features,
    links: Integers,
    bias: Vector | None = None,
) -> Ranks:
    """Rank the gallery for each query by inner product and return the rank of its best partner.

    Features are used as they are: normalize them first if you want cosine similarity.

    Args:
        queries: Features of the queries, (n_queries, d).
        gallery: Features of the candidates, (n_gallery, d).
        links: Rows (query, partner in the gallery), (n, 2). Queries without a partner are left out.
        bias: Subtracted from the scores of each candidate, (n_gallery,), for example its popularity.

    Returns:
        One entry per query that has a partner.

    Raises:
        ValueError: If a shape or type is wrong, a feature is not finite, or `links` names a row that does not exist.

    Example:
        >>> import torch
        >>> x = torch.eye(3)
        >>> ranks = query_ranks(x, x[[1, 0, 2]], [[0, 0], [1, 1], [2, 2]])
        >>> ranks.hits(1).tolist()
        [0.0, 0.0, 1.0]
        >>> ranks
        Ranks(queries=3, gallery=3, recall@1=0.3333, mean_rank=2)

    """
    features_q = as_features("queries", queries, "any")
    features_g = as_features(
        "gallery",
        gallery,
        "any",
        width=features_q.shape[1],
    )
    return _ranks(lambda rows: features_q[rows] @ features_g.T, len(features_q), len(features_g), links, bias)


def query_ranks_from_scores(
    scores: Array,
    links: Integers,
    bias: Vector | None = None,
) -> Ranks:
    """Return the rank of each query's best partner from a matrix of scores.

    Args:
        scores: (n_queries, n_gallery), higher is better. Infinite values are allowed, NaN is not.
        links: Rows (query, partner in the gallery), (n, 2).
        bias: Subtracted from the scores of each candidate, (n_gallery,).

    Returns:
        One entry per query that has a partner.

    Raises:
        ValueError: If a shape or type is wrong, a score is NaN, or `links` names a row that does not exist.

    Example:
        >>> import numpy as np
        >>> query_ranks_from_scores(np.array([[0.9, 0.1, 0.5]]), [[0, 2]]).expected().tolist()
        [2.0]

    """
    matrix = as_tensor("scores", scores)
    if matrix.ndim != 2 or bool(matrix.isnan().any()):
        raise ValueError(f"scores is {describe(matrix)}; needs (n_queries, n_gallery) without NaN")
    matrix = matrix if matrix.is_floating_point() else matrix.double()
    return _ranks(lambda rows: matrix[rows], matrix.shape[0], matrix.shape[1], links, bias)


@torch.no_grad()
def _ranks(
    scores_of: Callable[[Tensor], Tensor],
    n_queries: int,
    n_gallery: int,
    links: Integers,
    bias: Vector | None,
) -> Ranks:
    subtracted = None if bias is None else as_vector("bias", bias, n_gallery)
    # Sorted by query, so that the links of a tile are consecutive.
    sorted_links = torch.unique(as_links("links", links, n_queries, n_gallery, ("queries", "gallery")), dim=0)
    query, partners = torch.unique_consecutive(sorted_links[:, 0], return_counts=True)
    rows_per_tile = max(1, TILE // n_gallery)
    # Allocated before the loop: small results allocated per tile would fragment the heap, which then grows by a tile.
    counts = sorted_links.new_empty(3, len(query))
    for rows, partner_counts, right, out in zip(
        query.split(rows_per_tile),
        partners.split(rows_per_tile),
        sorted_links[:, 1].split([int(part.sum()) for part in partners.split(rows_per_tile)]),
        counts.split(rows_per_tile, dim=1),
        strict=True,
    ):
        scores = scores_of(rows)
        if subtracted is not None:
            scores -= subtracted.to(scores)  # in place: indexing by `rows` has made a copy
        row = torch.repeat_interleave(torch.arange(len(rows), device=sorted_links.device), partner_counts)
        partner = scores[row, right]
        best = partner.new_full((len(rows),), -torch.inf).scatter_reduce(
            0,
            row,
            partner,
            "amax",
        )
        above = (scores > best[:, None]).sum(dim=1, dtype=torch.int32).long()  # int32 is twice as fast as int64
        level = (scores == best[:, None]).sum(dim=1, dtype=torch.int32).long()
        own = torch.zeros_like(level).index_add(0, row, (partner == best[row]).long())
        out.copy_(torch.stack([above, level - own, own]))
    above, tied, own = counts
    return Ranks(query, above, tied, own, partners, n_gallery)


def hit_probability(
    k: Tensor,
    wrong: Tensor,
    right: Tensor,
) -> Tensor:
    """Return the probability that a right candidate is among the first k of a random order.

    The first i candidates of the order are all wrong with probability prod_{j < i} (wrong - j) / (wrong + right - j).

    Args:
        k: Length of the list, (n,) integers; zero or less gives probability 0.
        wrong: Number of wrong candidates, (n,) integers.
        right: Number of right candidates, (n,) integers.

    Returns:
        (n,) float64.

    Example:
        >>> hit_probability(torch.tensor([1, 2]), torch.tensor([3, 3]), torch.tensor([1, 1])).tolist()
        [0.25, 0.5]

    """
    miss = torch.ones(
        k.shape,
        dtype=torch.float64,
        device=k.device,
    )
    for j in range(int(k.max().clamp(min=0))):
        left = (wrong - j).clamp(min=0).double() / (wrong + right - j).clamp(min=1)
        miss = torch.where(k > j, miss * left, miss)
    return 1 - miss


def rank_correlation(a: Array, b: Array) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank.

    Args:
        a: (n,) numbers.
        b: (n,) numbers.

    Returns:
        A number in [-1, 1], or NaN if one of the two is constant.

    Raises:
        ValueError: If `a` and `b` are not vectors of one length, or a number is not finite.

    Example:
        >>> import numpy as np
        >>> rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([1.0, 8.0, 27.0]))
        1.0

    """
    first = as_vector("a", a, len(a)).cpu()
    second = as_vector("b", b, len(a)).cpu()
    ranks = torch.stack([_mean_ranks(first), _mean_ranks(second)])
    if bool((ranks == ranks[:, :1]).all(dim=1).any()):
        return float("nan")
    return torch.corrcoef(ranks)[0, 1].item()


def _mean_ranks(values: Tensor) -> Tensor:
    _, inverse, count = torch.unique(
        values,
        return_inverse=True,
        return_counts=True,
    )
    last = torch.cumsum(count, dim=0)
    return (last - (count - 1).double() / 2)[inverse]
