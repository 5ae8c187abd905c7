"""The toy study: the error of each empirical risk, and of the popularity that it uses.

For each temperature and each n, at least `seeds` samples of n pairs are drawn. For each sample, the empirical risk is
computed with

- "mle": the exact partition function,
- "gcl": a uniform popularity q = n,
- "gcl_constant": a uniform popularity q = k n with the k that makes the error vanish as n grows,
- "true_q": the true popularity,
- "nuclr": the popularity from the convex problem, its constant from the ratio of maxima (as in the paper),
- "nuclr_area": the same, its constant from sum_j 1/q_j = area of Y, which does not need the true popularity,

and compared with the true risk: error = |empirical risk - true risk|. The error of the popularity itself is the paper's
error term, (1/n) sum_ij |1/q~_j - 1/q_j| exp((s_ij - 1)/tau). The second part, `learning`, learns the model. The third
part, `views`, draws m samples y of each x, as in the paper's Remark 2.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator

import nuclr
from nuclr import files
from nuclr.evaluation import rank_correlation
from nuclr.popularity import importance_sampling as sampling
from nuclr.popularity import solve
from nuclr.studies.toy import spaces
from nuclr.studies.toy.learning import measure_learning
from nuclr.studies.toy.spaces import TEMPERATURES

SIZES = (100, 200, 400, 800, 1600, 3200)
MOST_LEARNED = 1600  # largest n of the part "learning"
VIEWS = (1, 4, 16)  # samples y of each x in the part "views"
NORMAL_95 = 1.96
COMMAND = "nuclr toy"
SUMMARY = "toy.json"

Values = dict[str, dict[str, float]]  # quantities by method


@dataclass(frozen=True)
class Record:
    """Quantities of one method at one temperature and size: means and standard deviations over samples."""

    part: str
    tau: float
    n: int
    method: str
    seeds: int
    mean: dict[str, float]
    std: dict[str, float]

    def half_width(self, quantity: str) -> float:
        """Return half the width of the 95 % interval of a mean."""
        return NORMAL_95 * self.std[quantity] / math.sqrt(self.seeds)


@dataclass(frozen=True)
class ToyStudy:
    """What `nuclr toy` measured."""

    seeds: int
    seed: int
    records: list[Record]
    seconds: float = 0.0
    version: str = nuclr.__version__

    @property
    def sizes(self) -> list[int]:
        """The numbers of pairs, ascending."""
        return sorted({record.n for record in self.records})

    def select(
        self,
        part: str,
        tau: float,
        method: str,
    ) -> list[Record]:
        """Return the records of a part, temperature and method by size."""
        return [r for r in self.records if (r.part, r.tau, r.method) == (part, tau, method)]

    def slope(
        self,
        part: str,
        tau: float,
        method: str,
        quantity: str,
    ) -> tuple[float, float] | None:
        """Fit log mean = constant + slope log n by least squares over the positive means of a quantity.

        Returns:
            The exponent with which the quantity falls as n grows, and half the width of its 95 % interval, to first
            order in the standard errors; None with fewer than two sizes.

        """
        records = [record for record in self.select(part, tau, method) if record.mean[quantity] > 0]
        if len(records) < 2:
            return None
        means = np.array([record.mean[quantity] for record in records])
        widths = np.array([record.half_width(quantity) for record in records])
        logs = np.log([record.n for record in records])
        centered = logs - logs.mean()
        weight = centered / (centered @ centered)
        return float(weight @ np.log(means)), float(np.linalg.norm(weight * widths / means))

    def to_json(self) -> dict[str, Any]:
        """Return the content of toy.json."""
        return {"written_by": COMMAND, **files.to_record(self)}


def measure_risk(
    n: int,
    temperature: float,
    stream: Generator,
) -> Values:
    """Draw n pairs.

    Returns:
        Per method the error of its empirical risk and, if it uses a popularity, the error term and the rank correlation
        with the true popularity.

    """
    sample = spaces.draw(n, temperature, stream)
    log_z = spaces.log_partition(sample.x, temperature)
    risks = {"mle": sampling.empirical_risk(sample.scores.diagonal(), log_z, temperature).item()}
    by_method = spaces.popularities(sample, temperature)
    terms = sampling.error_term(
        sample.scores,
        torch.stack(list(by_method.values())),
        sample.log_q_true,
        temperature,
    )
    values: Values = {"mle": {}}
    for (method, log_q), term in zip(by_method.items(), terms.tolist(), strict=True):
        risks[method] = sampling.empirical_risk_from_popularity(sample.scores, log_q, temperature).item()
        values[method] = {"error_term": term}
        if method.startswith("nuclr"):
            values[method]["rank_correlation"] = rank_correlation(log_q, sample.log_q_true)
    for method, risk in risks.items():
        values[method]["error"] = abs(risk - spaces.true_risk(temperature))
    return values


def measure_views(
    n: int,
    temperature: float,
    stream: Generator,
) -> Values:
    """Draw n anchors and m samples y of each.

    Returns:
        For each m, with one popularity per sample and with one that the m samples of an anchor share, the error of the
        estimated Z: the standard deviation over the anchors of log Z_hat(x_i) - log Z(x_i), without the free constant.

    """
    x = spaces.sample_x(n, stream)
    log_z = spaces.log_partition(x, temperature)
    values = {}
    for m in VIEWS:
        y = torch.cat([spaces.sample_y(x, temperature, stream) for _ in range(m)])
        scores = x @ y.T
        # sharing a popularity is the same problem with the sum over the m samples in place of exp(s/tau)
        summed = temperature * (scores / temperature).view(n, m, n).logsumexp(dim=1)
        for form, matrix in (("per_view", scores), ("shared", summed)):
            zeta = solve(scores=matrix, temperature=temperature).zeta
            estimate = sampling.log_partition_from_popularity(matrix, zeta / temperature, temperature)
            values[f"{form}_{m}"] = {"error": (estimate - log_z).std().item()}
    return values


MEASURES = {"risk": measure_risk, "learning": measure_learning, "views": measure_views}


class Point(NamedTuple):
    """One part of the study at one temperature and size, and how many samples it is repeated on."""

    part: str
    tau: float
    n: int
    repeats: int


def plan(seeds: int, sizes: tuple[int, ...] = SIZES) -> list[Point]:
    """Return all points of a study.

    Args:
        seeds: Number of samples at the largest size; smaller sizes get up to five times as many.
        sizes: Numbers of pairs n, ascending.

    """
    points = []
    for tau in TEMPERATURES:
        for n in sizes:
            points.append(Point("risk", tau, n, seeds * min(5, max(sizes) // n)))
            if n <= MOST_LEARNED:
                repeats = max(2, seeds * min(4, MOST_LEARNED // n) // 5)
                points.append(Point("learning", tau, n, repeats))
        points.append(Point("views", tau, sizes[0], seeds * min(5, max(sizes) // sizes[0])))
    return points


def run_study(
    seeds: int,
    sizes: tuple[int, ...] = SIZES,
    seed: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> ToyStudy:
    """Run the study.

    Args:
        seeds: As for `plan`.
        sizes: As for `plan`.
        seed: Start of the random numbers.
        advance: Called with n^2, roughly the work done, after each sample.

    """
    start = time.perf_counter()
    records = []
    for part, tau, n, repeats in plan(seeds, sizes):
        samples = []
        for repeat in range(repeats):
            # Each sample has a random stream of its own.
            numbers = [seed, TEMPERATURES.index(tau), n, repeat]
            if part != "risk":
                numbers.append(list(MEASURES).index(part))
            samples.append(MEASURES[part](n, tau, spaces.generator(*numbers)))
            advance(n**2)
        for method, quantities in samples[0].items():
            values = {key: np.array([sample[method][key] for sample in samples]) for key in quantities}
            mean = {key: float(array.mean()) for key, array in values.items()}
            std = {key: float(array.std(ddof=1)) for key, array in values.items()}
            records.append(Record(part, tau, n, method, repeats, mean, std))
    return ToyStudy(
        seeds=seeds,
        seed=seed,
        records=records,
        seconds=round(time.perf_counter() - start, 1),
    )
