"""Means over seeds, and intervals by a paired bootstrap over clusters of queries and seeds.

The metric of a method is a mean over folds (one setting measured on one set), over seeds and over queries. Queries that
belong together, such as an image and its captions, are one cluster and are not drawn separately. Each resample draws
the clusters of every set and the seeds with replacement. All methods use the same draws, so a resample gives a paired
difference between two methods. The 95 % interval consists of the percentiles of these differences. With few seeds the
variance among seeds is slightly underestimated, by the factor 1 - 1/seeds, as in every bootstrap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nuclr.studies.compare.measure import KS, Hits

RESAMPLES = 4000
SEED = 12345
LEVEL = 0.95
DIRECTIONS = ("x_to_y", "y_to_x", "top")


@dataclass(frozen=True)
class Fold:
    """Outcome of one method on one set under one setting.

    Attributes:
        name: Name of the set; folds of the same set draw the same clusters.
        total: (seeds, clusters) by direction, sum of the hits over a cluster's queries.
        count: (clusters,) by direction, number of a cluster's queries.

    """

    name: str
    total: dict[str, np.ndarray]
    count: dict[str, np.ndarray]


def fold(name: str, hits: Sequence[Hits], k: int = 1) -> Fold:
    """Return the fold of one set (`name`) from the hits of each seed, at recall@k."""
    column = KS.index(k)
    total: dict[str, np.ndarray] = {}
    count: dict[str, np.ndarray] = {}
    for key in (key for key in DIRECTIONS if key in hits[0]):
        owner = hits[0][f"{key}_cluster"]
        size = max(int(hits[0][f"{other}_cluster"].max()) + 1 for other in DIRECTIONS if other in hits[0])
        total[key] = np.stack([np.bincount(owner, one[key][:, column], size) for one in hits])
        count[key] = np.bincount(owner, minlength=size).astype(np.float64)
    return Fold(name, total, count)


def per_seed(folds: Sequence[Fold], direction: str | None = None) -> np.ndarray:
    """Return the share of hits of each seed, (seeds,): the mean over folds and directions, or over one direction."""
    values = [
        one.total[key].sum(axis=1) / one.count[key].sum()
        for one in folds
        for key in one.total
        if direction in (None, key)
    ]
    return np.asarray(np.mean(values, axis=0))


class Bootstrap:
    """Resampled metrics of any method on the same sets. The draws are made once, so all comparisons share them."""

    def __init__(self, seeds: int, resamples: int = RESAMPLES, seed: int = SEED) -> None:
        self._rng = np.random.default_rng(seed)
        self.resamples = resamples
        self._seeds = self._rng.multinomial(seeds, np.full(seeds, 1 / seeds), resamples) / seeds
        self._clusters: dict[str, np.ndarray] = {}

    def clusters(self, name: str, count: int) -> np.ndarray:
        """Return how often each cluster of this set is drawn, (resamples, clusters)."""
        if name not in self._clusters:
            drawn = self._rng.multinomial(count, np.full(count, 1 / count), self.resamples)
            self._clusters[name] = drawn.astype(float)
        return self._clusters[name]

    def metrics(self, folds: Sequence[Fold], direction: str | None = None) -> np.ndarray:
        """Return the mean over seeds of `per_seed` in every resample, (resamples,)."""
        values = []
        for one in folds:
            for key in (key for key in one.total if direction in (None, key)):
                weights = self.clusters(one.name, len(one.count[key]))
                by_seed = (weights @ one.total[key].T) / (weights @ one.count[key])[:, None]
                values.append((by_seed * self._seeds).sum(axis=1))
        return np.asarray(np.mean(values, axis=0))

    def difference(self, a: Sequence[Fold], b: Sequence[Fold], direction: str | None = None) -> dict[str, float]:
        """Return a - b in percentage points: the mean over seeds, its interval, and whether zero is outside of it."""
        point = per_seed(a, direction).mean() - per_seed(b, direction).mean()
        return interval(100 * float(point), 100 * (self.metrics(a, direction) - self.metrics(b, direction)))


def interval(value: float, resampled: np.ndarray) -> dict[str, float]:
    """Return the value with the percentile interval of its resamples."""
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"difference": value, "low": float(low), "high": float(high), "outside": bool(low > 0 or high < 0)}
