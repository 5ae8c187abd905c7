"""Bring x into the space of y where the two were embedded by models that never met.

A ridge regression from x to y over the file's own pairs: linear, fast, nothing to tune by hand. Each x is predicted by
the fit that leaves out x itself with all its y, so that the score of a pair is no better than its model: fitted values
would make every pair look right. Leaving one out costs nothing for a linear smoother (Allen's PRESS): with fitted
values t_hat and leverages h the prediction without row i is t_i - (t_i - t_hat_i)/(1 - h_i). The penalty is the one of
`PENALTIES` with the smallest such error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PENALTIES = tuple(10 ** (k / 2) for k in range(-8, 7))


@dataclass(frozen=True)
class Alignment:
    """x in the space of y, shape (n_x, d_y); the penalty per sample; the share of the targets' variance explained."""

    x: Tensor
    penalty: float
    explained: float


def ridge(x: Tensor, targets: Tensor, weight: Tensor) -> Alignment:
    """Leave-one-out ridge predictions of `targets` (n, d_y) from `x` (n, d_x), rows weighted by `weight` (n,) > 0.

    Columns of x are centered and scaled to unit variance first; an x with several y enters as one row whose target is
    their mean, which gives the same fit as one row for each.
    """
    x, targets = x.double(), targets.double()
    weight = weight.double() * (len(x) / weight.double().sum())
    mean = weight @ x / len(x)
    scale = (weight @ (x - mean).square() / len(x)).sqrt()
    x = ((x - mean) / scale)[:, scale > 0]
    center = weight @ targets / len(x)
    residual = targets - center

    weighted = weight[:, None] * x
    eigenvalues, basis = torch.linalg.eigh(weighted.T @ x / len(x))
    eigenvalues = eigenvalues.clamp(min=0)  # they are not negative but for rounding
    x = x @ basis
    moments = basis.T @ (weighted.T @ residual) / len(x)

    best: tuple[float, float, Tensor] | None = None
    for penalty in PENALTIES:
        shrunk = 1 / (eigenvalues + penalty)
        leverage = weight / len(x) * (x.square() @ shrunk + 1)
        left_out = (residual - x @ (shrunk[:, None] * moments)) / (1 - leverage)[:, None]
        error = (weight @ left_out.square()).sum().item()
        if best is None or error < best[0]:
            best = (error, penalty, left_out)
    assert best is not None
    error, penalty, left_out = best
    explained = 1 - error / (weight @ residual.square()).sum().item()
    return Alignment(x=targets - left_out, penalty=penalty, explained=explained)
