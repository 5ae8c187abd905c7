"""The temperature at which a correction makes a search most even, found without labels.

At a high temperature zeta is too smooth to reduce the hubs that queries meet. At a low one it describes single queries
of the bank, and other queries meet other hubs. In between, N_k of queries that were not fitted is most even. To find
this temperature, popularity is solved with a part of the queries, and N_k of the others is counted. From the highest
temperature downwards, the standard deviation of N_k falls until the best temperature is passed. It is a smooth function
of log temperature, so the minimum is taken from a parabola through the best temperature and its two neighbors. As many
queries as possible are fitted, because the best temperature falls with their number.
"""

import math
import warnings

import torch
from torch import Tensor

from nuclr.popularity.neighbors import nearest
from nuclr.popularity.reliability import default_strength, zeta_reliability
from nuclr.popularity.solver import ConvergenceWarning, solve
from nuclr.popularity.tiles import evenly_spaced

# Temperatures in units of the scores' standard deviation, highest first.
FACTORS = (1.0, 0.8, 0.63, 0.5, 0.4, 0.32, 0.25, 0.2, 0.16, 0.125, 0.1)
FEWEST = 100  # queries, and candidates: N_k of fewer is too noisy to choose by
COUNTED, SHARE = 2000, 4  # so many queries are counted, at most one in four
CANDIDATES = 4000
K = 10
TOLERANCE, PASSES = 1e-2, 100  # of the solver: a larger residual hardly changes ranks


def default_temperature(
    queries: Tensor, candidates: Tensor, weight: Tensor | None = None, strength: float | None = None
) -> float:
    """Return the temperature at which held-out queries find the candidates most evenly.

    Args:
        queries: Features, (n, d), unit norm. One in four is counted, at most 2,000, and the others are fitted.
        candidates: Features of the items that they choose from, (m, d), unit norm.
        weight: Positive weights of the queries, (n,). None: all equal.
        strength: Of the correction. None: at each temperature, the one that follows from the noise in zeta
            (`default_strength`).

    Returns:
        A temperature between 1 and 0.1 standard deviations of the scores; 1 standard deviation if there are fewer than
        100 queries or candidates.

    Example:
        >>> x = torch.nn.functional.normalize(torch.arange(24.0).sin().reshape(8, 3), dim=1)
        >>> default_temperature(x, x) == score_std(x, x)  # few
        True

    """
    scale = score_std(queries, candidates)
    if min(len(queries), len(candidates)) < FEWEST:
        return FACTORS[0] * scale
    counted = torch.arange(len(queries), device=queries.device) % max(SHARE, math.ceil(len(queries) / COUNTED)) == 1
    weight = torch.ones(len(queries), dtype=torch.float64, device=queries.device) if weight is None else weight
    candidates = candidates[evenly_spaced(len(candidates), CANDIDATES).to(candidates.device)].to(queries)
    spreads: list[float] = []
    for factor in FACTORS:
        bias = rough_bias(queries[~counted], candidates, factor * scale, weight[~counted], strength)
        spreads.append(found_spread(queries[counted], candidates, bias, weight[counted]))
        if len(spreads) > 1 and spreads[-1] >= spreads[-2]:
            break
    return lowest_point(FACTORS[: len(spreads)], spreads) * scale


def rough_bias(
    queries: Tensor, candidates: Tensor, temperature: float, weight: Tensor, strength: float | None
) -> Tensor:
    """Return strength times zeta, solved to a residual that is small enough to compare temperatures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        result = solve(
            queries,
            candidates,
            temperature=temperature,
            x_weight=weight,
            exclude_copies=True,
            method="anderson",
            tolerance=TOLERANCE,
            max_iterations=PASSES,
        )
    if strength is None:
        reliability = zeta_reliability(queries, result.problem.a, result.log_z, candidates, temperature)
        strength = default_strength(reliability)
    return strength * result.zeta


def found_spread(queries: Tensor, candidates: Tensor, bias: Tensor, weight: Tensor) -> float:
    """Return the standard deviation of N_10 under score minus bias; a query counts by its weight."""
    _, rows = nearest(queries, candidates, K, bias)
    counts = torch.bincount(rows.flatten(), weight.to(rows.device).repeat_interleave(K), minlength=len(candidates))
    return float(counts.std(correction=0))


def lowest_point(factors: tuple[float, ...], spreads: list[float]) -> float:
    """Return the factor with the lowest spread, refined by a parabola in log factor and log spread.

    Args:
        factors: In descending order.
        spreads: One per factor, falling up to the last but one.

    Returns:
        The minimum of the parabola through the last three points if the last one has risen and all are positive, else
        the last point before the rise.

    Example:
        >>> round(lowest_point((1.0, 0.5, 0.25), [2.0, 1.0, 2.0]), 6)  # symmetric
        0.5
        >>> lowest_point((1.0, 0.5), [1.0, 2.0])  # no point on the other side
        1.0

    """
    if len(spreads) < 2 or spreads[-1] < spreads[-2]:
        return factors[-1]
    if len(spreads) < 3 or not min(spreads[-3:]) > 0:
        return factors[-2]
    (left, middle, right), (a, b, c) = map(math.log, factors[-3:]), map(math.log, spreads[-3:])
    fall, rise = (b - a) / (middle - left), (c - b) / (right - middle)  # slopes at the centers of both intervals
    curvature = (rise - fall) / (right - left) * 2
    return math.exp((left + middle) / 2 - fall / curvature)


def score_std(bank: Tensor, gallery: Tensor) -> float:
    """Return the standard deviation of all scores <b, g> without computing them.

    E s^2 is the inner product of the two second-moment matrices, divided by the number of scores.

    Args:
        bank: (n_bank, d).
        gallery: (n_gallery, d).

    Returns:
        The standard deviation (not less than 1e-6).

    Example:
        >>> round(score_std(torch.eye(2), torch.eye(2)), 3)
        0.5

    """
    b, g = bank.double(), gallery.double()
    square = float(((b.T @ b) * (g.T @ g)).sum()) / (len(b) * len(g))
    return float(max(square - float(b.mean(dim=0) @ g.mean(dim=0)) ** 2, 1e-12) ** 0.5)
