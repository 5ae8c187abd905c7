"""How well features separate classes: k-nearest-neighbor accuracy of labeled features.

It needs labels only for the evaluation, so it suits models without a text side, such as those trained on two views of
an image. A test set that has no labeled gallery is divided into halves (`split_halves`): the gallery and the queries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr.arrays import Features, Integers, as_features, as_integers, as_positive, unit_rows
from nuclr.evaluation import metrics
from nuclr.evaluation.ranks import TILE

K = 20
TEMPERATURE = 0.07


def split_halves(labels: Integers) -> tuple[Tensor, Tensor]:
    """Divide labeled samples into halves: within each class, the first, third, ... and the second, fourth, ...

    Args:
        labels: Class of each sample, (n,) integers.

    Returns:
        The rows of the first half (gallery) and of the second (queries), ascending. A class with one
        sample is in the first half only.

    Raises:
        ValueError: If the shape or type is wrong, or no class has two samples.

    Example:
        >>> split_halves([0, 0, 1, 0, 1])
        (tensor([0, 2, 3]), tensor([1, 4]))

    """
    targets = torch.unique(as_integers("labels", labels, None), return_inverse=True)[1]
    odd = _position_in_class(targets) % 2 == 1
    if not bool(odd.any()):
        raise ValueError(
            f"labels has {len(targets)} samples, none of a class with two; needs two of at least one class"
        )
    return (~odd).nonzero().flatten(), odd.nonzero().flatten()


def knn_accuracy(
    gallery: Features,
    labels: Integers,
    queries: Features,
    query_labels: Integers,
    k: int = K,
    temperature: float = TEMPERATURE,
) -> float:
    """Classify each query by a vote of its k nearest neighbors in cosine similarity and return the accuracy.

    A neighbor with similarity s has exp(s / temperature) votes (Wu et al., "Unsupervised Feature Learning via
    Non-Parametric Instance Discrimination", CVPR 2018; the same as in lightly).

    Args:
        gallery: Labeled features, (n, d); they need not have unit norm.
        labels: Their classes, (n,) integers.
        queries: Features to classify, (m, d).
        query_labels: Their classes, (m,) integers.
        k: Number of neighbors, at most n.
        temperature: Of the weights.

    Returns:
        The share of queries whose class gets most votes. Classes with equal votes count with their expectation over
        random choices.

    Raises:
        ValueError: If a shape or type is wrong, a feature is not finite, or `k` or `temperature` is out of range.

    Example:
        >>> import numpy as np
        >>> gallery = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> knn_accuracy(gallery, [0, 0, 1], np.array([[1.0, 0.2], [0.2, 1.0]]), [0, 1], k=2)
        1.0

    """
    halves = _checked_halves(
        gallery,
        labels,
        queries,
        query_labels,
        ("gallery", "labels", "queries", "query_labels"),
    )
    return float(halves.neighbor_hits(temperature, k).mean())


@dataclass(frozen=True)
class LabeledHalves:
    """Labeled features, one half of which is classified by means of the other.

    Attributes:
        known: Features of the labeled half, (n, d).
        labels: Their classes, (n,), numbered from 0.
        asked: Features to classify, (m, d).
        asked_labels: Their classes, (m,); -1 for a class that the labeled half does not have.

    """

    known: Tensor
    labels: Tensor
    asked: Tensor
    asked_labels: Tensor

    @property
    def k(self) -> int:
        """Number of neighbors that vote."""
        return min(K, len(self.known))

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.labels.max()) + 1

    def chance(self) -> Tensor:
        """Return the probability that a random class is right, (m,)."""
        return torch.full((len(self.asked),), 1 / self.classes, dtype=torch.float64)

    @torch.no_grad()
    def neighbor_hits(self, temperature: float = TEMPERATURE, k: int | None = None) -> Tensor:
        """Return the probability that k neighbors (None: `self.k`) choose the right class, (m,) float64.

        Classes with equal votes are in random order.
        """
        k = self.k if k is None else k
        if not 1 <= k <= len(self.known):
            raise ValueError(f"k={k}; allowed: 1 to {len(self.known)}, the rows of gallery")
        temperature = as_positive("temperature", temperature)
        known = unit_rows(self.known)
        hits = []
        size = max(1, TILE // max(len(known), self.classes))
        for rows, own in zip(unit_rows(self.asked).split(size), self.asked_labels.split(size), strict=True):
            similarity, neighbor = (rows @ known.T).double().topk(k, dim=1)
            weight = ((similarity - similarity[:, :1]) / temperature).exp()  # a difference, so that nothing overflows
            votes = weight.new_zeros(len(rows), self.classes).scatter_add(1, self.labels[neighbor], weight)
            best = votes == votes.max(dim=1, keepdim=True).values
            right = best.gather(1, own.clamp(min=0)[:, None]).squeeze(1) & (own >= 0)
            hits.append(right / best.sum(dim=1).double())
        return torch.cat(hits)


def labeled_halves(x: Features, labels: Integers) -> LabeledHalves:
    """Divide labeled features as `split_halves` does.

    Args:
        x: Features, (n, d).
        labels: Class of each, (n,) integers.

    Returns:
        What the metrics of labeled features are computed from.

    Raises:
        ValueError: If a shape or type is wrong, a feature is not finite, or no class has two samples.

    """
    features = as_features("x", x, "any")
    targets = as_integers("labels", labels, len(features)).to(features.device)
    first, second = split_halves(targets)
    return _checked_halves(
        features[first],
        targets[first],
        features[second],
        targets[second],
    )


def knn_metrics(x: Features, labels: Integers) -> dict[str, float]:
    """Compute k-nearest-neighbor accuracy of one labeled set, its first half the gallery and its second the queries.

    Args:
        x: Features, (n, d).
        labels: Class of each, (n,) integers.

    Returns:
        `knn_acc1`, the accuracy of 20 neighbors, and `knn_chance`, one divided by the number of classes.

    Raises:
        ValueError: As in `knn_accuracy` and `split_halves`.

    Example:
        >>> import numpy as np
        >>> knn_metrics(np.eye(2)[[0, 0, 1, 1]], [0, 0, 1, 1])
        {'knn_acc1': 1.0, 'knn_chance': 0.5}

    """
    return metrics.METRICS["knn_acc1"].measure(labeled_halves(x, labels))


# -- checks ------------------------------------------------------------------------------------------------------------


def _checked_halves(
    first: Features,
    first_labels: Integers,
    second: Features,
    second_labels: Integers,
    names: tuple[str, str, str, str] = ("x", "labels", "x", "labels"),
) -> LabeledHalves:
    """Return features with labels, and features to classify, after checking them."""
    x = as_features(names[0], first, "any")
    other = as_features(
        names[2],
        second,
        "any",
        width=x.shape[1],
    )
    for name, features in ((names[0], x), (names[2], other)):
        if not len(features):
            raise ValueError(f"{name} has no rows; needs at least one")
    classes, targets = torch.unique(as_integers(names[1], first_labels, len(x)).to(x.device), return_inverse=True)
    asked = as_integers(names[3], second_labels, len(other)).to(x.device)
    position = torch.searchsorted(classes, asked).clamp(max=len(classes) - 1)
    return LabeledHalves(
        x,
        targets,
        other,
        torch.where(classes[position] == asked, position, -1),
    )


def _position_in_class(labels: Tensor) -> Tensor:
    """Return how many earlier samples have the same class."""
    order = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels)
    first = counts.cumsum(0) - counts
    position = torch.empty_like(order)
    position[order] = torch.arange(len(labels), device=labels.device) - first[labels[order]]
    return position
