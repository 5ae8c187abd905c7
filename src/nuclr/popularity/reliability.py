r"""How much of zeta is sampling noise of the bank, and how much less it is corrected therefore.

zeta_j = tau log sum_b w_bj is estimated from the queries b of a bank, w_bj = a_b exp(s_bj/tau) / Z_b. Another bank of
the same kind would give another sum. How much zeta_j depends on single queries is seen by leaving each of them out (the
jackknife). With p_bj = w_bj / sum_c w_cj, query b's share of the sum, and queries whose masses have the effective
number n,

    variance of zeta_j  =  tau^2 (sum_b l_bj^2 - (sum_b l_bj)^2 / n),        l_bj = log(1 - p_bj)

If no query dominates, this is tau^2 (1/n_j - 1/n) with the effective number of queries n_j = 1 / sum_b p_bj^2. The term
1/n is noise that all items have in common, which changes no ranking. The prior count is not a sample and adds no noise.
The variance of zeta over the items is the sum of the mean of this noise and of what other queries would find again. The
share of the latter, r, is the *reliability*. Without hubs it is near 0; with hubs and a bank of thousands of queries it
is near 1.

A correction is multiplied by min(1, 2 r), so that one that is mostly noise is switched off.
"""

from dataclasses import replace

import torch
from torch import Tensor

from nuclr.arrays import evenly_spaced
from nuclr.popularity.problem import Problem

ITEMS = 1000  # enough for two means over items
TILE = 2**22  # scores at a time: 32 MiB
LARGEST_SHARE = 1 - 1e-9  # of a query in an item's sum: without it nothing is left, and the logarithm is -20


def zeta_reliability(problem: Problem, log_z: Tensor) -> float:
    """Return the share of the variance of zeta over items that is not sampling noise of the queries.

    Args:
        problem: The popularity problem; of more than 1,000 candidates, evenly spaced ones are used.
        log_z: Log partition functions of its anchors at the solution, (n,) float64.

    Returns:
        Between 0 and 1; 0 if zeta is constant.

    Example:
        >>> from nuclr.popularity import solve
        >>> generator = torch.Generator().manual_seed(0)
        >>> x, y = torch.nn.functional.normalize(torch.randn(2, 200, 16, generator=generator), dim=2)
        >>> def reliability(queries):
        ...     result = solve(queries, y, temperature=0.25)
        ...     return zeta_reliability(result.problem, result.log_z)
        >>> reliability(x) < 0.5
        True
        >>> reliability(torch.nn.functional.normalize(x + 0.5, dim=1)) > 0.9  # items near (1, ..., 1) are hubs
        True

    """
    assert isinstance(problem.x, Tensor) and isinstance(problem.y, Tensor)
    sampled = problem.x.any(dim=1)  # not the prior count
    mass = problem.a[sampled]
    common = float(mass.square().sum() / mass.sum().square())  # 1/n
    log_mass = problem.a.log() - log_z
    columns = evenly_spaced(len(problem.b), ITEMS).to(problem.y.device)
    zero = torch.zeros(len(problem.b), dtype=problem.dtype, device=problem.y.device)
    zeta = []
    noise = []
    for part in torch.split(columns, max(1, TILE // len(mass))):
        some = replace(problem, b=problem.b[part], y=problem.y[part])
        logits = some.logits(slice(None), slice(None), zero[part]).double() + log_mass[:, None]
        zeta.append(problem.temperature * logits.logsumexp(dim=0))
        left_out = torch.log1p(-logits.softmax(dim=0)[sampled].clamp(max=LARGEST_SHARE))
        noise.append(left_out.square().sum(dim=0) - common * left_out.sum(dim=0).square())
    variance = float(torch.cat(zeta).var(correction=0))
    if variance <= 0:
        return 0.0
    mean_noise = problem.temperature**2 * float(torch.cat(noise).clamp(min=0).mean())
    return max(0.0, 1 - mean_noise / variance)
