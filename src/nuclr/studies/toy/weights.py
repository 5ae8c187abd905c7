"""Bias and variance of the estimated partition function Z_hat(x), for several ways to weight the same samples.

Every weighting that sums to one is unbiased. The balance heuristic has the smallest sum of second moments of all of
them, hence the smallest variance up to the squares of the means, which differ less (Veach and Guibas 1995).
"""

import math
from typing import Any

import torch
from torch import Tensor

from nuclr.popularity import importance_sampling as sampling
from nuclr.studies.toy import spaces
from nuclr.studies.toy.slopes import NORMAL_95
from nuclr.studies.toy.spaces import TEMPERATURES, generator

WEIGHTS: tuple[sampling.Heuristic, ...] = ("balance", "uniform", "single")
NODES_PER_AXIS = 32
REPEATS = 400
SAMPLES_PER_PROPOSAL = (1, 4, 16)
SINGLE = 32  # proposals tried one at a time
TARGETS = 32  # anchors x whose Z is estimated
EXPONENTS = tuple(k / 4 for k in range(9))  # of the weights p_k^b: 0 is uniform, 1 the balance heuristic


def compare_weights(sizes: tuple[int, ...], base_seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Compute bias, variance and second moment of Z_hat(x) / Z(x) at both temperatures.

    Args:
        sizes: Numbers of proposals n.
        base_seed: Start of the random numbers.

    Returns:
        `sampling`: the variance per temperature, n, m, weights and source ("quadrature" or "repeated draws"), its
        median and its 10 % and 90 % quantiles over anchors x. All weights use the same number m n of samples: "single"
        draws them all from the proposal of one anchor, and its median is also over several choices of that anchor.
        `bias`: the mean of Z_hat/Z - 1 with its 95 % interval, from repeated draws at the smallest n.
        `exponents`: the mean variance and the mean second moment for weights proportional to p_k^b, at the smallest n.

    """
    variances, biases, exponents = [], [], []
    for t, temperature in enumerate(TEMPERATURES):
        stream = generator(base_seed, t)
        target = spaces.sample_x(TARGETS, stream)
        anchors = spaces.sample_x(max(sizes), stream)
        few = anchors[: sizes[0]]
        for n in sizes:
            for weights in WEIGHTS:
                values = by_quadrature(target, anchors[:n], temperature, weights)
                variances.append(_record(temperature, n, 1, weights, "quadrature", values))
        repeated = {}
        for m in SAMPLES_PER_PROPOSAL:
            repeated[m] = repeat_estimates(target, few, temperature, "balance", m, base_seed)
            variances.append(_record(temperature, sizes[0], m, "balance", "repeated draws", repeated[m].var(dim=0)))
        uniform = repeat_estimates(target, few, temperature, "uniform", 1, base_seed)
        for weights, ratios in (("balance", repeated[1]), ("uniform", uniform)):
            biases.append({"tau": temperature, "n": sizes[0], "weights": weights, **_bias(ratios)})
        exponents += [
            {"tau": temperature, "n": sizes[0], **by_exponent(target, few, temperature, exponent)}
            for exponent in EXPONENTS
        ]
    return {"sampling": variances, "bias": biases, "exponents": exponents}


def by_quadrature(target: Tensor, x: Tensor, temperature: float, weights: sampling.Heuristic) -> Tensor:
    """Return Var Z_hat / Z^2 with m = 1, (targets,), or (targets * SINGLE,) for "single", one part per proposal."""
    nodes, measure = spaces.square_nodes(NODES_PER_AXIS)
    log_density = spaces.log_density(x, nodes, temperature).T
    log_integrand = spaces.log_density(target, nodes, temperature)
    if weights == "single":
        alone = (log_density[:, k : k + 1] for k in range(min(SINGLE, len(x))))
        return torch.cat([sampling.variance(log_integrand, p, torch.zeros_like(p), measure, len(x)) for p in alone])
    return sampling.variance(log_integrand, log_density, sampling.log_weights(log_density, weights), measure)


def by_exponent(target: Tensor, x: Tensor, temperature: float, exponent: float) -> dict[str, float]:
    """Return the variance and the sum of second moments of Z_hat / Z for weights proportional to p_k^exponent.

    Both are means over the targets, with m = 1. Exponent 0 gives uniform weights, 1 the balance heuristic and 2 the
    power heuristic.
    """
    nodes, measure = spaces.square_nodes(NODES_PER_AXIS)
    log_density = spaces.log_density(x, nodes, temperature).T
    log_weight = (exponent * log_density).log_softmax(dim=1)
    first, second = sampling.moments(spaces.log_density(target, nodes, temperature), log_density, log_weight, measure)
    return {
        "exponent": exponent,
        "variance": (second - first.square()).sum(dim=1).mean().item(),
        "second_moment": second.sum(dim=1).mean().item(),
        "mean": first.sum(dim=1).mean().item(),
    }


def repeat_estimates(
    target: Tensor, x: Tensor, temperature: float, weights: sampling.Heuristic, m: int, base_seed: int
) -> Tensor:
    """Return `REPEATS` independent estimates of Z_hat / Z with m samples per proposal, (repeats, targets)."""
    stream = generator(base_seed, m, len(x))
    log_z = spaces.log_partition(target, temperature)
    proposal = torch.arange(len(x))
    estimates = []
    for _ in range(REPEATS):
        y = spaces.sample_y(x, temperature, stream, m).flatten(0, 1)
        log_density = spaces.log_density(x, y, temperature).T.reshape(len(x), m, len(x))
        log_weight = sampling.log_weights(log_density, weights)
        log_integrand = (target @ y.T / temperature).reshape(-1, len(x), m)
        own = log_density[proposal, :, proposal], log_weight[proposal, :, proposal]
        estimates.append((sampling.log_partition(log_integrand, *own) - log_z).exp())
    return torch.stack(estimates)


def _bias(ratios: Tensor) -> dict[str, float]:
    """Return the mean of Z_hat/Z - 1 over targets and repetitions; the interval is over repetitions."""
    means = ratios.mean(dim=1) - 1
    half = NORMAL_95 * means.std().item() / math.sqrt(len(means))
    bias = means.mean().item()
    return {"bias": bias, "low": bias - half, "high": bias + half, "repeats": len(means)}


def _record(tau: float, n: int, m: int, weights: str, source: str, values: Tensor) -> dict[str, Any]:
    low, median, high = values.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=values.dtype)).tolist()
    return {
        "tau": tau,
        "n": n,
        "m": m,
        "weights": weights,
        "source": source,
        "relative_variance_median": median,
        "relative_variance_q10": low,
        "relative_variance_q90": high,
    }
