"""Means over seeds, and intervals by a paired bootstrap over images and seeds.

The metric of a method is a mean over folds (one setting measured on one set), over seeds and over images. Captions are
not drawn separately: they stay with their image. Each resample draws the images of every set and the seeds with
replacement. All methods use the same draws, so a resample gives a paired difference between two methods. The 95 %
interval consists of the percentiles of these differences. With few seeds the variance among seeds is slightly
underestimated, by the factor 1 - 1/seeds, as in every bootstrap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nuclr.studies.compare.measure import KS, Hits

RESAMPLES = 4000
SEED = 12345
LEVEL = 0.95
DIRECTIONS = {"i2t": "image_to_text", "t2i": "text_to_image", "top": "top"}


@dataclass(frozen=True)
class Fold:
    """Outcome of one method on one set under one setting.

    Attributes:
        images: Name of the set; folds of the same set draw the same images.
        total: (seeds, images) by direction, sum of the hits over an image's queries: the image itself, or its captions.
        count: (images,) by direction, number of an image's queries.

    """

    images: str
    total: dict[str, np.ndarray]
    count: dict[str, np.ndarray]


def fold(images: str, hits: Sequence[Hits], k: int = 1) -> Fold:
    """Return the fold of one set (`images`) from the hits of each seed, at recall@k."""
    column = KS.index(k)
    total: dict[str, np.ndarray] = {}
    count: dict[str, np.ndarray] = {}
    for key in (key for key in DIRECTIONS if key in hits[0]):
        owner = hits[0][f"{key}_image"]
        size = max(int(hits[0][f"{other}_image"].max()) + 1 for other in DIRECTIONS if other in hits[0])
        total[key] = np.stack([np.bincount(owner, one[key][:, column], size) for one in hits])
        count[key] = np.bincount(owner, minlength=size).astype(np.float64)
    return Fold(images, total, count)


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
        self._images: dict[str, np.ndarray] = {}

    def images(self, name: str, count: int) -> np.ndarray:
        """Return how often each image of this set is drawn, (resamples, images)."""
        if name not in self._images:
            self._images[name] = self._rng.multinomial(count, np.full(count, 1 / count), self.resamples).astype(float)
        return self._images[name]

    def metrics(self, folds: Sequence[Fold], direction: str | None = None) -> np.ndarray:
        """Return the mean over seeds of `per_seed` in every resample, (resamples,)."""
        values = []
        for one in folds:
            for key in (key for key in one.total if direction in (None, key)):
                weights = self.images(one.images, len(one.count[key]))
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
