"""The toy study: the error of each empirical risk, and of the popularity that it uses; numbers and figures in a folder.

For each temperature and each n, at least `seeds` samples of n pairs are drawn. For each sample, the empirical risk is
computed with

- "mle": the exact partition function,
- "gcl": a uniform popularity q = n,
- "true_q": the true popularity,
- "nuclr": the popularity from the convex problem, its constant from the ratio of maxima (as in the paper),
- "nuclr_area": the same, its constant from sum_j 1/q_j = area of Y, which does not need the true popularity,

and compared with the true risk: error = |empirical risk - true risk|.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nuclr
from nuclr import files
from nuclr.evaluation import rank_correlation
from nuclr.popularity import importance_sampling as sampling
from nuclr.studies import figure_style
from nuclr.studies.toy import figures, spaces
from nuclr.studies.toy.spaces import TEMPERATURES, Draw, draw, generator, popularities

SIZES = (100, 200, 400, 800, 1600, 3200)
METHODS = ("mle", "gcl", "true_q", "nuclr", "nuclr_area")
TRUE_RISK_PAIRS = 50_000
COMMAND = "nuclr toy"
SUMMARY = "toy.json"


def write_study(
    folder: Path,
    seeds: int,
    sizes: tuple[int, ...] = SIZES,
    base_seed: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the study and write `toy.json` and the figures.

    Args:
        folder: Folder to write to; files of an earlier `nuclr toy` in it are replaced.
        seeds: Number of samples at the largest size (see `seeds_at`).
        sizes: Numbers of pairs n, ascending.
        base_seed: Start of the random numbers.
        advance: Called with the work done after each sample (see `total_work`).

    Returns:
        The content of `toy.json`.

    Raises:
        UserError: If the folder cannot be written or holds files of another program under these names.

    """
    pictures = [f"{name}.{kind}" for name in figures.NAMES for kind in figure_style.FORMATS]
    files.prepare_folder(folder, COMMAND, SUMMARY, [SUMMARY, *pictures])
    start = time.perf_counter()
    result = run_study(seeds, sizes, base_seed, advance)
    result["sampling"] = sampling_variances(sizes, base_seed=base_seed)
    figures.write_figures(result, folder, shown_n=min(800, sizes[-1]), base_seed=base_seed)
    content = {
        "written_by": COMMAND,
        "version": nuclr.__version__,
        "seed": base_seed,
        "seconds": round(time.perf_counter() - start, 1),
        **result,
        "figures": pictures,
    }
    with files.user_errors(folder):
        files.write_json(folder / SUMMARY, content)
    return content


def run_study(
    seeds: int, sizes: tuple[int, ...], base_seed: int = 0, advance: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Compute all values of the study.

    Args:
        seeds: Number of samples at the largest size (see `seeds_at`).
        sizes: Numbers of pairs n.
        base_seed: Start of the random numbers.
        advance: Called with n^2, roughly the work done, after each sample.

    Returns:
        `true_risk`, one entry per temperature, and `records`, one per temperature, n and method.

    """
    risks, records = [], []
    for t, temperature in enumerate(TEMPERATURES):
        truth = spaces.true_risk(temperature, TRUE_RISK_PAIRS, base_seed)
        risks.append({"tau": temperature, "value": truth, "pairs": TRUE_RISK_PAIRS})
        for n in sizes:
            samples = []
            for seed in range(seeds_at(n, seeds, sizes)):
                samples.append(measure(draw(n, temperature, generator(base_seed, t, n, seed)), temperature))
                advance(n * n)
            records += list(_summaries(samples, truth, tau=temperature, n=n))
    return {"true_risk": risks, "records": records}


def measure(sample: Draw, temperature: float) -> dict[str, dict[str, float]]:
    """Return, per method, its empirical risk and, if it uses a popularity, the bound's error term.

    The methods that estimate the popularity also have its rank correlation with the truth.
    """
    log_z = spaces.log_partition(sample.x, temperature)
    exact = sampling.empirical_risk(sample.scores.diagonal(), log_z, temperature)
    values: dict[str, dict[str, float]] = {"mle": {"risk": exact.item()}}
    for method, log_q in popularities(sample).items():
        risk = sampling.empirical_risk_from_popularity(sample.scores, log_q, temperature)
        values[method] = {"risk": risk.item(), "bound_term": sampling.bound_term(log_q, sample.log_q_true).item()}
        if method.startswith("nuclr"):
            values[method]["rank_correlation"] = rank_correlation(log_q, sample.log_q_true)
    return values


def seeds_at(n: int, seeds: int, sizes: tuple[int, ...]) -> int:
    """Return the number of samples of n pairs: `seeds` at the largest size, up to five times as many at small ones."""
    return seeds * min(5, max(sizes) // n)


def total_work(seeds: int, sizes: tuple[int, ...]) -> int:
    """Return the total that `run_study` reports through `advance`."""
    return len(TEMPERATURES) * sum(seeds_at(n, seeds, sizes) * n * n for n in sizes)


def _summaries(samples: list[dict[str, dict[str, float]]], truth: float, **setting: float) -> Iterator[dict[str, Any]]:
    for method in METHODS:
        bias = np.array([sample[method]["risk"] for sample in samples]) - truth
        error = np.abs(bias)
        low, high = np.quantile(error, [0.1, 0.9])
        record = {
            **setting,
            "method": method,
            "seeds": len(samples),
            **_mean_std("error", error),
            "error_q10": float(low),
            "error_q90": float(high),
            **_mean_std("bias", bias),
        }
        for key in ("bound_term", "rank_correlation"):
            if key in samples[0][method]:
                record |= _mean_std(key, np.array([sample[method][key] for sample in samples]))
        yield record


def _mean_std(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name}_mean": float(values.mean()), f"{name}_std": float(values.std(ddof=1)) if len(values) > 1 else 0.0}


# -- variance of the estimate of the partition function ----------------------------------------------------------------


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
