"""Intervals by one paired bootstrap over clusters of queries and seeds, and the one way to cut pairs in halves.

The metric of a method is a mean over folds (one setting measured on one set), over seeds and over queries. Queries that
belong together, such as an image and its captions, are one cluster and are not drawn separately. Each resample draws
the clusters of every set and the seeds with replacement. All methods use the same draws, so a resample gives a paired
difference between two methods. The 95 % interval consists of the percentiles of these differences. With few seeds the
variance among seeds is slightly underestimated, by the factor 1 - 1/seeds, as in every bootstrap.

`change_interval` is the same for two rankings of one search, such as before and after a correction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nuclr.arrays import Integers, Vector, as_integers, as_vector

RESAMPLES = 4000
SEED = 12345
LEVEL = 0.95
HALVES_SEED = 20250
CLUSTER = "_cluster"  # what the name of the clusters of a direction ends with


@dataclass(frozen=True)
class Interval:
    """A difference with its 95 % interval.

    Attributes:
        difference: The difference itself.
        low: Lower end of the interval.
        high: Upper end.

    Example:
        >>> Interval(0.5, 0.1, 0.9).significant
        True

    """

    difference: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether zero is outside of the interval."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Fold:
    """Outcome of one method on one set under one setting.

    Attributes:
        name: Name of the set; folds of the same set draw the same clusters.
        total: (seeds, clusters) by direction, sum of the values over a cluster's queries.
        count: (clusters,) by direction, number of a cluster's queries.
        copies: (clusters,), how many equal clusters an entry stands for.

    """

    name: str
    total: dict[str, np.ndarray]
    count: dict[str, np.ndarray]
    copies: np.ndarray


def fold(
    name: str,
    outcomes: Sequence[Mapping[str, np.ndarray]],
    column: int = 0,
) -> Fold:
    """Return the fold of one set from the outcomes of each seed.

    Args:
        name: Name of the set.
        outcomes: Per seed: values (queries, metrics) by direction, and the cluster of each query, (queries,), under the
            direction's name with "_cluster". Seeds have the same clusters.
        column: Which metric.

    Returns:
        The sums over each cluster.

    """
    directions = [key for key in outcomes[0] if f"{key}{CLUSTER}" in outcomes[0]]
    size = max(int(outcomes[0][f"{key}{CLUSTER}"].max()) + 1 for key in directions)
    total: dict[str, np.ndarray] = {}
    count: dict[str, np.ndarray] = {}
    for key in directions:
        owner = outcomes[0][f"{key}{CLUSTER}"]
        total[key] = np.stack([np.bincount(owner, one[key][:, column], size) for one in outcomes])
        count[key] = np.bincount(owner, minlength=size).astype(np.float64)
    return Fold(name, total, count, np.ones(size))


def per_seed(folds: Sequence[Fold], direction: str | None = None) -> np.ndarray:
    """Return the metric of each seed, (seeds,): the mean over folds and directions, or over one direction."""
    values = []
    for one in folds:
        for key in one.total:
            if direction in (None, key):
                values.append((one.total[key] * one.copies).sum(axis=1) / (one.count[key] * one.copies).sum())
    return np.asarray(np.mean(values, axis=0))


class Bootstrap:
    """Resampled metrics of any method on the same sets. The draws are made once, so all comparisons share them.

    Args:
        seeds: Number of seeds of each method.
        resamples: Number of resamples.

    """

    def __init__(
        self,
        seeds: int = 1,
        resamples: int = RESAMPLES,
    ) -> None:
        self._rng = np.random.default_rng(SEED)
        self.resamples = resamples
        self._seeds = self._rng.multinomial(seeds, np.full(seeds, 1 / seeds), resamples) / seeds
        self._clusters: dict[str, np.ndarray] = {}

    def clusters(self, name: str, copies: np.ndarray) -> np.ndarray:
        """Return how often each cluster of this set is drawn, (resamples, clusters)."""
        if name not in self._clusters:
            drawn = self._rng.multinomial(int(copies.sum()), copies / copies.sum(), self.resamples)
            self._clusters[name] = drawn.astype(float)
        return self._clusters[name]

    def metrics(self, folds: Sequence[Fold]) -> np.ndarray:
        """Return the mean over seeds of `per_seed` in every resample, (resamples,)."""
        values = []
        for one in folds:
            weights = self.clusters(one.name, one.copies)
            for key in one.total:
                by_seed = (weights @ one.total[key].T) / (weights @ one.count[key])[:, None]
                values.append((by_seed * self._seeds).sum(axis=1))
        return np.asarray(np.mean(values, axis=0))

    def difference(self, a: Sequence[Fold], b: Sequence[Fold]) -> Interval:
        """Return a - b: the mean over seeds with its interval."""
        point = float(per_seed(a).mean() - per_seed(b).mean())
        resampled = self.metrics(a) - self.metrics(b)
        low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Interval(point, float(low), float(high))


def change_interval(
    before: Vector,
    after: Vector,
    group: Integers | None = None,
) -> Interval:
    """Return the change of a metric between two rankings of one search, with its interval.

    Args:
        before: Value of each query, (n,), such as its hits under plain ranking.
        after: The same under the other ranking.
        group: (n,) integers, equal for queries that are not drawn separately: copies of one query, or queries of one
            image. None: all differ.

    Returns:
        The mean of `after` minus the mean of `before`.

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> change = change_interval([0, 0, 0, 1] * 50, [1, 0, 0, 1] * 50)
        >>> change.difference, 0.18 < change.low < 0.25 < change.high < 0.32
        (0.25, True)

    """
    first = as_vector("before", before, len(before)).cpu().numpy()
    second = as_vector("after", after, len(first)).cpu().numpy()
    owner = np.arange(len(first))
    if group is not None:
        owner = np.unique(as_integers("group", group, len(first)).cpu().numpy(), return_inverse=True)[1]
    clusters = np.stack([np.bincount(owner, first), np.bincount(owner, second), np.bincount(owner)], axis=1)
    # Most clusters are equal: a hit or a miss under both rankings. Drawing kinds of clusters has the same distribution
    # as drawing clusters, and a few kinds are drawn faster than a million queries.
    kinds, copies = np.unique(
        clusters,
        axis=0,
        return_counts=True,
    )
    count = {"all": kinds[:, 2]}
    plain, changed = (Fold("queries", {"all": kinds[None, :, column]}, count, copies) for column in (0, 1))
    return Bootstrap().difference([changed], [plain])


def cut_halves(group: Integers) -> tuple[Tensor, Tensor]:
    """Cut rows in two halves: the distinct groups, in a fixed random order, are divided.

    Args:
        group: (n,) integers, equal for rows that must be in one half.

    Returns:
        The rows of the first half and of the second, ascending. With an odd number of groups, the second has one more.

    Raises:
        ValueError: If `group` is not a vector of integers.

    Example:
        >>> cut_halves([4, 4, 7, 9, 9])
        (tensor([2]), tensor([0, 1, 3, 4]))

    """
    distinct, number = torch.unique(as_integers("group", group, None), return_inverse=True)
    order = torch.from_numpy(np.random.default_rng(HALVES_SEED).permutation(len(distinct)))
    in_first = torch.zeros(
        len(distinct),
        dtype=torch.bool,
        device=number.device,
    )
    in_first[order[: len(distinct) // 2]] = True
    return in_first[number].nonzero().squeeze(1), (~in_first[number]).nonzero().squeeze(1)
