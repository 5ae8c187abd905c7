"""The temperature at which a correction makes a search most even, found without labels.

At a high temperature zeta is too smooth to reduce the hubs that queries meet. At a low one it describes single queries
of the bank, and other queries meet other hubs. In between, N_k of queries that were not fitted is most even. To find
this temperature, popularity is solved with a part of the queries, and N_k of the others is counted. From the highest
temperature downwards, the standard deviation of N_k falls until the best temperature is passed. As many queries as
possible are fitted, because the best temperature falls with their number.
"""

import math
import warnings

import torch
from torch import Tensor

from nuclr.popularity.neighbors import nearest
from nuclr.popularity.solver import ConvergenceWarning, solve

# Temperatures in units of the scores' standard deviation, highest first.
FACTORS = (1.0, 0.8, 0.6, 0.4, 0.25, 0.15, 0.1)
FACTOR_OF_SMALL_BANKS = 0.6
FEWEST = 100  # queries, and candidates: N_k of fewer is too noisy to choose by
COUNTED = 2000  # queries, at most half of them
CANDIDATES = 4000
K = 10
TOLERANCE, PASSES = 1e-2, 100  # of the solver: a larger residual hardly changes ranks


def default_temperature(queries: Tensor, candidates: Tensor) -> float:
    """Return the temperature at which held-out queries find the candidates most evenly.

    Args:
        queries: Features, (n, d), unit norm. Every other row is fitted; of more than 4,000 rows, all but 2,000.
        candidates: Features of the items that they choose from, (m, d), unit norm.

    Returns:
        One of seven multiples of the standard deviation of the scores; 0.6 standard deviations if there are fewer than
        100 queries or candidates.

    Example:
        >>> x = torch.nn.functional.normalize(torch.arange(24.0).sin().reshape(8, 3), dim=1)
        >>> default_temperature(x, x) == 0.6 * score_std(x, x)  # few
        True

    """
    scale = score_std(queries, candidates)
    if min(len(queries), len(candidates)) < FEWEST:
        return FACTOR_OF_SMALL_BANKS * scale
    step = max(2, math.ceil(len(queries) / COUNTED))
    counted = torch.arange(len(queries), device=queries.device) % step == 1
    rows = torch.linspace(0, len(candidates) - 1, min(CANDIDATES, len(candidates)), dtype=torch.float64).round().long()
    candidates = candidates[rows.to(candidates.device)].to(queries)
    best, lowest = FACTORS[0], math.inf
    for factor in FACTORS:
        spread = held_out_spread(queries[~counted], queries[counted], candidates, factor * scale)
        if spread >= lowest:
            break
        best, lowest = factor, spread
    return best * scale


def held_out_spread(fitted: Tensor, counted: Tensor, candidates: Tensor, temperature: float) -> float:
    """Return the standard deviation of N_10 of `counted` after the correction by the popularity among `fitted`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        zeta = solve(fitted, candidates, temperature=temperature, tolerance=TOLERANCE, max_iterations=PASSES).zeta
    _, rows = nearest(counted, candidates, K, zeta)
    return float(torch.bincount(rows.flatten(), minlength=len(candidates)).double().std(correction=0))


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
