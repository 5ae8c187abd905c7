"""Zero-shot classification: predict the class whose prompts are nearest."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.evaluation.ranks import query_ranks
from nuclr.norms import rescale_extreme_rows
from nuclr.popularity.problem import Array, Indices, as_tensor


def class_features(prompts: Sequence[Array]) -> Tensor:
    """Average the prompts of each class into one feature of unit norm.

    Args:
        prompts: Features of the prompts of each class, (m, d) per class; they need not have unit norm.

    Returns:
        (classes, d): prompts are normalized, averaged, and normalized again.

    Raises:
        ValueError: If the prompts of a class are not a matrix.

    Example:
        >>> import torch
        >>> class_features([torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0], [0.0, 1.0]])]).tolist()
        [[1.0, 0.0], [0.0, 1.0]]

    """
    matrices = [as_tensor(f"prompts[{number}]", features) for number, features in enumerate(prompts)]
    for number, features in enumerate(matrices):
        if features.ndim != 2 or not len(features):
            raise ValueError(f"prompts[{number}] has shape {tuple(features.shape)}; needs (m, d) with m at least 1")
    # In half precision the norm of a row may overflow.
    matrices = [features if features.dtype.itemsize >= 4 else features.float() for features in matrices]
    matrices = [rescale_extreme_rows(features, small=False) for features in matrices]
    return torch.stack([normalize(normalize(features, dim=1).mean(dim=0), dim=0) for features in matrices])


def zero_shot_metrics(x: Array, classes: Array, labels: Indices) -> dict[str, float]:
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
    targets = as_tensor("labels", labels, lists=True)
    if targets.shape != (len(x),):
        raise ValueError(f"labels has shape {tuple(targets.shape)}; needs ({len(x)},), one class per row of x")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"labels holds {str(targets.dtype).removeprefix('torch.')}; needs class numbers (integers)")
    targets = targets.long()
    outside = ((targets < 0) | (targets >= len(classes))).nonzero().flatten()
    if len(outside):
        row = int(outside[0])
        raise ValueError(f"labels[{row}]={int(targets[row])}; allowed: 0 to {len(classes) - 1}, the rows of classes")
    links = torch.stack([torch.arange(len(targets), device=targets.device), targets], dim=1)
    ranks = query_ranks(x, classes, links)
    hit = ranks.hits(1)
    sums = hit.new_zeros(len(classes)).index_add(0, targets, hit)
    counts = torch.bincount(targets, minlength=len(classes))
    return {
        "zero_shot_acc1": float(hit.mean()),
        "zero_shot_acc5": float(ranks.hits(5).mean()),
        "zero_shot_mean_per_class_recall": float((sums / counts)[counts > 0].mean()),
        "zero_shot_chance": 1 / len(classes),
    }
