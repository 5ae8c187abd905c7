"""The toy study: the error of each empirical risk, and of the popularity that it uses; numbers and figures in a folder.

For each temperature and each n, at least `seeds` samples of n pairs are drawn. For each sample, the empirical risk is
computed with

- "mle": the exact partition function,
- "gcl": a uniform popularity q = n,
- "gcl_constant": a uniform popularity q = k n with the k that makes the error vanish as n grows (see `constant`),
- "true_q": the true popularity,
- "nuclr": the popularity from the convex problem, its constant from the ratio of maxima (as in the paper),
- "nuclr_area": the same, its constant from sum_j 1/q_j = area of Y, which does not need the true popularity,

and compared with the true risk: error = |empirical risk - true risk|. The error of the popularity itself is the sum
over j of |1/q~_j - 1/q_j| ("bound_term") and the paper's error term, which weights this sum ("error_term").

The other parts of the study are in `weights` (importance sampling), `constant` (what a constant can fix), `learning`
(learning the model) and `finite` (a finite Y).
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nuclr
from nuclr import files
from nuclr.evaluation import rank_correlation
from nuclr.popularity import importance_sampling as sampling
from nuclr.studies import figure_style
from nuclr.studies.toy import constant, figures, finite, learning, spaces
from nuclr.studies.toy.slopes import mean_std, slopes
from nuclr.studies.toy.spaces import TEMPERATURES, Draw, draw, generator, popularities
from nuclr.studies.toy.weights import compare_weights

SIZES = (100, 200, 400, 800, 1600, 3200)
METHODS = ("mle", "gcl", "gcl_constant", "true_q", "nuclr", "nuclr_area")
SAME_UP_TO_A_FACTOR = {"gcl_constant": "gcl", "nuclr_area": "nuclr"}  # a factor k of q lowers the risk by tau log k
FITTED = (  # parts and quantities whose slope against n is fitted
    ("records", "error"),
    ("records", "bound_term"),
    ("records", "error_term"),
    ("learning", "excess_risk"),
    ("learning", "zero_one"),
    ("finite", "error"),
    ("finite", "error_term"),
)
TRUE_RISK_PAIRS = 50_000
SHOWN_N = 100  # pairs of the figures that show one sample, as in the paper
MAP_SIDE = 25  # nodes per axis of the maps of popularity
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
    result |= compare_weights(sizes, base_seed)
    result["constant"] = [constant.risks_along_alpha(tau) for tau in TEMPERATURES]
    result["learning"] = learning.learn_and_judge(seeds, sizes, base_seed, advance)
    result["finite"] = finite.finite_study(seeds, sizes, base_seed, advance)
    result["slopes"] = [fit for part, key in FITTED for fit in slopes(result, part, key)]
    result["shown"] = [show_sample(tau, base_seed) for tau in TEMPERATURES]
    figures.write_figures(result, folder, SHOWN_N, base_seed)
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
        log_k = constant.gcl_log_constant(temperature)
        risks.append({"tau": temperature, "value": truth, "pairs": TRUE_RISK_PAIRS, "gcl_log_constant": log_k})
        for n in sizes:
            samples = []
            for seed in range(seeds_at(n, seeds, sizes)):
                samples.append(measure(draw(n, temperature, generator(base_seed, t, n, seed)), temperature, log_k))
                advance(n * n)
            records += list(_summaries(samples, truth, tau=temperature, n=n))
    return {"true_risk": risks, "records": records}


def measure(sample: Draw, temperature: float, gcl_log_constant: float) -> dict[str, dict[str, float]]:
    """Return, per method, its empirical risk and, if it uses a popularity, both error terms of the popularity.

    The methods that estimate the popularity also have its rank correlation with the truth.
    """
    log_z = spaces.log_partition(sample.x, temperature)
    exact = sampling.empirical_risk(sample.scores.diagonal(), log_z, temperature)
    values: dict[str, dict[str, float]] = {"mle": {"risk": exact.item()}}
    by_method = popularities(sample, gcl_log_constant)
    terms = sampling.error_term(sample.scores, torch.stack(list(by_method.values())), sample.log_q_true, temperature)
    for (method, log_q), term in zip(by_method.items(), terms.tolist(), strict=True):
        if method in SAME_UP_TO_A_FACTOR:
            other = SAME_UP_TO_A_FACTOR[method]
            risk = values[other]["risk"] - temperature * (log_q - by_method[other])[0].item()
        else:
            risk = sampling.empirical_risk_from_popularity(sample.scores, log_q, temperature).item()
        values[method] = {
            "risk": risk,
            "bound_term": sampling.bound_term(log_q, sample.log_q_true).item(),
            "error_term": term,
        }
        if method.startswith("nuclr"):
            values[method]["rank_correlation"] = rank_correlation(log_q, sample.log_q_true)
    return values


def show_sample(temperature: float, base_seed: int) -> dict[str, Any]:
    """Return one sample of `SHOWN_N` pairs for the figures: its points, and maps of true and estimated q(y)/n.

    Maps are lists of rows from y_2 = 0 to 1; a row goes from y_1 = 0 to 1.
    """
    sample = draw(SHOWN_N, temperature, generator(base_seed, TEMPERATURES.index(temperature), SHOWN_N, 0))
    log_q = popularities(sample)["nuclr"]
    side = torch.linspace(0, 1, MAP_SIDE, dtype=torch.float64)
    nodes = torch.cartesian_prod(side, side).flip(1)
    maps = {
        "true_map": spaces.log_popularity(sample.x, nodes, temperature),
        "estimated_map": spaces.interpolate(sample, log_q, nodes, temperature),
    }
    points = {"x": sample.x, "y": sample.y}
    popularity = {"true": sample.log_q_true, "estimated": log_q}
    return {
        "tau": temperature,
        "n": SHOWN_N,
        **{name: _rounded(values) for name, values in points.items()},
        **{name: _rounded(values.exp() / SHOWN_N) for name, values in popularity.items()},
        **{name: _rounded((values.exp() / SHOWN_N).reshape(MAP_SIDE, MAP_SIDE)) for name, values in maps.items()},
        "rank_correlation": rank_correlation(log_q, sample.log_q_true),
    }


def _rounded(values: torch.Tensor) -> list[Any]:
    rounded: list[Any] = np.round(values.numpy(), 5).tolist()
    return rounded


def seeds_at(n: int, seeds: int, sizes: tuple[int, ...]) -> int:
    """Return the number of samples of n pairs: `seeds` at the largest size, up to five times as many at small ones."""
    return seeds * min(5, max(sizes) // n)


def total_work(seeds: int, sizes: tuple[int, ...]) -> int:
    """Return the total that `write_study` reports through `advance`."""
    work = sum(seeds_at(n, seeds, sizes) * n * n for n in sizes)
    work += sum(learning.seeds_at(n, seeds) * n * n for n in learning.learning_sizes(sizes))
    return len(TEMPERATURES) * (work + seeds * sum(n * n for n in finite.finite_sizes(sizes)))


def _summaries(samples: list[dict[str, dict[str, float]]], truth: float, **setting: float) -> Iterator[dict[str, Any]]:
    for method in METHODS:
        bias = np.array([sample[method]["risk"] for sample in samples]) - truth
        error = np.abs(bias)
        low, high = np.quantile(error, [0.1, 0.9])
        record = {
            **setting,
            "method": method,
            "seeds": len(samples),
            **mean_std("error", error),
            "error_q10": float(low),
            "error_q90": float(high),
            **mean_std("bias", bias),
        }
        for key in ("bound_term", "error_term", "rank_correlation"):
            if key in samples[0][method]:
                record |= mean_std(key, np.array([sample[method][key] for sample in samples]))
        yield record
