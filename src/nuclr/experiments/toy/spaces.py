"""The toy problem, in which everything is known.

Anchors x are uniform on the upper half of the unit disc, y lives on the unit square, the score is x.y, and
p(y|x) = exp(x.y/tau) / Z(x). As x.y = x_1 y_1 + x_2 y_2 and the square is a product, density, partition function and
sampling factorise over the two coordinates: with a = x_d/tau

    z(a) = integral_0^1 exp(a t) dt = (exp(a) - 1)/a,     F^-1(u) = log(1 + u (exp(a) - 1))/a.
"""

import math

import numpy as np
import torch
from torch import Generator, Tensor

AREA_OF_Y = 1.0


def sample_x(n: int, generator: Generator) -> Tensor:
    """Anchors, shape (n, 2), float64, uniform on the upper half of the unit disc."""
    u, v = torch.rand(2, n, dtype=torch.float64, generator=generator)
    radius, angle = u.sqrt(), math.pi * v
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def sample_y(x: Tensor, temperature: float, generator: Generator, m: int = 1) -> Tensor:
    """Draws from p(y|x_i), m for each anchor, shape (n, m, 2), by the inverse distribution function."""
    a = (x / temperature)[:, None, :]
    u = torch.rand(len(x), m, 2, dtype=x.dtype, generator=generator)
    return torch.where(a == 0, u, torch.log1p(u * torch.expm1(a)) / a)


def log_partition(x: Tensor, temperature: float) -> Tensor:
    """The exact log Z(x_i), shape (n,)."""
    a = x / temperature
    return torch.where(a == 0, 1.0, torch.expm1(a) / a).log().sum(dim=1)


def log_density(x: Tensor, y: Tensor, temperature: float) -> Tensor:
    """The log density log p(y_j|x_i), shape (n_x, n_y)."""
    return x @ y.T / temperature - log_partition(x, temperature)[:, None]


def log_popularity(x: Tensor, y: Tensor, temperature: float) -> Tensor:
    """The true log q(y_j) = log sum_i p(y_j|x_i), shape (n_y,)."""
    return log_density(x, y, temperature).logsumexp(dim=0)


def true_risk(temperature: float, pairs: int, generator: Generator) -> tuple[float, float]:
    """E[-tau log p(y|x)] over fresh pairs with the exact partition function, and its standard error."""
    x = sample_x(pairs, generator)
    y = sample_y(x, temperature, generator).squeeze(1)
    losses = temperature * log_partition(x, temperature) - (x * y).sum(dim=1)
    return losses.mean().item(), losses.std().item() / math.sqrt(pairs)


def square_nodes(per_axis: int) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes (g, 2) and weights (g,) on the unit square, g = per_axis^2."""
    nodes, weights = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(per_axis))
    nodes, weights = (nodes + 1) / 2, weights / 2
    return torch.cartesian_prod(nodes, nodes), torch.outer(weights, weights).flatten()
