"""The page of `nuclr toy`, from toy.json."""

import math
from dataclasses import dataclass

from nuclr.report import numbers
from nuclr.report.charts.lines import Chart
from nuclr.report.charts.maps import Point, colored_points, value_map
from nuclr.report.charts.spreads import scatter
from nuclr.report.render import Page, Section, Table, Tile
from nuclr.report.sections.toy_theory import (
    slope_with_interval,
    toy_constant,
    toy_finite,
    toy_learning,
    toy_sampling,
    toy_terms,
)
from nuclr.report.toy_study import METHODS, SUMMARY, Record, ToyStudy, curves, exponent, open_toy_study

SECTORS = 6  # colors of the anchors by their direction
ERROR_METHODS = ("gcl", "gcl_constant", "mle", "true_q", "nuclr", "nuclr_area")


@dataclass(frozen=True)
class ToySummary:
    """Content of the section "summary"."""

    tiles: list[Tile]


@dataclass(frozen=True)
class ToyError:
    """Content of the section "error"."""

    charts: list[Chart]
    slopes: Table


@dataclass(frozen=True)
class ToyPopularity:
    """Content of the section "popularity"."""

    n: int
    correlation: Table
    samples: list[Chart]
    maps: list[list[Chart]]


@dataclass(frozen=True)
class ToyRepeat:
    """Content of the section "repeat"."""

    command: str
    seconds: str
    figures: list[str]


def toy_summary(context: ToyStudy) -> ToySummary:
    """Return the errors of the methods at the largest size and the lowest temperature, with their slopes."""
    tau = context.temperatures[0]
    tiles = []
    for method, name in (("gcl", "Uniform popularity (GCL)"), ("nuclr", "Estimated popularity (NUCLR)"),
                         ("mle", "Exact partition function (MLE)")):  # fmt: skip
        last, fit = context.select(tau, method)[-1], context.slope(tau, method, "error")
        detail = f"mean error at n = {numbers.count(context.largest)}, τ = {tau:g}"
        detail += f"; slope {exponent(fit['slope'])}" if fit else ""
        tiles.append(Tile(name, numbers.number(last["error_mean"], 2), detail))
    correlation = context.select(tau, "nuclr")[-1]["rank_correlation_mean"]
    tiles.append(Tile("Estimated against true", numbers.score(correlation), "rank correlation"))
    return ToySummary(tiles)


def toy_error(context: ToyStudy) -> ToyError:
    """Return the generalization error against the number of pairs, one chart per temperature, and all slopes."""
    note = f"Mean of at least {numbers.count(context.seeds)} samples with 95\u202f% intervals."
    charts = [
        curves(context, tau, f"|empirical risk \u2212 true risk|, τ = {tau:g}", "error", ERROR_METHODS,
               guide=("mle", -0.5), note=note)
        for tau in context.temperatures
    ]  # fmt: skip
    rows = [
        [
            METHODS[method][0],
            *(slope_with_interval(context.slope(tau, method, "error")) for tau in context.temperatures),
        ]
        for method in ERROR_METHODS
    ]
    return ToyError(charts, Table(["", *(f"τ = {tau:g}" for tau in context.temperatures)], rows))


def toy_popularity(context: ToyStudy) -> ToyPopularity:
    """Return rank correlations with the true popularity, and one sample with its true and estimated popularity."""
    sizes = sorted({r["n"] for r in context.records})
    rows = []
    for tau in context.temperatures:
        measured = {r["n"]: r["rank_correlation_mean"] for r in context.select(tau, "nuclr")}
        rows.append([f"τ = {tau:g}", *(f"{measured[n]:.4f}" if n in measured else numbers.MISSING for n in sizes)])
    shown = context.part("shown")
    table = Table(["", *(f"n = {numbers.count(n)}" for n in sizes)], rows)
    samples = [_anchors(shown[0]), *(_drawn(sample) for sample in shown)]
    return ToyPopularity(shown[0]["n"], table, samples, [_maps(sample) for sample in shown])


def _anchors(sample: Record) -> Chart:
    note = "Uniform on the upper half disc. The color is the direction."
    return colored_points("Anchors x", _by_direction(sample, sample["x"]), (-1, 1), (0, 1), note)


def _by_direction(sample: Record, points: list[list[float]]) -> list[tuple[str, int, list[Point]]]:
    """Return points in groups of a color each: the sector of the direction of their x."""
    groups: list[list[Point]] = [[] for _ in range(SECTORS)]
    for (x_1, x_2), (a, b) in zip(sample["x"], points, strict=True):
        sector = min(SECTORS - 1, int(SECTORS * math.atan2(x_2, x_1) / math.pi))
        groups[sector].append((a, b))
    width = 180 // SECTORS
    return [(f"{k * width}° to {(k + 1) * width}°", k + 1, group) for k, group in enumerate(groups)]


def _drawn(sample: Record) -> Chart:
    title, groups = f"y given x, τ = {sample['tau']:g}", _by_direction(sample, sample["y"])
    return colored_points(title, groups, (0, 1), (0, 1), "Each y has the color of its x.")


def _maps(sample: Record) -> list[Chart]:
    tau, points = sample["tau"], [(a, b) for a, b in sample["y"]]
    values = [v for name in ("true_map", "estimated_map") for row in sample[name] for v in row]
    low, high = min(values), max(values)
    scale = f"The color goes from {numbers.times(low)} to {numbers.times(high)}, stronger for larger values."
    correlation = numbers.score(sample["rank_correlation"])
    return [
        value_map(f"True q(y)/n, τ = {tau:g}", sample["true_map"], low, high, points, scale),
        value_map(f"Estimated q(y)/n, τ = {tau:g}", sample["estimated_map"], low, high, points,
                  "Estimated at the dots, interpolated. Colors as in the true map."),
        scatter(f"Estimated against true, τ = {tau:g}", sample["true"], sample["estimated"], "true q(y)/n",
                "estimated q(y)/n", note=f"Rank correlation {correlation}."),
    ]  # fmt: skip


def toy_repeat(context: ToyStudy) -> ToyRepeat:
    """Return the command of the study and its duration."""
    options = f"--seeds {context.seeds} --max-n {context.largest} --seed {context.content.get('seed', 0)}"
    return ToyRepeat(
        command=f"nuclr toy --out {context.folder} {options}",
        seconds=numbers.duration(float(context.content.get("seconds", 0))),
        figures=[name for name in context.content.get("figures", []) if name.endswith(".svg")],
    )


PAGE = Page(
    kind="toy study",
    files=(SUMMARY,),
    open=open_toy_study,
    sections=[
        Section("summary", "Summary", "sections/tiles.html", toy_summary, heading=False),
        Section("error", "Generalization error", "sections/toy_error.html", toy_error, menu="Error"),
        Section("constant", "The constant of GCL", "sections/toy_constant.html", toy_constant, menu="Constant"),
        Section("learning", "Learning the model", "sections/toy_learning.html", toy_learning, menu="Learning"),
        Section("popularity", "Estimated popularity", "sections/toy_popularity.html", toy_popularity,
                menu="Popularity"),
        Section("terms", "The error terms", "sections/toy_terms.html", toy_terms, menu="Terms"),
        Section("sampling", "The balance heuristic", "sections/toy_sampling.html", toy_sampling, menu="Sampling"),
        Section("finite", "A finite Y", "sections/toy_finite.html", toy_finite, menu="Finite Y"),
        Section("repeat", "How to repeat this study", "sections/toy_repeat.html", toy_repeat, menu="Repeat"),
    ],
)  # fmt: skip
