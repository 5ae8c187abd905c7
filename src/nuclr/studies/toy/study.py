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

import nuclr
from nuclr import files
from nuclr.evaluation import rank_correlation
from nuclr.popularity import importance_sampling as sampling
from nuclr.studies import figure_style, output
from nuclr.studies.toy import figures, spaces, variance
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
    output.prepare_folder(folder, COMMAND, SUMMARY, [SUMMARY, *pictures])
    start = time.perf_counter()
    result = run_study(seeds, sizes, base_seed, advance)
    result["sampling"] = variance.sampling_variances(sizes, base_seed=base_seed)
    figures.write_figures(result, folder, shown_n=min(800, sizes[-1]), base_seed=base_seed)
    content = {
        "written_by": COMMAND,
        "version": nuclr.__version__,
        "seed": base_seed,
        "seconds": round(time.perf_counter() - start, 1),
        **result,
        "figures": pictures,
    }
    with output.user_errors(folder):
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
