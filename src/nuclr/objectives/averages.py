"""Running averages in logs, so that no temperature makes them overflow."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LOG_LEAST_ODDS = math.log(1e-8)


def running_log_mean(log_u: Tensor, log_phi: Tensor, gamma: float) -> Tensor:
    """Return log((1 - gamma) u + gamma phi) element by element; an unseen sample, log u = -inf, starts at phi.

    Args:
        log_u: log of the old averages, any shape.
        log_phi: log of the new values, the same shape.
        gamma: weight of the new values, in [0, 1].

    Returns:
        Log of the new averages.

    Example:
        >>> running_log_mean(torch.tensor([0.0, -math.inf]), torch.tensor([3.0, 4.0]), gamma=1.0)
        tensor([3., 4.])

    """
    log_old = log_u + (math.log1p(-gamma) if gamma < 1 else -math.inf)
    log_new = log_phi + (math.log(gamma) if gamma > 0 else -math.inf)
    return torch.where(log_u.isneginf(), log_phi, torch.logaddexp(log_old, log_new))


def proximal_log_mean(log_u: Tensor, log_phi: Tensor, log_scale: float) -> Tensor:
    """Return the running average whose weight grows with the old average: gamma = a u / (1 + a u).

    This is a proximal step on the dual of log (SCENT, Wei et al. 2026). Averages that are small, of samples that are
    far from all negatives, change slowly. The weight of the new values is at least 1e-8, so that u >= 1e-8 phi and
    gradients stay finite.

    Args:
        log_u: log of the old averages, any shape; -inf for an unseen sample, which starts at phi.
        log_phi: log of the new values, the same shape.
        log_scale: log a.

    Returns:
        Log of the new averages.

    Example:
        >>> proximal_log_mean(torch.tensor([0.0]), torch.tensor([math.log(3.0)]), log_scale=0.0).exp()
        tensor([2.])

    """
    log_odds = (log_u + log_scale).clamp(min=LOG_LEAST_ODDS)
    mixed = torch.logaddexp(log_u + logsigmoid(-log_odds), log_phi + logsigmoid(log_odds))
    return torch.where(log_u.isneginf(), log_phi, mixed)
