"""Zero-shot classification: the class whose prompts are nearest."""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def class_features(prompts: list[Tensor]) -> Tensor:
    """(classes, d): the mean of each class's prompts (m, d), each of unit norm, scaled to unit norm again."""
    return torch.stack([normalize(normalize(features, dim=1).mean(dim=0), dim=0) for features in prompts])


def zero_shot(x: Tensor, classes: Tensor, labels: Tensor) -> dict[str, float]:
    """Share of x (n, d) whose label (n,) is the nearest class (c, d), ties shared; and 1/c, the chance level."""
    scores = x @ classes.T
    own = scores.gather(1, labels[:, None])
    best = scores.amax(dim=1, keepdim=True)
    share = (own == best).squeeze(1).double() / (scores == best).sum(dim=1)
    return {"zero_shot_acc1": float(share.mean()), "zero_shot_chance": 1 / len(classes)}
