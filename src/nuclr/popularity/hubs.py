"""Exact search, and its hubness: how unequally often the items of a gallery are found.

N_k of an item is the number of queries that have it among their first k. Its mean is k n_queries / n_gallery. A *hub*
has an N_k far above the mean; an item with N_k = 0 is never found. The skewness of N_k over the gallery is the usual
measure of hubness (Radovanović et al., "Hubs in space", 2010): 0 for a symmetric distribution, large if there are hubs.

Random results are not even either. If each query finds k items at random, N_k is binomial with n_queries trials of
probability k / n_gallery, and its skewness is about 1 / sqrt(mean): 0.2 if items are found 20 times on average, but 3
if they are found 0.1 times. So compare each measure with its value by chance (`chance_hubness`).

Scores are computed in tiles, and only k results per query are kept. The gallery may be a memory-mapped array: it is
read in blocks of rows, once per block of queries.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nuclr.arrays import (
    NORMALIZE,
    Features,
    Integers,
    Norms,
    Vector,
    as_integers,
    as_links,
    as_rows,
    as_vector,
)

# Rows of a tile: 128 MiB of float32 scores
QUERY_ROWS = 2048
GALLERY_ROWS = 16_384


@torch.no_grad()
def nearest(
    queries: Features,
    gallery: Features,
    k: int,
    bias: Vector | None = None,
    exclude: Integers | None = None,
    *,
    normalize: bool = False,
    hint: str = NORMALIZE,
) -> tuple[Tensor, Tensor]:
    """Find the k candidates with the highest score minus bias for every query.

    Args:
        queries: Features, (n_queries, d), unit norm.
        gallery: Features of the candidates, (n_gallery, d), unit norm.
        k: Number of candidates per query.
        bias: Subtracted from the scores of each candidate, (n_gallery,).
        exclude: Per query, the row of the gallery that it must not find, (n_queries,); -1 for none. If the queries are
            the gallery itself, pass `range(n)` as an array, so that no item finds itself.
        normalize: Scale all features to unit norm first.
        hint: How the caller's user asks for it, for the message.

    Returns:
        Scores minus bias, (n_queries, k), highest first, and the rows of the candidates, (n_queries, k) int64.

    Raises:
        ValueError: If an argument has a wrong type, shape or value.

    Example:
        >>> scores, rows = nearest(torch.eye(3), torch.eye(3), k=1, bias=torch.tensor([0.0, 2.0, 0.0]))
        >>> rows[:, 0].tolist()
        [0, 0, 2]

    """
    norms: Norms = "normalize" if normalize else "unit"
    queries = as_rows(
        "queries",
        queries,
        norms,
        hint=hint,
    )
    gallery = as_rows(
        "gallery",
        gallery,
        norms,
        width=queries.shape[1],
        hint=hint,
    )
    most = len(gallery) - (exclude is not None)
    if not 1 <= k <= most:
        raise ValueError(f"k={k}; allowed: 1 to {most}, the number of candidates that a query can find")
    subtracted = None if bias is None else as_vector("bias", bias, len(gallery))
    excluded = None if exclude is None else as_integers("exclude", exclude, len(queries))
    scores = torch.empty(
        len(queries),
        k,
        dtype=queries.dtype,
        device=queries.device,
    )
    rows = torch.empty(
        len(queries),
        k,
        dtype=torch.long,
        device=queries.device,
    )
    for query_rows, block in queries.blocks(QUERY_ROWS):
        best = block.new_empty(len(block), 0)
        best_rows = rows.new_empty(len(block), 0)
        for gallery_rows, candidates in gallery.blocks(GALLERY_ROWS):
            tile = block @ candidates.to(block).T
            if subtracted is not None:
                tile -= subtracted[gallery_rows].to(tile)
            if excluded is not None:
                own = excluded[query_rows].to(block.device) - gallery_rows.start
                inside = ((own >= 0) & (own < tile.shape[1])).nonzero().flatten()
                tile[inside, own[inside]] = -torch.inf
            tile_best, tile_rows = tile.topk(min(k, tile.shape[1]), dim=1)
            # The best so far compete with the best of this tile.
            best = torch.cat([best, tile_best], dim=1)
            best_rows = torch.cat([best_rows, tile_rows + gallery_rows.start], dim=1)
            best, order = best.topk(min(k, best.shape[1]), dim=1)
            best_rows = best_rows.gather(1, order)
        scores[query_rows] = best
        rows[query_rows] = best_rows
    return scores, rows


def reciprocal_ranks(
    rows: Tensor,
    links: Integers,
    gallery: int,
) -> Tensor:
    """Return 1 / rank of the first right answer per query that has one; 0 if it is not in the list.

    Args:
        rows: Rows of the gallery that each query finds, best first, (n_queries, k).
        links: Rows (query, right answer), (n, 2).
        gallery: Number of items in the gallery.

    Returns:
        (number of queries with a right answer,) float64.

    Raises:
        ValueError: If `links` has a wrong shape or names a row that does not exist.

    Example:
        >>> reciprocal_ranks(torch.tensor([[4, 2], [1, 3]]), [[0, 2], [1, 0]], gallery=5).tolist()
        [0.5, 0.0]

    """
    pairs = as_links("links", links, len(rows), gallery, ("queries", "gallery")).to(rows.device)
    # A pair (query, item) as one number, so that all results are compared with all right answers at once.
    query = torch.arange(len(rows), device=rows.device)[:, None]
    right = torch.isin(query * gallery + rows, pairs @ pairs.new_tensor([gallery, 1]))
    position = torch.where(right.any(dim=1), 1 + right.int().argmax(dim=1), math.inf)
    return (1 / position.double())[torch.unique(pairs[:, 0])]


@dataclass(frozen=True, repr=False)
class Hubness:
    """What the queries of a search find.

    Attributes:
        found: Rows of the gallery that each query finds, best first, (n_queries, k).
        counts: N_k of each item, (n_gallery,).

    """

    found: Tensor
    counts: Tensor

    def __repr__(self) -> str:
        """Return one line with the sizes and the main measures."""
        return (
            f"Hubness(queries={len(self.found)}, gallery={len(self.counts)}, k={self.k}, skewness={self.skewness:.3g}, "
            f"never_found={self.never_found:.3g}, largest={int(self.counts.max())})"
        )

    @property
    def k(self) -> int:
        """How many items each query finds."""
        return self.found.shape[1]

    @cached_property
    def skewness(self) -> float:
        """Third standardized moment of N_k; 0 if all items are found equally often."""
        centered = self.counts.double() - self.counts.double().mean()
        deviation = centered.square().mean().sqrt()
        return float((centered**3).mean() / deviation**3) if deviation > 0 else 0.0

    @cached_property
    def never_found(self) -> float:
        """Share of the gallery with N_k = 0."""
        return float((self.counts == 0).double().mean())

    def top_share(self, share: float = 0.01) -> float:
        """Return the share of all results that are among the most frequent items.

        Args:
            share: Of the gallery; 0.01 for the most frequent 1 %, at least one item.

        """
        number = max(1, round(share * len(self.counts)))
        return float(self.counts.sort(descending=True).values[:number].sum() / self.counts.sum().clamp(min=1))

    def worst(self, count: int = 10) -> Tensor:
        """Return the rows of the items with the largest N_k, the largest first; equal ones in the gallery's order."""
        return self.counts.argsort(descending=True, stable=True)[:count]

    def hits(self, links: Integers, k: int = 1) -> Tensor:
        """Return, per query with a right answer, whether it finds one among its first k.

        Args:
            links: Rows (query, right answer), (n, 2).
            k: At most that of `hubness`.

        Returns:
            (number of queries with a right answer,), bool, in the order of the queries.

        Raises:
            ValueError: If k is too large, or `links` has a wrong shape or names a row that does not exist.

        """
        if not 1 <= k <= self.k:
            raise ValueError(f"k={k}; allowed: 1 to {self.k}")
        return reciprocal_ranks(self.found[:, :k], links, len(self.counts)) > 0

    def recall(self, links: Integers, k: int = 1) -> float:
        """Return the share of the queries with a right answer that find one among their first k (see `hits`)."""
        return float(self.hits(links, k).double().mean())


def hubness(
    queries: Features,
    gallery: Features,
    k: int = 10,
    *,
    bias: Vector | None = None,
    exclude: Integers | None = None,
    normalize: bool = False,
) -> Hubness:
    """Count how often each item of a gallery is found.

    Args:
        queries: Features, (n_queries, d), unit norm.
        gallery: Features of the items, (n_gallery, d), unit norm; also a memory-mapped array, which is read in blocks.
        k: How many items each query finds.
        bias: Subtracted from the scores of each item, (n_gallery,): `PopularityCorrection.bias(gallery)`.
        exclude: Per query, a row of the gallery that it must not find, (n_queries,); -1 for none. If the queries are
            the gallery itself, pass `torch.arange(n)`, so that no item finds itself.
        normalize: Scale all features to unit norm first.

    Returns:
        The counts, with their skewness, the share of items that are never found, the worst hubs and recall.

    Raises:
        ValueError: If an argument has a wrong type, shape or value.

    Example:
        >>> queries = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2], [1.0, -0.2], [1.0, 0.9]]), dim=1)
        >>> hubness(queries, torch.eye(2), k=1)
        Hubness(queries=3, gallery=2, k=1, skewness=0, never_found=0.5, largest=3)
        >>> hubness(queries, torch.eye(2), k=1).worst(1)
        tensor([0])

    """
    _, found = nearest(
        queries,
        gallery,
        k,
        bias,
        exclude,
        normalize=normalize,
    )
    return Hubness(found, torch.bincount(found.flatten(), minlength=len(gallery)))


def chance_hubness(
    queries: int,
    items: int,
    k: int = 10,
    *,
    seed: int = 0,
) -> Hubness:
    """Return the counts of a search whose results are random: N_k of each item is binomial.

    Args:
        queries: Number of queries.
        items: Number of items in the gallery.
        k: How many items each query finds.
        seed: Of the draw.

    Returns:
        The counts of one draw; `found` has no rows.

    Raises:
        ValueError: If there are no queries, or fewer than k items.

    Example:
        >>> chance = chance_hubness(queries=800, items=400, k=10)
        >>> chance.never_found, round(float(chance.counts.double().mean()))
        (0.0, 20)
        >>> chance_hubness(queries=100, items=10_000, k=10).skewness > 3  # 0.1 finds per item
        True

    """
    if queries < 1 or not 1 <= k <= items:
        raise ValueError(f"queries={queries}, items={items}, k={k}; needs queries >= 1 and 1 <= k <= items")
    counts = np.random.default_rng(seed).binomial(queries, k / items, size=items)
    return Hubness(torch.empty(0, k, dtype=torch.long), torch.from_numpy(counts))
