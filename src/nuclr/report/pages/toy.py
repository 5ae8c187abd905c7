"""The page of `nuclr toy`, from toy.json and the study's figures."""

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nuclr import files
from nuclr.errors import UserError
from nuclr.report import numbers
from nuclr.report.charts.lines import Chart, Series, line_chart
from nuclr.report.render import Context, Options, Page, Section, Table, Tile

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
FIGURES = {
    "spaces": "The two spaces: every y has the color of its anchor x.",
    "popularity_maps": "Popularity over the unit square: the truth, the estimate, and one against the other.",
}

Record = dict[str, Any]  # of toy.json: a temperature, a sample size, a method, and their metrics


@dataclass
class ToyStudy(Context):
    """What `nuclr toy` wrote."""

    folder: Path = field(kw_only=True)
    content: dict[str, Any] = field(kw_only=True)
    records: list[Record] = field(kw_only=True)
    temperatures: list[float] = field(kw_only=True)
    largest: int = field(kw_only=True)
    seeds: int = field(kw_only=True)

    def select(self, tau: float, method: str) -> list[Record]:
        """Return the records of a temperature and a method by sample size."""
        chosen = [r for r in self.records if r["tau"] == tau and r["method"] == method]
        return sorted(chosen, key=lambda r: r["n"])


@dataclass(frozen=True)
class ToySummary:
    """Content of the section "summary"."""

    tiles: list[Tile]


@dataclass(frozen=True)
class ToyError:
    """Content of the section "error"."""

    charts: list[Chart]


@dataclass(frozen=True)
class ToyPopularity:
    """Content of the section "popularity"; figures are data URIs with captions."""

    correlation: Table
    figures: list[tuple[str, str]]


@dataclass(frozen=True)
class ToyTheory:
    """Content of the section "theory"."""

    charts: list[Chart]


@dataclass(frozen=True)
class ToyRepeat:
    """Content of the section "repeat"."""

    command: str
    seconds: str


def _open(path: Path, _: Options) -> ToyStudy:
    try:
        content: dict[str, Any] = files.parse_json((path / SUMMARY).read_text(encoding="utf-8"))
        records: list[Record] = content["records"]
        temperatures = sorted({r["tau"] for r in records})
        largest = max(r["n"] for r in records)
        seeds = min(r["seeds"] for r in records)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / SUMMARY} was not written by nuclr toy, or is damaged ({error})") from None
    return ToyStudy(
        title="Toy study",
        sentence="A problem in which everything is known: how wrong is a uniform popularity, and how good is one that "
        f"is estimated from scores alone? Up to {numbers.count(largest)} pairs, at least {numbers.count(seeds)} "
        "samples of each size.",
        folder=path,
        content=content,
        records=records,
        temperatures=temperatures,
        largest=largest,
        seeds=seeds,
    )


def toy_summary(context: ToyStudy) -> ToySummary:
    """Return the errors of the methods at the largest size and the lowest temperature."""
    tau = context.temperatures[0]
    last = {method: context.select(tau, method)[-1] for method in ("gcl", "nuclr", "mle")}
    where = f"mean error at n = {numbers.count(context.largest)}, τ = {tau:g}"
    return ToySummary(
        [
            Tile("Uniform popularity (GCL)", numbers.number(last["gcl"]["error_mean"], 2), where),
            Tile("Estimated popularity (NUCLR)", numbers.number(last["nuclr"]["error_mean"], 2), where),
            Tile("Exact partition function (MLE)", numbers.number(last["mle"]["error_mean"], 2), where),
            Tile("Estimated against true", numbers.score(last["nuclr"]["rank_correlation_mean"]), "rank correlation"),
        ]
    )


def toy_error(context: ToyStudy) -> ToyError:
    """Return the generalization error against the number of pairs, one chart per temperature."""
    charts = []
    for tau in context.temperatures:
        series = []
        for method, (name, color, dashed) in METHODS.items():
            rows = context.select(tau, method)
            band = None if method == "true_q" else ([r["error_q10"] for r in rows], [r["error_q90"] for r in rows])
            series.append(Series(name, _sizes(rows), [r["error_mean"] for r in rows], color, dashed, band))
        note = f"Mean of at least {numbers.count(context.seeds)} samples; bands hold the middle 80\u202f%."
        charts.append(_over_sizes(f"|empirical risk \u2212 true risk|, τ = {tau:g}", series, "pairs n", note))
    return ToyError(charts)


def toy_popularity(context: ToyStudy) -> ToyPopularity:
    """Return rank correlations with the true popularity, and the study's figures."""
    sizes = sorted({r["n"] for r in context.records})
    rows = []
    for tau in context.temperatures:
        measured = {r["n"]: r["rank_correlation_mean"] for r in context.select(tau, "nuclr")}
        rows.append([f"τ = {tau:g}", *(f"{measured[n]:.4f}" if n in measured else numbers.MISSING for n in sizes)])
    figures = []
    for name, caption in FIGURES.items():
        file = context.folder / f"{name}.png"
        try:
            encoded = base64.b64encode(file.read_bytes()).decode("ascii")
            figures.append((f"data:image/png;base64,{encoded}", caption))
        except OSError:
            context.note(f"The figure {file.name} is missing.")
    return ToyPopularity(Table(["", *(f"n = {numbers.count(n)}" for n in sizes)], rows), figures)


def toy_theory(context: ToyStudy) -> ToyTheory:
    """Return the error term of the bound, and the variance of the estimated partition function."""
    bounds = [_bound(context, tau) for tau in context.temperatures]
    sampling = context.content.get("sampling") or []
    return ToyTheory(bounds + [_variance(sampling, tau) for tau in context.temperatures if sampling])


def _bound(context: ToyStudy, tau: float) -> Chart:
    series = []
    for method in ("gcl", "nuclr", "nuclr_area"):
        name, color, dashed = METHODS[method]
        rows = [r for r in context.select(tau, method) if "bound_term_mean" in r]
        series.append(Series(name, _sizes(rows), [r["bound_term_mean"] for r in rows], color, dashed))
    return _over_sizes(f"Error term of the bound, τ = {tau:g}", series, "pairs n")


def _variance(sampling: list[Record], tau: float) -> Chart:
    series = []
    for weights, (name, color, dashed) in WEIGHTS.items():
        rows = [r for r in sampling if (r["tau"], r["weights"], r["source"]) == (tau, weights, "quadrature")]
        rows.sort(key=lambda r: r["n"])
        band = ([r["relative_variance_q10"] for r in rows], [r["relative_variance_q90"] for r in rows])
        middle = [r["relative_variance_median"] for r in rows]
        series.append(Series(name, _sizes(rows), middle, color, dashed, band))
    return _over_sizes(f"Variance of the estimated Z, τ = {tau:g}", series, "samples n")


def _sizes(rows: list[Record]) -> list[float]:
    return [float(r["n"]) for r in rows]


def _over_sizes(title: str, series: list[Series], x_label: str, note: str = "") -> Chart:
    ticks = sorted({x for s in series for x in s.x})
    return line_chart(title, series, x_label, log_x=True, log_y=True, x_ticks=ticks, note=note)


def toy_repeat(context: ToyStudy) -> ToyRepeat:
    """Return the command of the study and its duration."""
    options = f"--seeds {context.seeds} --max-n {context.largest} --seed {context.content.get('seed', 0)}"
    return ToyRepeat(
        command=f"nuclr toy --out {context.folder} {options}",
        seconds=numbers.duration(float(context.content.get("seconds", 0))),
    )


PAGE = Page(
    kind="toy study",
    files=(SUMMARY,),
    open=_open,
    sections=[
        Section("summary", "Summary", "sections/tiles.html", toy_summary, heading=False),
        Section("error", "Generalization error", "sections/toy_error.html", toy_error, menu="Error"),
        Section("popularity", "Estimated popularity", "sections/toy_popularity.html", toy_popularity,
                menu="Popularity"),
        Section("theory", "The terms of the theory", "sections/toy_theory.html", toy_theory, menu="Theory"),
        Section("repeat", "How to repeat this study", "sections/toy_repeat.html", toy_repeat, menu="Repeat"),
    ],
)  # fmt: skip
