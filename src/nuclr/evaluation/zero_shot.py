"""Zero-shot classification: predict the class whose prompts are nearest."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.arrays import Features, Integers, as_features, as_integers, as_links, rescale_extreme_rows
from nuclr.evaluation import metrics
from nuclr.evaluation.ranks import Ranks, query_ranks


def class_features(prompts: Sequence[Features]) -> Tensor:
    """Average the prompts of each class into one feature of unit norm.

    Args:
        prompts: Features of the prompts of each class, (m, d) per class; they need not have unit norm.

    Returns:
        (classes, d): prompts are normalized, averaged, and normalized again.

    Raises:
        ValueError: If the prompts of a class are not a matrix of finite numbers, or a class has none.

    Example:
        >>> import torch
        >>> class_features([torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0], [0.0, 1.0]])]).tolist()
        [[1.0, 0.0], [0.0, 1.0]]

    """
    means = []
    for number, features in enumerate(prompts):
        rows = as_features(f"prompts[{number}]", features, "any")
        if not len(rows):
            raise ValueError(f"prompts[{number}] has no rows; needs at least one prompt per class")
        mean = normalize(rescale_extreme_rows(rows, small=False), dim=1).mean(dim=0)
        means.append(normalize(mean, dim=0))
    return torch.stack(means)


@dataclass(frozen=True)
class Classified:
    """Images, and the rank of their own class among all classes.

    Attributes:
        ranks: One entry per image; the gallery consists of the classes.
        labels: Class of each image, (n,).

    """

    ranks: Ranks
    labels: Tensor

    def chance(self) -> Tensor:
        """Return the probability that a random class is right, (n,)."""
        return torch.full((len(self.labels),), 1 / self.ranks.gallery, dtype=torch.float64)

    def class_weights(self) -> Tensor:
        """Return weights of mean one under which each class that has an image counts the same, (n,)."""
        counts = torch.bincount(self.labels)
        return len(self.labels) / ((counts > 0).sum() * counts[self.labels]).double()


def zero_shot_metrics(
    x: Features,
    classes: Features,
    labels: Integers,
) -> dict[str, float]:
    """Compute zero-shot accuracy; ties count with their expectation over random orders.

    Args:
        x: Features of the images, (n, d).
        classes: Features of the classes, (c, d) (see `class_features`).
        labels: Class of each image, (n,) integers.

    Returns:
        `zero_shot_acc1` and `zero_shot_acc5`, the share of images whose label is the nearest class or among the nearest
        five; `zero_shot_mean_per_class_recall`, the accuracy of each class averaged over the classes that have an
        image (equal to acc1 if all classes are equally frequent); `zero_shot_chance`, 1/c.

    Raises:
        ValueError: If a shape or type is wrong, a feature is not finite, or a label is not a row of `classes`.

    Example:
        >>> import numpy as np
        >>> zero_shot_metrics(np.eye(3), np.eye(3), [0, 1, 1])["zero_shot_acc1"]
        0.6666666666666666

    """
    return metrics.measure("zero_shot", classify(x, classes, labels))


def classify(
    x: Features,
    classes: Features,
    labels: Integers,
) -> Classified:
    """Rank the classes for each image.

    Args:
        x: Features of the images, (n, d).
        classes: Features of the classes, (c, d).
        labels: Class of each image, (n,) integers.

    Returns:
        What the zero-shot metrics are computed from.

    Raises:
        ValueError: As in `zero_shot_metrics`.

    """
    targets = as_integers("labels", labels, len(x))
    pairs = torch.stack([torch.arange(len(targets), device=targets.device), targets], dim=1)
    links = as_links(
        "labels",
        pairs,
        len(x),
        len(classes),
        ("images", "classes"),
    )
    return Classified(query_ranks(x, classes, links), targets)
