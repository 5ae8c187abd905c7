"""The toy problem with a finite Y: 25 points of the unit square instead of all of it.

Each point v has the measure 1/25, so that Y has area one as before. With N_v samples at v, q~_v = 25 N_v ("counts")
turns the importance-sampling estimate into the finite sum itself,

    Z_hat(x) = sum_j exp(s(x,y_j)/tau) / q~(y_j) = (1/25) sum_v exp(s(x,v)/tau) = Z(x),

once every point has occurred. Nothing is left to estimate, the error of the estimate is zero, and the risk is that of
exact likelihood. A uniform popularity stays wrong here, too.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from nuclr.popularity import Solver
from nuclr.popularity import importance_sampling as sampling
from nuclr.popularity.problem import make_problem
from nuclr.studies.toy import spaces
from nuclr.studies.toy.slopes import mean_std
from nuclr.studies.toy.spaces import TEMPERATURES, generator

PER_AXIS = 5
METHODS = ("mle", "gcl", "nuclr", "counts")
LARGEST = 800
RISK_NODES = 48


def finite_study(
    seeds: int, sizes: tuple[int, ...], base_seed: int = 0, advance: Callable[[int], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Compute the error of each method's risk and its error term on samples of each size.

    Args:
        seeds: Number of samples per size.
        sizes: Numbers of pairs n; those above `LARGEST` are left out.
        base_seed: Start of the random numbers.
        advance: Called with n^2 after each sample.

    Returns:
        One record per temperature, n and method; `difference` is |risk - risk of exact likelihood|, and `seen` the
        share of the samples in which every point occurred.

    """
    records = []
    for t, temperature in enumerate(TEMPERATURES):
        truth = finite_risk(temperature)
        for n in finite_sizes(sizes):
            samples = []
            for seed in range(seeds):
                samples.append(measure_finite(n, temperature, generator(base_seed, t, n, seed, 2)))
                advance(n * n)
            seen = float(np.mean([sample["seen"] for sample in samples]))
            for method in METHODS:
                risk, exact, terms = (
                    np.array([sample[key][name] for sample in samples])
                    for key, name in (("risk", method), ("risk", "mle"), ("error_term", method))
                )
                records.append(
                    {
                        "tau": temperature,
                        "n": n,
                        "method": method,
                        "seeds": seeds,
                        "seen": seen,
                        **mean_std("error", np.abs(risk - truth)),
                        **mean_std("difference", np.abs(risk - exact)),
                        **mean_std("error_term", terms),
                    }
                )
    return records


def finite_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of the finite study."""
    return tuple(n for n in sizes if n <= LARGEST)


def points() -> Tensor:
    """Return the points of Y, (25, 2): the centers of equal cells."""
    centers = (torch.arange(PER_AXIS, dtype=torch.float64) + 0.5) / PER_AXIS
    return torch.cartesian_prod(centers, centers)


def log_density(x: Tensor, temperature: float) -> Tensor:
    """Return log p(v|x_i) with respect to the measure 1/25 per point, (n, 25)."""
    return (x @ points().T / temperature).log_softmax(dim=1) + np.log(PER_AXIS**2)


def finite_risk(temperature: float) -> float:
    """Return the true risk E[-tau log p(y|x)] by quadrature over x."""
    x, weight = spaces.half_disc_nodes(RISK_NODES)
    logs = log_density(x, temperature)
    return -temperature * (weight @ (logs.exp() / PER_AXIS**2 * logs).sum(dim=1)).item()


def measure_finite(n: int, temperature: float, stream: Generator) -> dict[str, Any]:
    """Draw n pairs and return, per method, the empirical risk and the paper's error term, and whether all were seen."""
    x = spaces.sample_x(n, stream)
    logs = log_density(x, temperature)
    value = torch.multinomial(logs.exp(), 1, generator=stream).squeeze(1)
    y = points()[value]
    scores = x @ y.T
    log_q_true = logs.logsumexp(dim=0)[value]
    counts = torch.bincount(value, minlength=PER_AXIS**2)
    solved = Solver(tolerance=1e-6)(make_problem(x, y, temperature=temperature, norms="any")).zeta / temperature
    log_q = {
        "gcl": sampling.uniform_log_popularity(scores),
        "nuclr": sampling.scale_to_maximum(solved, log_q_true),
        "counts": (PER_AXIS**2 * counts[value].double()).log(),
    }
    risk = {"mle": -temperature * logs[torch.arange(n), value].mean().item()}
    risk |= {m: sampling.empirical_risk_from_popularity(scores, q, temperature).item() for m, q in log_q.items()}
    terms = sampling.error_term(scores, torch.stack(list(log_q.values())), log_q_true, temperature).tolist()
    return {
        "risk": risk,
        "error_term": {"mle": 0.0, **dict(zip(log_q, terms, strict=True))},
        "seen": bool((counts > 0).all()),
    }
