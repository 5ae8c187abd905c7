r"""How much of zeta is sampling noise of the bank: the strength of a correction without labels.

zeta_j = tau log sum_b w_bj is estimated from the queries b of a bank, w_bj = a_b exp(s_bj/tau) / Z_b. Another bank of
the same kind would give another sum. How much zeta_j depends on single queries is seen by leaving each of them out
(the jackknife). With p_bj = w_bj / sum_c w_cj, query b's share of the sum, and n queries of equal mass,

    variance of zeta_j  =  tau^2 (sum_b l_bj^2 - (sum_b l_bj)^2 / n),        l_bj = log(1 - p_bj)

If no query dominates, this is tau^2 (1/n_j - 1/n) with the effective number of queries n_j = 1 / sum_b p_bj^2. The term
1/n is noise that all items have in common, which changes no ranking. The variance of zeta over the items is the sum of
the mean of this noise and of what other queries would find again. The share of the latter, r, is the *reliability*.
Without hubs it is near 0; with hubs and a bank of thousands of queries it is near 1.

r zeta would be the best linear prediction of the zeta of an infinite bank at the same temperature. But the default
temperature already balances noise against detail, and shrinking its zeta a second time costs a little recall. What is
left to do is to switch off a correction that is mostly noise. So the strength is r^2 / (r^2 + (1 - r)^2): 0.99 at
r = 0.9, and 0.06 at r = 0.2.
"""

import torch
from torch import Tensor

from nuclr.popularity.problem import COPY_LOGIT, copies
from nuclr.popularity.tiles import evenly_spaced

ITEMS = 1000  # enough for two means over items
TILE = 2**22  # scores at a time: 32 MiB
LARGEST_SHARE = 1 - 1e-9  # of a query in an item's sum: without it nothing is left, and the logarithm is -20


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


def zeta_reliability(queries: Tensor, mass: Tensor, log_z: Tensor, items: Tensor, temperature: float) -> float:
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
    zeta, noise = [], []
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
