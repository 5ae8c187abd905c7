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
from torch.quasirandom import SobolEngine

AREA_OF_Y = 1.0


def place_x(u: Tensor) -> Tensor:
    """Points of the unit square, (n, 2), to the upper half of the unit disc, uniform to uniform."""
    radius, angle = u[:, 0].sqrt(), math.pi * u[:, 1]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def place_y(x: Tensor, u: Tensor, temperature: float) -> Tensor:
    """Points u of the unit square, (..., 2), to those with the distribution p(y|x), by F^-1 in each coordinate."""
    a = x / temperature
    return torch.where(a == 0, u, torch.log1p(u * torch.expm1(a)) / a)


def sample_x(n: int, generator: Generator) -> Tensor:
    """Anchors, shape (n, 2), float64, uniform on the upper half of the unit disc."""
    return place_x(torch.rand(n, 2, dtype=torch.float64, generator=generator))


def sample_y(x: Tensor, temperature: float, generator: Generator, m: int = 1) -> Tensor:
    """Draws from p(y|x_i), m for each anchor, shape (n, m, 2)."""
    u = torch.rand(len(x), m, 2, dtype=x.dtype, generator=generator)
    return place_y(x[:, None, :], u, temperature)


def log_partition(x: Tensor, temperature: float) -> Tensor:
    """The exact log Z(x_i), shape (n,)."""
    a = x / temperature
    return torch.where(a == 0, 1.0, torch.expm1(a) / a).log().sum(dim=1)


def log_density(x: Tensor, y: Tensor, temperature: float) -> Tensor:
    """The log density log p(y_j|x_i), shape (n_x, n_y)."""
    return x @ y.T / temperature - log_partition(x, temperature)[:, None]


def log_popularity(x: Tensor, y: Tensor, temperature: float) -> Tensor:
    """The true log q(y_j) = log sum_i p(y_j|x_i), shape (n_y,)."""
    return torch.cat([log_density(x, some, temperature).logsumexp(dim=0) for some in torch.split(y, 512)])


def true_risk(temperature: float, pairs: int, seed: int) -> float:
    """E[-tau log p(y|x)], the mean over fresh pairs with the exact partition function.

    The pairs are placed by a scrambled Sobol sequence: 50,000 of them, the paper's number, then tell the risk to 3e-5
    and not to 1e-3 as independent ones do, which would show as an error of the methods at large n.
    """
    sequence = SobolEngine(dimension=4, scramble=True, seed=seed)
    u = sequence.draw(pairs, dtype=torch.float64)
    x = place_x(u[:, :2])
    y = place_y(x, u[:, 2:], temperature)
    return (temperature * log_partition(x, temperature) - (x * y).sum(dim=1)).mean().item()


def square_nodes(per_axis: int) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes (g, 2) and weights (g,) on the unit square, g = per_axis^2."""
    nodes, weights = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(per_axis))
    nodes, weights = (nodes + 1) / 2, weights / 2
    return torch.cartesian_prod(nodes, nodes), torch.outer(weights, weights).flatten()
