r"""Coordinates that make an index rank by a score minus a bias.

Additional coordinates turn <q, g> - b into what an index computes. M, R and b_min are constants of a correction, with
M >= |g|^2 and R^2 >= |g|^2 + b^2 for all g.

    inner product   g' = (g, -b)                                q' = (q, 1)      <q', g'> = <q, g> - b
    Euclidean       g' = (g, sqrt(2 (b - b_min) + M - |g|^2))   q' = (q, 0)      |q' - g'|^2 = c - 2 (<q, g> - b)
    cosine          g' = (g, -b, sqrt(R^2 - |g|^2 - b^2))       q' = (q, 1, 0)   cos(q', g') = (<q, g> - b) / (R |q'|)

Neither c = |q|^2 + M - 2 b_min nor R |q'| depends on g, so each index ranks by <q, g> - b. If the constants hold for
every item that may come, items that are added later always fit, and rows that are in the index never change.

Relations: the Euclidean line is the reduction of Bachrach et al. 2014, with the bias in place of the norm.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from nuclr.arrays import NORM_TOLERANCE

Metric = Literal["ip", "cosine", "l2"]

LARGEST_SCORE = (1 + NORM_TOLERANCE) ** 2  # of features whose norms pass the check
OF_QUERIES = {"ip": (1.0,), "l2": (0.0,), "cosine": (1.0, 0.0)}


def item_coordinates(features: Tensor, bias: Tensor, metric: Metric, bounds: tuple[float, float]) -> Tensor:
    """Return items with their additional coordinates.

    Args:
        features: (n, d), unit norm.
        bias: To subtract from the scores, (n,) float64.
        metric: What the index compares.
        bounds: Lowest and highest bias of any item; not used for "ip".

    Returns:
        (n, d + 1); (n, d + 2) for "cosine".

    Example:
        >>> item_coordinates(torch.eye(2), torch.tensor([0.5, 0.25]).double(), "ip", (0, 1)).tolist()
        [[1.0, 0.0, -0.5], [0.0, 1.0, -0.25]]

    """
    if metric == "ip":
        return torch.cat([features, -bias[:, None].to(features)], dim=1)
    low, high = bounds
    square = features.double().square().sum(dim=1)
    if metric == "l2":
        last = (2 * (bias - low) + LARGEST_SCORE - square).clamp(min=0).sqrt()
        return torch.cat([features, last[:, None].to(features)], dim=1)
    middle = (low + high) / 2
    bias = bias - middle
    last = (LARGEST_SCORE + (high - middle) ** 2 - square - bias.square()).clamp(min=0).sqrt()
    return torch.cat([features, torch.stack([-bias, last], dim=1).to(features)], dim=1)


def query_coordinates(features: Tensor, metric: Metric) -> Tensor:
    """Return queries with the coordinates that belong to those of `item_coordinates`.

    Example:
        >>> query_coordinates(torch.eye(2), "cosine").tolist()
        [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]]

    """
    return torch.cat([features, features.new_tensor(OF_QUERIES[metric]).expand(len(features), -1)], dim=1)


def check_metric(metric: str) -> None:
    """Raise a ValueError if a metric is unknown."""
    if metric not in get_args(Metric):
        raise ValueError(f"metric={metric!r}; allowed: {', '.join(map(repr, get_args(Metric)))}")
