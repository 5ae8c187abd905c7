"""The toy problem, in which risk, partition function and popularity are known exactly.

Anchors x are uniform on the upper half of the unit disc, y lives on the unit square, the score is x.y, and p(y|x) =
exp(x.y/tau) / Z(x). Because x.y = x_1 y_1 + x_2 y_2 and the square is a product, density, partition function and
sampling factorize over the two coordinates: with a = x_d/tau

    z(a) = integral_0^1 exp(a t) dt = (exp(a) - 1)/a,     F^-1(u) = log(1 + u (exp(a) - 1))/a.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Generator, Tensor
from torch.quasirandom import SobolEngine

from nuclr.popularity import Solver
from nuclr.popularity import importance_sampling as sampling
from nuclr.popularity.problem import make_problem

TEMPERATURES = (0.2, 1.0)
AREA_OF_Y = 1.0
TRUE_RISK_PAIRS = 50_000
NODES = 48  # per axis, of the quadrature behind the constant of GCL


def half_disc(u: Tensor) -> Tensor:
    """Map points of the unit square, (n, 2), to the upper half of the unit disc; uniform stays uniform."""
    radius = u[:, 0].sqrt()
    angle = math.pi * u[:, 1]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def conditional_y(
    x: Tensor,
    u: Tensor,
    temperature: float,
) -> Tensor:
    """Map uniform points u of the unit square, (..., 2), to draws from p(y|x), by F^-1 in each coordinate."""
    a = x / temperature
    return torch.where(a == 0, u, torch.log1p(u * torch.expm1(a)) / a)


def sample_x(n: int, stream: Generator) -> Tensor:
    """Draw anchors, (n, 2) float64, uniform on the upper half of the unit disc."""
    return half_disc(torch.rand(n, 2, dtype=torch.float64, generator=stream))


def sample_y(
    x: Tensor,
    temperature: float,
    stream: Generator,
) -> Tensor:
    """Draw one y from p(y|x_i) per anchor, (n, 2)."""
    return conditional_y(x, torch.rand(len(x), 2, dtype=x.dtype, generator=stream), temperature)


def log_partition(x: Tensor, temperature: float) -> Tensor:
    """Return the exact log Z(x_i), (n,)."""
    a = x / temperature
    return torch.where(a == 0, 1.0, torch.expm1(a) / a).log().sum(dim=1)


def log_density(
    x: Tensor,
    y: Tensor,
    temperature: float,
) -> Tensor:
    """Return log p(y_j|x_i), (n_x, n_y)."""
    return x @ y.T / temperature - log_partition(x, temperature)[:, None]


def log_popularity(
    x: Tensor,
    y: Tensor,
    temperature: float,
) -> Tensor:
    """Return the true log q(y_j) = log sum_i p(y_j|x_i), (n_y,)."""
    return torch.cat([log_density(x, some, temperature).logsumexp(dim=0) for some in torch.split(y, 512)])


def expected_y(x: Tensor, temperature: float) -> Tensor:
    """Return E[y|x_i], (n, 2)."""
    a = x / temperature
    tiny = a.abs() < 1e-4  # the two terms are nearly equal there
    safe = torch.where(tiny, 1.0, a)
    return torch.where(tiny, 0.5 + a / 12, 1 / -torch.expm1(-safe) - 1 / safe)


@cache
def true_risk(temperature: float) -> float:
    """Estimate E[-tau log p(y|x)], the mean over new pairs with the exact partition function.

    The pairs come from a scrambled Sobol sequence. With 50,000 of them, the paper's number, the risk is accurate to
    3e-5; with independent pairs it would be accurate to 1e-3 only, which would show as an error of the methods at large
    n.
    """
    u = SobolEngine(dimension=4, scramble=True, seed=0).draw(TRUE_RISK_PAIRS, dtype=torch.float64)
    x = half_disc(u[:, :2])
    y = conditional_y(x, u[:, 2:], temperature)
    return (temperature * log_partition(x, temperature) - (x * y).sum(dim=1)).mean().item()


# -- quadrature --------------------------------------------------------------------------------------------------------


def square_nodes(per_axis: int) -> tuple[Tensor, Tensor]:
    """Return Gauss-Legendre nodes (g, 2) and weights (g,) on the unit square, g = per_axis^2."""
    nodes, weights = (torch.from_numpy(v) / 2 for v in np.polynomial.legendre.leggauss(per_axis))
    return torch.cartesian_prod(nodes + 0.5, nodes + 0.5), torch.outer(weights, weights).flatten()


def half_disc_nodes(per_axis: int) -> tuple[Tensor, Tensor]:
    """Return quadrature nodes (g, 2) of the upper half disc and their weights (g,), which sum to one: E_x f(x)."""
    unit, weight = square_nodes(per_axis)
    radius = unit[:, 0]
    return half_disc(torch.stack([radius.square(), unit[:, 1]], dim=1)), 2 * radius * weight


@cache
def gcl_log_constant(temperature: float) -> float:
    """Return log k for which a uniform popularity q = k n gives the true risk as n grows.

    A contrastive loss is defined up to an additive constant, which training never sees. As n grows, GCL converges to

        E_x tau log integral p(y) exp(s(x,y)/tau) dy - E s,         p(y) = E_x p(y|x),

    while the true risk has Z(x) = integral exp(s(x,y)/tau) dy. At one fixed model the two differ by a number.
    """
    x, weight = half_disc_nodes(NODES)
    y, measure = square_nodes(NODES)
    mass = measure * (weight @ log_density(x, y, temperature).exp())
    mass = mass / mass.sum()
    log_mean = (x @ y.T / temperature + mass.log()).logsumexp(dim=1)
    return (weight @ (log_mean - log_partition(x, temperature))).item()


# -- samples -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """One sample of n pairs with its true and its estimated popularity.

    Attributes:
        x: Anchors, (n, 2).
        scores: x @ y.T, (n, n).
        log_q_true: Log of the true popularity of each y, (n,).
        log_q: Log of the popularity estimated from the scores, (n,), up to a constant.

    """

    x: Tensor
    scores: Tensor
    log_q_true: Tensor
    log_q: Tensor


def generator(*numbers: int) -> Generator:
    """Return a random stream for this point of the study, independent of all others."""
    return Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0]))


def draw(
    n: int,
    temperature: float,
    stream: Generator,
) -> Draw:
    """Draw n pairs from the toy problem and estimate the popularity of their y from the scores alone."""
    x = sample_x(n, stream)
    y = sample_y(x, temperature, stream)
    # The score is x.y although neither x nor y has unit norm.
    result = Solver(tolerance=1e-6)(make_problem(x, y, temperature=temperature, norms="any"))
    return Draw(
        x,
        x @ y.T,
        log_popularity(x, y, temperature),
        result.zeta / temperature,
    )


def popularities(sample: Draw, temperature: float) -> dict[str, Tensor]:
    """Return log q_j of every method that uses a popularity."""
    uniform = sampling.uniform_log_popularity(sample.scores)
    return {
        "gcl": uniform,
        "gcl_constant": uniform + gcl_log_constant(temperature),
        "true_q": sample.log_q_true,
        "nuclr": sampling.scale_to_maximum(sample.log_q, sample.log_q_true),
        "nuclr_area": sampling.scale_to_area(sample.log_q, AREA_OF_Y),
    }
