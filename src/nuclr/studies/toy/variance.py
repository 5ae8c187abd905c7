"""Variance of the estimated partition function, for each choice of weights and each number of samples.

For fixed proposals x_1 ... x_n the variance of Z_hat(x) is an integral over the unit square, computed by quadrature.
The empirical variance of repeated draws is reported next to it as a check.
"""

from typing import Any

import torch
from torch import Tensor

from nuclr.popularity import importance_sampling as sampling
from nuclr.studies.toy import spaces
from nuclr.studies.toy.spaces import TEMPERATURES, generator

WEIGHTS: tuple[sampling.Heuristic, ...] = ("balance", "uniform", "single")
NODES_PER_AXIS = 32
REPEATS = 400
SAMPLES_PER_PROPOSAL = (1, 4, 16)
SINGLE = 32  # proposals tried one at a time


def sampling_variances(sizes: tuple[int, ...], targets: int = 32, base_seed: int = 0) -> list[dict[str, Any]]:
    """Compute the relative variance Var Z_hat(x) / Z(x)^2, its median and its 10 % and 90 % quantiles over anchors x.

    All three weights use the same number m n of samples: "single" draws them all from the proposal of one anchor, and
    its median is also over several choices of that anchor.

    Args:
        sizes: Numbers of proposals n.
        targets: Number of anchors x.
        base_seed: Start of the random numbers.

    Returns:
        One record per temperature, n, m, weights and source ("quadrature" or "repeated draws").

    """
    records = []
    for t, temperature in enumerate(TEMPERATURES):
        stream = generator(base_seed, t)
        target = spaces.sample_x(targets, stream)
        anchors = spaces.sample_x(max(sizes), stream)
        for n in sizes:
            x = anchors[:n]
            for weights in WEIGHTS:
                values = by_quadrature(target, x, temperature, weights)
                records.append(_record(temperature, n, 1, weights, "quadrature", values))
        for m in SAMPLES_PER_PROPOSAL:
            values = by_repetition(target, anchors[: sizes[0]], temperature, "balance", m, base_seed)
            records.append(_record(temperature, sizes[0], m, "balance", "repeated draws", values))
    return records


def by_quadrature(target: Tensor, x: Tensor, temperature: float, weights: sampling.Heuristic) -> Tensor:
    """Return Var Z_hat / Z^2 with m = 1, (targets,), or (targets * SINGLE,) for "single", one part per proposal."""
    nodes, measure = spaces.square_nodes(NODES_PER_AXIS)
    log_density = spaces.log_density(x, nodes, temperature).T
    log_integrand = spaces.log_density(target, nodes, temperature)
    if weights == "single":
        alone = (log_density[:, k : k + 1] for k in range(min(SINGLE, len(x))))
        return torch.cat([sampling.variance(log_integrand, p, torch.zeros_like(p), measure, len(x)) for p in alone])
    return sampling.variance(log_integrand, log_density, sampling.log_weights(log_density, weights), measure)


def by_repetition(
    target: Tensor, x: Tensor, temperature: float, weights: sampling.Heuristic, m: int, base_seed: int
) -> Tensor:
    """Return the variance of `REPEATS` independent estimates of Z_hat / Z with m samples per proposal, (targets,)."""
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
    return torch.stack(estimates).var(dim=0)


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
