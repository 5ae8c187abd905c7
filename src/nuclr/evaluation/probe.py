"""How well features separate classes: k-nearest-neighbor and linear-probe accuracy of labeled features.

Both need labels only for the evaluation, so they suit models without a text side, such as those trained on two views of
an image. A test set that has no training part is divided into halves (`split_halves`): the labeled gallery of the
neighbors, or the training half of the probe, and the queries.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from nuclr.arrays import Features, Integers, as_features, as_integers, as_positive, unit_rows
from nuclr.evaluation import metrics
from nuclr.evaluation.ranks import TILE

K = 20
TEMPERATURE = 0.07
REGULARIZATIONS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_VALIDATION = 5  # every fifth sample of a class is used to choose the regularization
_ITERATIONS = 500


def split_halves(labels: Integers) -> tuple[Tensor, Tensor]:
    """Divide labeled samples into halves: within each class, the first, third, ... and the second, fourth, ...

    Args:
        labels: Class of each sample, (n,) integers.

    Returns:
        The rows of the first half (gallery, or training) and of the second (queries), ascending. A class with one
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
    temperature: float | None = TEMPERATURE,
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
        temperature: Of the weights; None: each neighbor has one vote.

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

    @cached_property
    def regularization(self) -> float:
        """Penalty of the linear probe, chosen on the labeled half."""
        return choose_regularization(self.known, self.labels)

    def chance(self) -> Tensor:
        """Return the probability that a random class is right, (m,)."""
        return torch.full((len(self.asked),), 1 / self.classes, dtype=torch.float64)

    @torch.no_grad()
    def neighbor_hits(self, temperature: float | None = TEMPERATURE, k: int | None = None) -> Tensor:
        """Return the probability that k neighbors (None: `self.k`) choose the right class, (m,) float64.

        Classes with equal votes are in random order.
        """
        k = self.k if k is None else k
        if not 1 <= k <= len(self.known):
            raise ValueError(f"k={k}; allowed: 1 to {len(self.known)}, the rows of gallery")
        # At an infinite temperature all votes are equal.
        divisor = math.inf if temperature is None else as_positive("temperature", temperature)
        known = unit_rows(self.known)
        hits = []
        size = max(1, TILE // max(len(known), self.classes))
        for rows, own in zip(unit_rows(self.asked).split(size), self.asked_labels.split(size), strict=True):
            similarity, neighbor = (rows @ known.T).double().topk(k, dim=1)
            weight = ((similarity - similarity[:, :1]) / divisor).exp()  # a difference, so that nothing overflows
            votes = weight.new_zeros(len(rows), self.classes).scatter_add(1, self.labels[neighbor], weight)
            best = votes == votes.max(dim=1, keepdim=True).values
            right = best.gather(1, own.clamp(min=0)[:, None]).squeeze(1) & (own >= 0)
            hits.append(right / best.sum(dim=1).double())
        return torch.cat(hits)

    def probe_hits(self, regularization: float | None = None) -> Tensor:
        """Return whether a linear probe (None: with `self.regularization`) finds the right class, (m,) float64."""
        penalty = self.regularization if regularization is None else regularization
        predict = _fit(self.known, self.labels, as_positive("regularization", penalty))
        return (predict(self.asked) == self.asked_labels).double()


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


# -- linear probe ------------------------------------------------------------------------------------------------------


def linear_probe_accuracy(
    train_x: Features,
    train_y: Integers,
    test_x: Features,
    test_y: Integers,
    regularization: float | None = None,
) -> float:
    """Fit a linear classifier on frozen features and return its accuracy on others.

    The classifier is multinomial logistic regression with an L2 penalty: it minimizes the mean cross-entropy plus
    regularization/2 times the sum of the squared weights, without a penalty on the intercepts. (In scikit-learn's
    notation, C = 1 / (regularization n).) Features are centered, and divided by one number so that their mean square is
    1. The problem is convex and is solved by L-BFGS in float64 from zero, so the result is deterministic.

    Args:
        train_x: Features to fit on, (n, d).
        train_y: Their classes, (n,) integers.
        test_x: Features to classify, (m, d).
        test_y: Their classes, (m,) integers.
        regularization: Strength of the penalty. None: the best of `REGULARIZATIONS` (see `choose_regularization`).

    Returns:
        The share of the test features whose class has the highest score.

    Raises:
        ValueError: If a shape or type is wrong, a feature is not finite, or `regularization` is not positive.

    Example:
        >>> import numpy as np
        >>> x = np.array([[0.0, 1.0], [0.2, 1.1], [3.0, 1.0], [3.1, 0.8]])
        >>> linear_probe_accuracy(x, [0, 0, 1, 1], x + 0.1, [0, 0, 1, 1])
        1.0

    """
    halves = _checked_halves(
        train_x,
        train_y,
        test_x,
        test_y,
        ("train_x", "train_y", "test_x", "test_y"),
    )
    return float(halves.probe_hits(regularization).mean())


def choose_regularization(x: Tensor, labels: Tensor) -> float:
    """Choose the strength of the linear probe's penalty by accuracy on every fifth sample of each class.

    The probe is fitted on the rest. Of equally good values, the largest is taken.

    Args:
        x: Features, (n, d).
        labels: Class of each, (n,), numbered from 0.

    Returns:
        One of `REGULARIZATIONS`: the middle one if every class has only one sample.

    Example:
        >>> choose_regularization(torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 1]))
        1.0

    """
    count = torch.bincount(labels)[labels]
    # The fifth of five consecutive samples, or the last of a class with two to four.
    last = torch.where(count == 1, -1, torch.clamp(count, max=_VALIDATION) - 1)
    held_out = _position_in_class(labels) % _VALIDATION == last
    if not bool(held_out.any()):
        return REGULARIZATIONS[len(REGULARIZATIONS) // 2]
    accuracies = {}
    for regularization in reversed(REGULARIZATIONS):
        predict = _fit(x[~held_out], labels[~held_out], regularization)
        accuracies[regularization] = float((predict(x[held_out]) == labels[held_out]).double().mean())
    return max(accuracies, key=lambda regularization: accuracies[regularization])


def _fit(
    x: Tensor,
    labels: Tensor,
    regularization: float,
) -> Callable[[Tensor], Tensor]:
    """Return a function from features to predicted classes."""
    x = x.double()
    mean = x.mean(dim=0)
    scale = (x - mean).square().mean().sqrt().clamp(min=1e-30)
    weight, intercept = fit_logistic_regression((x - mean) / scale, labels, regularization)
    return lambda other: ((other.double() - mean) / scale @ weight + intercept).argmax(dim=1)


def fit_logistic_regression(
    x: Tensor,
    labels: Tensor,
    regularization: float,
) -> tuple[Tensor, Tensor]:
    """Minimize mean cross-entropy + regularization/2 * |weight|^2 by L-BFGS, starting from zero.

    Args:
        x: (n, d) float64.
        labels: (n,) int64, from 0.
        regularization: Strength of the penalty.

    Returns:
        Weights (d, classes) and intercepts (classes,), float64.

    Example:
        >>> x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
        >>> weight, intercept = fit_logistic_regression(x, torch.tensor([0, 1]), 0.1)
        >>> bool(weight[0, 1] > 0), bool(weight[0, 0] < 0)
        (True, True)

    """
    classes = int(labels.max()) + 1
    weight = x.new_zeros(x.shape[1], classes)
    intercept = x.new_zeros(classes)
    targets = one_hot(labels, classes).to(x)
    optimizer = torch.optim.LBFGS(
        [weight, intercept],
        max_iter=_ITERATIONS,
        tolerance_grad=1e-8,
        tolerance_change=1e-13,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        # The gradient is written out, which takes half the memory and time of autograd here.
        logits = x @ weight + intercept
        residual = (logits.softmax(dim=1) - targets) / len(x)
        weight.grad = x.T @ residual + regularization * weight
        intercept.grad = residual.sum(dim=0)
        return cross_entropy(logits, labels) + regularization / 2 * weight.square().sum()

    with torch.no_grad():
        optimizer.step(closure)
    return weight, intercept


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
