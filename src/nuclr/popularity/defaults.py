r"""Temperature and strength of a correction, found without labels.

**Temperature.** At a high temperature zeta is too smooth to reduce the hubs that queries meet. At a low one it
describes single queries of the bank, and other queries meet other hubs. In between, N_k of queries that were not fitted
is most even. To find this temperature, popularity is solved with a part of the queries, and N_k of the others is
counted. From the highest temperature downwards, the standard deviation of N_k falls until the best temperature is
passed. It is a smooth function of log temperature, so the minimum is taken from a parabola through the best temperature
and its two neighbors. As many queries as possible are fitted, because the best temperature falls with their number.

**Strength.** How much of zeta is sampling noise of the bank? zeta_j = tau log sum_b w_bj is estimated from the queries
b of a bank, w_bj = a_b exp(s_bj/tau) / Z_b. Another bank of the same kind would give another sum. How much zeta_j
depends on single queries is seen by leaving each of them out (the jackknife). With p_bj = w_bj / sum_c w_cj, query b's
share of the sum, and n queries of equal mass,

    variance of zeta_j  =  tau^2 (sum_b l_bj^2 - (sum_b l_bj)^2 / n),        l_bj = log(1 - p_bj)

If no query dominates, this is tau^2 (1/n_j - 1/n) with the effective number of queries n_j = 1 / sum_b p_bj^2. The term
1/n is noise that all items have in common, which changes no ranking. The variance of zeta over the items is the sum of
the mean of this noise and of what other queries would find again. The share of the latter, r, is the *reliability*.
Without hubs it is near 0; with hubs and a bank of thousands of queries it is near 1.

r zeta would be the best linear prediction of the zeta of an infinite bank at the same temperature. But the default
temperature already balances noise against detail, and shrinking its zeta a second time costs a little recall. What is
left to do is to switch off a correction that is mostly noise. So the strength is r^2 / (r^2 + (1 - r)^2): 0.99 at r =
0.9, and 0.06 at r = 0.2.
"""

import math
import warnings

import torch
from torch import Tensor

from nuclr.arrays import checked_rows, evenly_spaced
from nuclr.popularity.hubs import nearest
from nuclr.popularity.problem import COPY_LOGIT, copies
from nuclr.popularity.solver import ConvergenceWarning, solve

# Temperatures in units of the scores' standard deviation, highest first.
FACTORS = (1.0, 0.8, 0.63, 0.5, 0.4, 0.32, 0.25, 0.2, 0.16, 0.125, 0.1)
FEWEST = 100  # queries, and candidates: N_k of fewer is too noisy to choose by
COUNTED = 2000  # queries at most, of which N_k is counted
SHARE = 4  # one in four queries is counted
CANDIDATES = 4000
K = 10
TOLERANCE = 1e-2  # of the solver: a larger residual hardly changes ranks
PASSES = 100  # of the solver
ITEMS = 1000  # enough for two means over items
TILE = 2**22  # scores at a time: 32 MiB
LARGEST_SHARE = 1 - 1e-9  # of a query in an item's sum: without it nothing is left, and the logarithm is -20


def default_temperature(
    queries: Tensor,
    candidates: Tensor,
    weight: Tensor | None = None,
    strength: float | None = None,
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
    weight = (
        torch.ones(
            len(queries),
            dtype=torch.float64,
            device=queries.device,
        )
        if weight is None
        else weight
    )
    candidates = candidates[evenly_spaced(len(candidates), CANDIDATES).to(candidates.device)].to(queries)
    spreads: list[float] = []
    for factor in FACTORS:
        bias = rough_bias(queries[~counted], candidates, factor * scale, weight[~counted], strength)
        spreads.append(found_spread(queries[counted], candidates, bias, weight[counted]))
        if len(spreads) > 1 and spreads[-1] >= spreads[-2]:
            break
    return lowest_point(FACTORS[: len(spreads)], spreads) * scale


def rough_bias(
    queries: Tensor,
    candidates: Tensor,
    temperature: float,
    weight: Tensor,
    strength: float | None,
) -> Tensor:
    """Return strength times zeta, solved to a residual that is small enough to compare temperatures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        result = solve(
            checked_rows(queries),
            checked_rows(candidates),
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


def found_spread(
    queries: Tensor,
    candidates: Tensor,
    bias: Tensor,
    weight: Tensor,
) -> float:
    """Return the standard deviation of N_10 under score minus bias; a query counts by its weight."""
    _, rows = nearest(checked_rows(queries), checked_rows(candidates), K, bias)
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
    left, middle, right = map(math.log, factors[-3:])
    a, b, c = map(math.log, spreads[-3:])
    # Slopes at the centers of both intervals
    fall = (b - a) / (middle - left)
    rise = (c - b) / (right - middle)
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
    b = bank.double()
    g = gallery.double()
    square = float(((b.T @ b) * (g.T @ g)).sum()) / (len(b) * len(g))
    return float(max(square - float(b.mean(dim=0) @ g.mean(dim=0)) ** 2, 1e-12) ** 0.5)


def default_strength(reliability: float) -> float:
    """Return the strength of a correction whose temperature is chosen without labels.

    Args:
        reliability: Share of the variance of zeta that is not noise, between 0 and 1.

    Returns:
        Between 0 (noise) and 1.

    Example:
        >>> [round(default_strength(r), 2) for r in (0.0, 0.2, 0.5, 0.9, 1.0)]
        [0.0, 0.06, 0.5, 0.99, 1.0]

    """
    return reliability**2 / (reliability**2 + (1 - reliability) ** 2)


def zeta_reliability(
    queries: Tensor,
    mass: Tensor,
    log_z: Tensor,
    items: Tensor,
    temperature: float,
) -> float:
    """Return the share of the variance of zeta over items that is not sampling noise of the queries.

    A query does not count for items that equal it.

    Args:
        queries: Features of the queries that popularity was solved with, (n, d).
        mass: Their masses, (n,) float64.
        log_z: Their log partition functions at the solution, (n,) float64.
        items: Features of the items, (m, d); of more than 1,000, evenly spaced rows are used.
        temperature: Of the popularity problem.

    Returns:
        Between 0 and 1; 0 if zeta is constant.

    Example:
        >>> from nuclr.popularity import solve
        >>> generator = torch.Generator().manual_seed(0)
        >>> x, y = torch.nn.functional.normalize(torch.randn(2, 200, 16, generator=generator), dim=2)
        >>> def reliability(queries):
        ...     result = solve(queries, y, temperature=0.25)
        ...     return zeta_reliability(queries, result.problem.a, result.log_z, y, 0.25)
        >>> reliability(x) < 0.5
        True
        >>> reliability(torch.nn.functional.normalize(x + 0.5, dim=1)) > 0.9  # items near (1, ..., 1) are hubs
        True

    """
    y = items[evenly_spaced(len(items), ITEMS).to(items.device)].to(queries)
    log_mass = mass.log() - log_z
    common = float(mass.square().sum() / mass.sum().square())  # 1/n
    zeta = []
    noise = []
    rows = max(1, TILE // len(queries))
    for start in range(0, len(y), rows):
        scores = queries @ y[start : start + rows].T
        scores.masked_fill_(copies(queries, y[start : start + rows], scores), temperature * COPY_LOGIT)
        logits = scores.double() / temperature + log_mass[:, None]
        zeta.append(temperature * logits.logsumexp(dim=0))
        left_out = torch.log1p(-logits.softmax(dim=0).clamp(max=LARGEST_SHARE))
        noise.append(temperature**2 * (left_out.square().sum(dim=0) - common * left_out.sum(dim=0).square()))
    variance = float(torch.cat(zeta).var(correction=0))
    return max(0.0, 1 - float(torch.cat(noise).clamp(min=0).mean()) / variance) if variance > 0 else 0.0
