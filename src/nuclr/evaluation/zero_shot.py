"""Zero-shot classification: the class whose prompts are nearest."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.evaluation.ranks import ranks


def class_features(prompts: list[Tensor]) -> Tensor:
    """(classes, d): the mean of each class's prompts (m, d), each of unit norm, scaled to unit norm again."""
    return torch.stack([normalize(normalize(features, dim=1).mean(dim=0), dim=0) for features in prompts])


def zero_shot(x: Tensor, classes: Tensor, labels: Tensor) -> dict[str, float]:
    """Shares of x (n, d) whose label (n,) is the nearest class (c, d), or among the nearest five; ties shared.

    `mean_per_class_recall` is the mean over the classes that have an x of the share found right among those: the same
    as acc1 where all classes are equally frequent. With it 1/c, the chance level.
    """
    found = ranks(x, classes, torch.stack([torch.arange(len(labels), device=labels.device), labels], dim=1))
    hit = found.hits(1)
    sums = hit.new_zeros(len(classes)).index_add(0, labels, hit)
    counts = torch.bincount(labels, minlength=len(classes))
    return {
        "zero_shot_acc1": float(hit.mean()),
        "zero_shot_acc5": float(found.hits(5).mean()),
        "zero_shot_mean_per_class_recall": float((sums / counts)[counts > 0].mean()),
        "zero_shot_chance": 1 / len(classes),
    }
