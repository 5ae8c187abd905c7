"""Hubness of a search: how unequally often the items of a gallery are found.

N_k of an item is the number of queries that have it among their first k. Its mean is k n_queries / n_gallery. A *hub*
has an N_k far above the mean; an item with N_k = 0 is never found. The skewness of N_k over the gallery is the usual
measure of hubness (Radovanović et al., "Hubs in space", 2010): 0 for a symmetric distribution, large if there are hubs.

Random results are not even either. If each query finds k items at random, N_k is binomial with n_queries trials of
probability k / n_gallery, and its skewness is about 1 / sqrt(mean): 0.2 if items are found 20 times on average, but 3
if they are found 0.1 times. So compare each measure with its value by chance (`chance_hubness`).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nuclr.popularity.correction import reciprocal_ranks
from nuclr.popularity.neighbors import nearest
from nuclr.popularity.problem import Array, Indices


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

    def hits(self, links: Indices, k: int = 1) -> Tensor:
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

    def recall(self, links: Indices, k: int = 1) -> float:
        """Return the share of the queries with a right answer that find one among their first k (see `hits`)."""
        return float(self.hits(links, k).double().mean())


def hubness(
    queries: Array,
    gallery: Array,
    k: int = 10,
    *,
    bias: Array | None = None,
    exclude: Indices | None = None,
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
    _, found = nearest(queries, gallery, k, bias, exclude, normalize=normalize)
    return Hubness(found, torch.bincount(found.flatten(), minlength=len(gallery)))


def chance_hubness(queries: int, items: int, k: int = 10, *, seed: int = 0) -> Hubness:
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
