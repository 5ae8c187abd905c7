"""The toy study: how far is each empirical risk from the truth, and how far the popularity it rests on?

For each temperature and each n, at least `seeds` samples of n pairs are drawn. For each, the empirical risk is formed
with

- "mle": the exact partition function,
- "gcl": a uniform popularity q = n,
- "true_q": the true popularity,
- "nuclr": the popularity from the convex problem, its constant from the ratio of maxima (as the paper does),
- "nuclr_area": the same, its constant from sum_j 1/q_j = area of Y, which needs no truth,

and compared with the true risk: error = |empirical risk - true risk|.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from nuclr.popularity import importance_sampling as sampling
from nuclr.popularity import solve
from nuclr.studies.toy import spaces

TEMPERATURES = (0.2, 1.0)
SIZES = (100, 200, 400, 800, 1600, 3200)
METHODS = ("mle", "gcl", "true_q", "nuclr", "nuclr_area")
TRUE_RISK_PAIRS = 50_000


@dataclass(frozen=True)
class Draw:
    """One sample of n pairs with its true and its estimated popularity, as logs, shape (n,) each."""

    x: Tensor
    y: Tensor
    scores: Tensor
    log_q_true: Tensor
    log_q: Tensor
    iterations: int
    residual: float


def generator(*numbers: int) -> Generator:
    """A stream of random numbers for this place in the study, independent of all others."""
    return Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0]))


def draw(n: int, temperature: float, stream: Generator) -> Draw:
    """Draw n pairs from the toy problem, and the popularity of their y estimated from the scores alone."""
    x = spaces.sample_x(n, stream)
    y = spaces.sample_y(x, temperature, stream).squeeze(1)
    result = solve(x=x, y=y, temperature=temperature, tolerance=1e-6)
    return Draw(
        x=x,
        y=y,
        scores=x @ y.T,
        log_q_true=spaces.log_popularity(x, y, temperature),
        log_q=result.zeta / temperature,
        iterations=result.iterations,
        residual=result.residual,
    )


def popularities(sample: Draw) -> dict[str, Tensor]:
    """The log q_j of every method that uses a popularity."""
    return {
        "gcl": sampling.uniform_log_popularity(sample.scores),
        "true_q": sample.log_q_true,
        "nuclr": sampling.scale_to_maximum(sample.log_q, sample.log_q_true),
        "nuclr_area": sampling.scale_to_area(sample.log_q, spaces.AREA_OF_Y),
    }


def measure(sample: Draw, temperature: float) -> dict[str, dict[str, float]]:
    """Method -> its empirical risk, and where it uses a popularity the bound's error term and the rank correlation."""
    log_z = spaces.log_partition(sample.x, temperature)
    exact = sampling.empirical_risk(sample.scores.diagonal(), log_z, temperature)
    found: dict[str, dict[str, float]] = {"mle": {"risk": exact.item()}}
    for method, log_q in popularities(sample).items():
        risk = sampling.empirical_risk_from_popularity(sample.scores, log_q, temperature)
        found[method] = {"risk": risk.item(), "bound_term": sampling.bound_term(log_q, sample.log_q_true).item()}
        if method.startswith("nuclr"):
            found[method]["rank_correlation"] = rank_correlation(log_q, sample.log_q_true)
    return found


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's correlation of two vectors without ties."""
    ranks = torch.stack([v.argsort().argsort() for v in (a, b)]).double()
    return torch.corrcoef(ranks)[0, 1].item()


def run(
    seeds: int, sizes: tuple[int, ...], base_seed: int = 0, advance: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """All numbers of the study: `true_risk` by temperature, and `records`, one for each temperature, n and method.

    `advance` is told n^2, about the work done, after each sample; `work` gives the total.
    """
    risks, records = [], []
    for t, temperature in enumerate(TEMPERATURES):
        truth = spaces.true_risk(temperature, TRUE_RISK_PAIRS, base_seed)
        risks.append({"tau": temperature, "value": truth, "pairs": TRUE_RISK_PAIRS})
        for n in sizes:
            found = []
            for seed in range(seeds_at(n, seeds, sizes)):
                found.append(measure(draw(n, temperature, generator(base_seed, t, n, seed)), temperature))
                advance(n * n)
            records += list(_summaries(found, truth, tau=temperature, n=n))
    return {"true_risk": risks, "records": records}


def seeds_at(n: int, seeds: int, sizes: tuple[int, ...]) -> int:
    """How many samples of n pairs: `seeds` of the largest size, and up to five times as many of the cheap ones."""
    return seeds * min(5, max(sizes) // n)


def work(seeds: int, sizes: tuple[int, ...]) -> int:
    """The total that `run` reports through `advance`."""
    return len(TEMPERATURES) * sum(seeds_at(n, seeds, sizes) * n * n for n in sizes)


def _summaries(found: list[dict[str, dict[str, float]]], truth: float, **where: float) -> Iterator[dict[str, Any]]:
    for method in METHODS:
        bias = np.array([one[method]["risk"] for one in found]) - truth
        error = np.abs(bias)
        low, high = np.quantile(error, [0.1, 0.9])
        record = {
            **where,
            "method": method,
            "seeds": len(found),
            **_mean_std("error", error),
            "error_q10": float(low),
            "error_q90": float(high),
            **_mean_std("bias", bias),
        }
        for key in ("bound_term", "rank_correlation"):
            if key in found[0][method]:
                record |= _mean_std(key, np.array([one[method][key] for one in found]))
        yield record


def _mean_std(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name}_mean": float(values.mean()), f"{name}_std": float(values.std(ddof=1)) if len(values) > 1 else 0.0}
