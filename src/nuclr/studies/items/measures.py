"""How evenly a search finds its items, and how often what is right."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from nuclr.arrays import Rows, evenly_spaced
from nuclr.evaluation.intervals import Interval, change_interval
from nuclr.popularity import Hubness, chance_hubness, hubness
from nuclr.popularity.bank import distinct_rows

DEPTHS = (1, 5, 10)  # of recall
LARGEST_COUNT = 500  # of the histogram of N_k; larger ones are counted as this
COVERED = 1000  # queries, and items as queries, that measure the coverage


@dataclass(frozen=True)
class Measures:
    """How evenly a search finds its items.

    Attributes:
        never_found: share of the items that no query finds.
        skewness: of N_k.
        top_share: share of the results that are the 1 % largest hubs.
        largest: the largest N_k.
        mean: the mean N_k.
        histogram: number of items by N_k, from 0 to 500 and more.
        recall: by depth, as text; empty if no right answers are known.

    """

    never_found: float
    skewness: float
    top_share: float
    largest: int
    mean: float
    histogram: list[int]
    recall: dict[str, float] = field(default_factory=dict)

    def texts(self, k: int) -> dict[str, str]:
        """Return the main measures by their labels."""
        recall = {f"recall@{depth}": f"{value:.1%}" for depth, value in self.recall.items()}
        return {
            "items that nobody finds": f"{self.never_found:.1%}",
            "results that are the 1 % largest hubs": f"{self.top_share:.1%}",
            "queries that find the largest hub": f"{self.largest:,}",
            f"skewness of N_{k}": f"{self.skewness:.2f}",
            **recall,
        }

    @classmethod
    def of(cls, found: Hubness, links: np.ndarray) -> "Measures":
        """Return the measures of a search, given its right answers."""
        counts = found.counts.numpy()
        return cls(
            never_found=found.never_found,
            skewness=found.skewness,
            top_share=found.top_share(0.01),
            largest=int(counts.max()),
            mean=float(counts.mean()),
            histogram=np.bincount(np.minimum(counts, LARGEST_COUNT)).tolist(),
            recall={str(depth): found.recall(links, depth) for depth in _depths(found.k, links)},
        )

    @classmethod
    def of_chance(cls, queries: int, items: int, k: int, links: np.ndarray) -> "Measures":
        """Return what random results would measure."""
        answers = np.unique(np.unique(links, axis=0)[:, 0], return_counts=True)[1]
        recall = {str(depth): float(np.mean(1 - (1 - depth / items) ** answers)) for depth in _depths(k, links)}
        return replace(cls.of(chance_hubness(queries, items, k), links[:0]), recall=recall)


def _depths(k: int, links: np.ndarray) -> list[int]:
    """Return the depths at which recall is measured: none without known answers."""
    return [depth for depth in DEPTHS if depth <= k and len(links)]


def recall_change(plain: Hubness, corrected: Hubness, links: np.ndarray, queries: Rows) -> dict[str, Interval]:
    """Return, per depth, the change of recall with its 95 % interval.

    Equal queries have equal results, so the interval is over distinct queries: a query that is asked a hundred times is
    one observation that weighs a hundred times as much.

    Args:
        plain: what the queries find before the correction.
        corrected: what they find after it.
        links: rows (query, right answer), (m, 2).
        queries: features of the queries.

    """
    labeled = torch.from_numpy(np.unique(links[:, 0]))
    group = torch.unique(queries[labeled], dim=0, return_inverse=True)[1]
    changes = {}
    for depth in _depths(plain.k, links):
        before = plain.hits(links, depth).double()
        after = corrected.hits(links, depth).double()
        changes[str(depth)] = change_interval(before, after, group)
    return changes


def coverage(queries: Rows, gallery: Rows, k: int) -> float:
    """Return how many different items queries find, relative to how many as many items of the gallery find.

    Items ask for all parts of the gallery, and hubs reduce both numbers. At most 1,000 queries are used, and so few
    that they find every item twice by chance: with more, queries about a part of the gallery find all of it as well.

    Args:
        queries: features of the queries.
        gallery: features of the items.
        k: how many items each finds, if there are more than that.

    """
    k = min(k, len(gallery) - 1)
    asked = distinct_rows(queries)
    count = min(len(asked), len(gallery), COVERED, 2 * len(gallery) // k)
    some = evenly_spaced(len(gallery), count)
    by_queries = hubness(queries.take(asked[evenly_spaced(len(asked), count)]), gallery, k)
    by_items = hubness(gallery.take(some), gallery, k, exclude=some)
    return (1 - by_queries.never_found) / (1 - by_items.never_found)
