"""The constant of the global contrastive loss (GCL), and what no constant can fix.

A contrastive loss is defined up to an additive constant, which training never sees. As n grows, GCL converges to

    E_x tau log integral p(y) exp(s(x,y)/tau) dy - E s,         p(y) = E_x p(y|x),

while the true risk has Z(x) = integral exp(s(x,y)/tau) dy. At one fixed model the two differ by a number, so a uniform
popularity q = k n with the right k has a vanishing error there. The difference depends on the model, though. Along the
models s = alpha x.y, of which alpha = 1 is the true one, the losses have their minima at different alpha.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nuclr.popularity import solve
from nuclr.studies.toy import spaces

X_NODES, Y_NODES = 20, 24  # per axis, of the quadrature over x and over y
FINE_NODES = 48
ALPHAS = tuple(round(0.4 + 0.1 * k, 1) for k in range(15))


def gcl_log_constant(temperature: float) -> float:
    """Return log k for which a uniform popularity q = k n gives the true risk as n grows, by quadrature."""
    x, weight = spaces.half_disc_nodes(FINE_NODES)
    y, density = marginal(x, weight, temperature, FINE_NODES)
    log_mean = (x @ y.T / temperature + density.log()).logsumexp(dim=1)
    return (weight @ (log_mean - spaces.log_partition(x, temperature))).item()


def marginal(x: Tensor, weight: Tensor, temperature: float, per_axis: int) -> tuple[Tensor, Tensor]:
    """Return nodes of the unit square, (g, 2), and the mass p(y) dy of each under the distribution of y, (g,)."""
    y, measure = spaces.square_nodes(per_axis)
    mass = measure * (weight @ spaces.log_density(x, y, temperature).exp())
    return y, mass / mass.sum()


def risks_along_alpha(temperature: float) -> dict[str, Any]:
    """Return the losses of the models s = alpha x.y with infinitely many pairs, each relative to its own minimum.

    Returns:
        `alpha`; "mle", "gcl" and "nuclr", the losses minus their minima; and `minimum`, the alpha of each minimum.

    """
    x, weight = spaces.half_disc_nodes(X_NODES)
    y, mass = marginal(x, weight, temperature, Y_NODES)
    joint = weight[:, None] * spaces.log_density(x, y, temperature).exp() * spaces.square_nodes(Y_NODES)[1]
    mean_score = (joint * (x @ y.T)).sum().item()
    curves: dict[str, list[float]] = {"mle": [], "gcl": [], "nuclr": []}
    zeta = torch.zeros(len(y), dtype=torch.float64)
    for alpha in ALPHAS:
        scores = alpha * x @ y.T
        positive = alpha * mean_score
        exact = temperature * spaces.log_partition(alpha * x, temperature)
        curves["mle"].append((weight @ exact).item() - positive)
        curves["gcl"].append((weight @ _log_mean(scores, mass, temperature)).item() - positive)
        zeta = solve(
            scores=scores, temperature=temperature, tolerance=1e-6, x_weight=weight, y_weight=mass, init=zeta
        ).zeta
        profile = weight @ _log_mean(scores - zeta, mass, temperature) + mass @ zeta
        curves["nuclr"].append(profile.item() - positive)
    minimum = {name: _minimum(values) for name, values in curves.items()}
    shifted = {name: [v - min(values) for v in values] for name, values in curves.items()}
    return {"tau": temperature, "alpha": list(ALPHAS), **shifted, "minimum": minimum}


def _log_mean(scores: Tensor, mass: Tensor, temperature: float) -> Tensor:
    return temperature * (scores / temperature + mass.log()).logsumexp(dim=1)


def _minimum(values: list[float]) -> float:
    """Return the alpha at the minimum of a parabola through the lowest value and its neighbors."""
    k = min(max(values.index(min(values)), 1), len(values) - 2)
    before, at, after = values[k - 1 : k + 2]
    curvature = before - 2 * at + after
    shift = 0.0 if math.isclose(curvature, 0) else (before - after) / (2 * curvature)
    return ALPHAS[k] + (ALPHAS[1] - ALPHAS[0]) * shift
