"""How well features separate classes: k-nearest-neighbor and linear-probe accuracy of labeled features.

Both need labels only for the evaluation, so they suit models without a text side, such as those trained on two views of
an image. A test set that has no training part is divided into halves (`split_halves`): the labeled gallery of the
neighbors, or the training half of the probe, and the queries.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot

from nuclr.evaluation.ranks import TILE, check_features
from nuclr.norms import rescale_extreme_rows
from nuclr.popularity.problem import Array, Indices, as_tensor

K = 20
TEMPERATURE = 0.07
REGULARIZATIONS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_VALIDATION = 5  # every fifth sample of a class is used to choose the regularization
_ITERATIONS = 500


def split_halves(labels: Indices) -> tuple[Tensor, Tensor]:
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
    targets = torch.unique(_labels("labels", labels), return_inverse=True)[1]
    odd = _position_in_class(targets) % 2 == 1
    if not bool(odd.any()):
        raise ValueError(
            f"labels has {len(targets)} samples, none of a class with two; needs two of at least one class"
        )
    return (~odd).nonzero().flatten(), odd.nonzero().flatten()


def knn_accuracy(
    gallery: Array,
    labels: Indices,
    queries: Array,
    query_labels: Indices,
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
        k: Number of neighbors, at most n. Of neighbors with equal similarity, the earlier row of the gallery is taken.
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
    return float(knn_hits(gallery, labels, queries, query_labels, k, temperature).mean())


@torch.no_grad()
def knn_hits(
    gallery: Array,
    labels: Indices,
    queries: Array,
    query_labels: Indices,
    k: int = K,
    temperature: float | None = TEMPERATURE,
    tops: tuple[int, ...] = (1,),
) -> Tensor:
    """Return the outcome of every query of `knn_accuracy`.

    Args:
        gallery: Labeled features, (n, d); they need not have unit norm.
        labels: Their classes, (n,) integers.
        queries: Features to classify, (m, d).
        query_labels: Their classes, (m,) integers.
        k: Number of neighbors, at most n.
        temperature: Of the weights; None: each neighbor has one vote.
        tops: How many of the classes with most votes count as answers.

    Returns:
        (m, tops), float64: the probability that the right class is among them. Classes with equal votes are in random
        order.

    Raises:
        ValueError: As in `knn_accuracy`.

    Example:
        >>> import numpy as np
        >>> gallery = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> knn_hits(gallery, [0, 0, 1], np.array([[1.0, 0.2], [0.2, 1.0]]), [1, 1], k=2, tops=(1, 2)).tolist()
        [[0.0, 1.0], [1.0, 1.0]]

    """
    known, asked, targets, query_targets = _labeled(gallery, labels, queries, query_labels)
    classes = int(targets.max()) + 1
    if not 1 <= k <= len(known):
        raise ValueError(f"k={k}; allowed: 1 to {len(known)}, the rows of gallery")
    if temperature is not None and not temperature > 0:
        raise ValueError(f"temperature={temperature}; needs a positive number, or None for one vote per neighbor")
    known, asked = (normalize(rescale_extreme_rows(side), dim=1) for side in (known, asked))
    hits = torch.zeros(len(asked), len(tops), dtype=torch.float64, device=known.device)
    size = max(1, TILE // max(len(known), classes))
    for rows in torch.arange(len(asked), device=known.device).split(size):
        own = query_targets[rows]
        similarity, neighbor = _nearest(asked[rows] @ known.T, k)
        weight = torch.ones_like(similarity) if temperature is None else _weights(similarity, temperature)
        votes = weight.new_zeros(len(rows), classes).scatter_add(1, targets[neighbor], weight)
        reached = votes.gather(1, own.clamp(min=0)[:, None])
        better, equal = (votes > reached).sum(dim=1), (votes == reached).sum(dim=1)
        for column, top in enumerate(tops):
            hits[rows, column] = ((top - better).clamp(min=0) / equal).clamp(max=1).double() * (own >= 0)
    return hits


def _weights(similarity: Tensor, temperature: float) -> Tensor:
    """Return exp(similarity / temperature) relative to the nearest neighbor, so that nothing overflows."""
    similarity = similarity.double()
    return ((similarity - similarity[:, :1]) / temperature).exp()


def _nearest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest scores of each row and their columns; of equal scores, the first columns."""
    values, columns = scores.topk(k, dim=1)
    # topk chooses among scores that equal the k-th one in an unspecified way.
    unclear = ((scores >= values[:, -1:]).sum(dim=1) > k).nonzero().flatten()
    if len(unclear):
        values[unclear], order = (part[:, :k] for part in scores[unclear].sort(dim=1, descending=True, stable=True))
        columns[unclear] = order
    return values, columns


def knn_metrics(x: Array, labels: Indices, k: int = K, temperature: float | None = TEMPERATURE) -> dict[str, float]:
    """Compute k-nearest-neighbor accuracy of one labeled set, its first half the gallery and its second the queries.

    Args:
        x: Features, (n, d).
        labels: Class of each, (n,) integers.
        k: Number of neighbors; all of the gallery if it has fewer.
        temperature: Of the weights (see `knn_accuracy`).

    Returns:
        `knn_acc1`, the accuracy, and `knn_chance`, one divided by the number of classes.

    Raises:
        ValueError: As in `knn_accuracy` and `split_halves`.

    Example:
        >>> import numpy as np
        >>> knn_metrics(np.eye(2)[[0, 0, 1, 1]], [0, 0, 1, 1])
        {'knn_acc1': 1.0, 'knn_chance': 0.5}

    """
    features = check_features("x", x)
    targets = _labels("labels", labels, len(features)).to(features.device)
    first, second = split_halves(targets)
    accuracy = knn_accuracy(
        features[first], targets[first], features[second], targets[second], min(k, len(first)), temperature
    )
    return {"knn_acc1": accuracy, "knn_chance": 1 / len(torch.unique(targets))}


# -- linear probe ------------------------------------------------------------------------------------------------------


def linear_probe_accuracy(
    train_x: Array,
    train_y: Indices,
    test_x: Array,
    test_y: Indices,
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
    x, other, targets, test_targets = _labeled(
        train_x, train_y, test_x, test_y, ("train_x", "train_y", "test_x", "test_y")
    )
    if regularization is None:
        regularization = choose_regularization(x, targets)
    if not regularization > 0:
        raise ValueError(f"regularization={regularization}; needs a positive number")
    return float((_fit(x, targets, regularization)(other) == test_targets).double().mean())


def choose_regularization(x: Array, labels: Indices) -> float:
    """Choose the strength of the linear probe's penalty by accuracy on every fifth sample of each class.

    The probe is fitted on the rest. Of equally good values, the largest is taken.

    Args:
        x: Features, (n, d).
        labels: Class of each, (n,) integers.

    Returns:
        One of `REGULARIZATIONS`: the middle one if every class has only one sample.

    Raises:
        ValueError: If a shape or type is wrong, or a feature is not finite.

    Example:
        >>> import numpy as np
        >>> choose_regularization(np.eye(2)[[0, 0, 1, 1]], [0, 0, 1, 1])
        1.0

    """
    features = check_features("x", x)
    targets = _labels("labels", labels, len(features)).to(features.device)
    targets = torch.unique(targets, return_inverse=True)[1]
    held_out = _position_in_class(targets) % _VALIDATION == _last_or_fifth(targets)
    if not bool(held_out.any()):
        return REGULARIZATIONS[len(REGULARIZATIONS) // 2]
    best, highest = REGULARIZATIONS[-1], -1.0
    for regularization in reversed(REGULARIZATIONS):
        predict = _fit(features[~held_out], targets[~held_out], regularization)
        accuracy = float((predict(features[held_out]) == targets[held_out]).double().mean())
        if accuracy > highest:
            best, highest = regularization, accuracy
    return best


def _last_or_fifth(labels: Tensor) -> Tensor:
    """Return which of five consecutive samples is held out: the fifth, or the last of a class with two to four."""
    count = torch.bincount(labels)[labels]
    return torch.where(count == 1, -1, torch.clamp(count, max=_VALIDATION) - 1)


def _fit(x: Tensor, labels: Tensor, regularization: float) -> Callable[[Tensor], Tensor]:
    """Return a function from features to predicted classes."""
    x = x.double()
    mean = x.mean(dim=0)
    scale = (x - mean).square().mean().sqrt().clamp(min=1e-30)
    weight, intercept = fit_logistic_regression((x - mean) / scale, labels, regularization)
    return lambda other: ((other.double() - mean) / scale @ weight + intercept).argmax(dim=1)


def fit_logistic_regression(x: Tensor, labels: Tensor, regularization: float) -> tuple[Tensor, Tensor]:
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
    weight = torch.zeros(x.shape[1], classes, dtype=x.dtype, device=x.device)
    intercept = torch.zeros(classes, dtype=x.dtype, device=x.device)
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


def _labeled(
    first: Array,
    first_labels: Indices,
    second: Array,
    second_labels: Indices,
    names: tuple[str, str, str, str] = ("gallery", "labels", "queries", "query_labels"),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both sets of features, then their labels, after checking them.

    The classes of the first set are numbered from 0. A class that occurs only in the second set is -1.
    """
    x, other = check_features(names[0], first), check_features(names[2], second)
    for name, features in ((names[0], x), (names[2], other)):
        if not len(features):
            raise ValueError(f"{name} has no rows; needs at least one")
    if x.shape[1] != other.shape[1]:
        raise ValueError(f"{names[0]} has {x.shape[1]} columns and {names[2]} {other.shape[1]}; give equal sizes")
    classes, targets = torch.unique(_labels(names[1], first_labels, len(x)).to(x.device), return_inverse=True)
    asked = _labels(names[3], second_labels, len(other)).to(x.device)
    position = torch.searchsorted(classes, asked).clamp(max=len(classes) - 1)
    return x, other, targets, torch.where(classes[position] == asked, position, -1)


def _labels(name: str, labels: Indices, n: int | None = None) -> Tensor:
    targets = as_tensor(name, labels, lists=True)
    size = "n" if n is None else str(n)
    if targets.ndim != 1 or (n is not None and len(targets) != n) or not len(targets):
        raise ValueError(f"{name} has shape {tuple(targets.shape)}; needs ({size},), one class per row")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"{name} holds {str(targets.dtype).removeprefix('torch.')}; needs class numbers (integers)")
    return targets.long()


def _position_in_class(labels: Tensor) -> Tensor:
    """Return how many earlier samples have the same class."""
    order = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels)
    first = counts.cumsum(0) - counts
    position = torch.empty_like(order)
    position[order] = torch.arange(len(labels), device=labels.device) - first[labels[order]]
    return position
