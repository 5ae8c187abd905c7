"""The page of `nuclr toy`: toy.json and its figures -> what the template shows."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nuclr.errors import UserError
from nuclr.report import numbers
from nuclr.report.charts import Chart, Series, line_chart
from nuclr.report.summary import Table, Tile

SUMMARY = "toy.json"
METHODS = {
    "gcl": ("GCL: uniform popularity", 2, False),
    "mle": ("MLE: exact partition function", 8, False),
    "true_q": ("true popularity", 3, True),
    "nuclr": ("NUCLR: estimated, scale from maxima", 1, False),
    "nuclr_area": ("NUCLR: estimated, scale from area", 5, True),
}
WEIGHTS = {
    "single": ("one proposal", 4, True),
    "uniform": ("uniform weights", 2, False),
    "balance": ("balance heuristic", 1, False),
}
PICTURES = {
    "spaces": "The two spaces: every y has the color of its anchor x.",
    "popularity_maps": "Popularity over the unit square: the truth, the estimate, and both against each other.",
}


@dataclass
class ToyPage:
    """All that the template needs."""

    title: str
    sentence: str
    tiles: list[Tile]
    notes: list[str]
    error: list[Chart]
    correlation: Table
    bound: list[Chart]
    variance: list[Chart]
    pictures: list[tuple[str, str]]
    command: str
    seconds: str


def toy_page(path: Path) -> ToyPage:
    """Read the folder."""
    try:
        content: dict[str, Any] = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        records: list[dict[str, Any]] = content["records"]
        taus = sorted({r["tau"] for r in records})
        largest = max(r["n"] for r in records)
        seeds = min(r["seeds"] for r in records)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / SUMMARY}: not what nuclr toy writes ({error})") from None
    notes: list[str] = []
    pictures = []
    for name, told in PICTURES.items():
        file = path / f"{name}.png"
        if file.is_file():
            pictures.append((_embedded(file), told))
        else:
            notes.append(f"The figure {file.name} is missing.")
    return ToyPage(
        title="Toy study",
        sentence="Where everything is known: how wrong is a uniform popularity, and how right one that is estimated "
        f"from scores alone? Up to {numbers.count(largest)} pairs, {numbers.count(seeds)} or more samples of each.",
        tiles=_tiles(records, taus, largest),
        notes=notes,
        error=[_errors(records, tau, seeds) for tau in taus],
        correlation=_correlation(records, taus),
        bound=[_bound(records, tau) for tau in taus],
        variance=[_variance(content.get("sampling", []), tau) for tau in taus] if content.get("sampling") else [],
        pictures=pictures,
        command=f"nuclr toy --out {path} --seeds {seeds} --max-n {largest} --seed {content.get('seed', 0)}",
        seconds=numbers.duration(float(content.get("seconds", 0))),
    )


def _embedded(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode("ascii")


def _at(records: list[dict[str, Any]], tau: float, method: str) -> list[dict[str, Any]]:
    return sorted((r for r in records if r["tau"] == tau and r["method"] == method), key=lambda r: r["n"])


def _tiles(records: list[dict[str, Any]], taus: list[float], n: int) -> list[Tile]:
    tau = taus[0]
    last = {method: _at(records, tau, method)[-1] for method in ("gcl", "nuclr", "mle")}
    where = f"mean error at n = {numbers.count(n)}, τ = {tau:g}"
    return [
        Tile("Uniform popularity (GCL)", numbers.number(last["gcl"]["error_mean"], 2), where),
        Tile("Estimated popularity (NUCLR)", numbers.number(last["nuclr"]["error_mean"], 2), where),
        Tile("Exact partition function (MLE)", numbers.number(last["mle"]["error_mean"], 2), where),
        Tile("Estimated against true", numbers.score(last["nuclr"]["rank_correlation_mean"]), "rank correlation"),
    ]


def _errors(records: list[dict[str, Any]], tau: float, seeds: int) -> Chart:
    series = []
    for method, (name, slot, dashed) in METHODS.items():
        rows = _at(records, tau, method)
        band = None if method == "true_q" else ([r["error_q10"] for r in rows], [r["error_q90"] for r in rows])
        x, y = [float(r["n"]) for r in rows], [r["error_mean"] for r in rows]
        series.append(Series(name, x, y, slot, dashed, band))
    ticks = sorted({x for s in series for x in s.x})
    note = f"Mean of {numbers.count(seeds)} or more samples; bands hold the middle 80\u202f%."
    title = f"|empirical risk \u2212 true risk|, τ = {tau:g}"
    return line_chart(title, series, "pairs n", log_x=True, log_y=True, x_ticks=ticks, note=note)


def _bound(records: list[dict[str, Any]], tau: float) -> Chart:
    series = []
    for method in ("gcl", "nuclr", "nuclr_area"):
        name, slot, dashed = METHODS[method]
        rows = [r for r in _at(records, tau, method) if "bound_term_mean" in r]
        series.append(Series(name, [float(r["n"]) for r in rows], [r["bound_term_mean"] for r in rows], slot, dashed))
    ticks = sorted({x for s in series for x in s.x})
    return line_chart(f"Error term of the bound, τ = {tau:g}", series, "pairs n", log_x=True, log_y=True, x_ticks=ticks)


def _variance(records: list[dict[str, Any]], tau: float) -> Chart:
    series = []
    for weights, (name, slot, dashed) in WEIGHTS.items():
        rows = [r for r in records if (r["tau"], r["weights"], r["source"]) == (tau, weights, "quadrature")]
        rows.sort(key=lambda r: r["n"])
        band = ([r["relative_variance_q10"] for r in rows], [r["relative_variance_q90"] for r in rows])
        middle = [r["relative_variance_median"] for r in rows]
        series.append(Series(name, [float(r["n"]) for r in rows], middle, slot, dashed, band))
    ticks = sorted({x for s in series for x in s.x})
    return line_chart(f"Variance of the estimated Z, τ = {tau:g}", series, "samples n", log_x=True, log_y=True,
                      x_ticks=ticks)  # fmt: skip


def _correlation(records: list[dict[str, Any]], taus: list[float]) -> Table:
    sizes = sorted({r["n"] for r in records})
    rows = []
    for tau in taus:
        found = {r["n"]: r["rank_correlation_mean"] for r in _at(records, tau, "nuclr")}
        rows.append([f"τ = {tau:g}", *(f"{found[n]:.4f}" if n in found else numbers.MISSING for n in sizes)])
    return Table(["", *(f"n = {numbers.count(n)}" for n in sizes)], rows, set())
