"""Sections of the toy study's page on the theory: error terms, constants, learning, importance sampling, finite Y."""

import math
from dataclasses import dataclass

from nuclr.report import numbers
from nuclr.report.charts.lines import Chart, Series, line_chart
from nuclr.report.render import LeaveOut, Table
from nuclr.report.toy_study import METHODS, Record, ToyStudy, curves, exponent, over_sizes, short_name, sizes_of

WEIGHTS = {
    "single": ("one proposal", 4, True),
    "uniform": ("uniform weights", 2, False),
    "balance": ("balance heuristic", 1, False),
}
ALONG_ALPHA = {"mle": "true risk", "gcl": "GCL", "nuclr": "NUCLR"}


@dataclass(frozen=True)
class ToyCharts:
    """Content of a section of charts, with a table of numbers."""

    charts: list[Chart]
    table: Table | None = None


@dataclass(frozen=True)
class ToyConstant:
    """Content of the section "constant": one entry per temperature in the text, `minima` in the table."""

    charts: list[Chart]
    errors: Table
    minima: Table


@dataclass(frozen=True)
class ToySampling:
    """Content of the section "sampling"."""

    n: int
    repeats: int
    charts: list[Chart]
    bias: Table
    heuristics: Table


def toy_terms(context: ToyStudy) -> ToyCharts:
    """Return the error terms of the popularity, as the paper defines it and without its weights."""
    methods = ("gcl", "gcl_constant", "nuclr", "nuclr_area")
    charts = [
        curves(context, tau, f"{title}, τ = {tau:g}", quantity, methods, guide=("nuclr", -0.5))
        for title, quantity in (("The paper\u2019s error term", "error_term"), ("Σ |1/q̃ \u2212 1/q|", "bound_term"))
        for tau in context.temperatures
    ]
    return ToyCharts(charts)


def toy_constant(context: ToyStudy) -> ToyConstant:
    """Return what the best constant changes for GCL, and the losses of models other than the true one."""
    charts, errors, minima = [], [], []
    for entry in context.part("constant"):
        tau = entry["tau"]
        series = [
            Series(name, entry["alpha"], entry[key], METHODS[key][1], dots=False) for key, name in ALONG_ALPHA.items()
        ]
        note = "Each loss minus its own minimum, so that constants do not matter. The true model has \u03b1 = 1."
        charts.append(
            line_chart(f"Losses of the models s = \u03b1 x·y, τ = {tau:g}", series, "\u03b1", zero=True, note=note)
        )
        minima.append([f"τ = {tau:g}", *(f"{entry['minimum'][key]:.2f}" for key in ALONG_ALPHA)])
        for method in ("gcl", "gcl_constant", "mle"):
            last = context.select(tau, method)[-1]
            fit = context.slope(tau, method, "error")
            term = context.slope(tau, method, "error_term")
            errors.append(
                [
                    f"τ = {tau:g}, {METHODS[method][0]}",
                    numbers.number(last["error_mean"], 2),
                    slope_with_interval(fit),
                    numbers.number(last.get("error_term_mean"), 2),
                    slope_with_interval(term),
                ]
            )
    size = numbers.count(context.largest)
    columns = ["", f"error at n = {size}", "its slope", f"error term at n = {size}", "its slope"]
    return ToyConstant(charts, Table(columns, errors), Table(["", *ALONG_ALPHA.values()], minima))


def toy_learning(context: ToyStudy) -> ToyCharts:
    """Return excess true risk and zero-one loss of the learned model against n, and the learned W."""
    methods = ("gcl", "mle", "nuclr")
    seeds = numbers.count(min((r["seeds"] for r in context.part("learning")), default=0))
    charts, rows = [], []
    for tau in context.temperatures:
        title = f"Excess true risk, τ = {tau:g}"
        note = f"Mean of at least {seeds} samples with 95\u202f% intervals."
        charts.append(
            curves(
                context, tau, title, "excess_risk", methods, part="learning", guide=("mle", -1), short=True, note=note
            )
        )
    for tau in context.temperatures:
        bayes = context.select(tau, "mle", "learning")[-1]["bayes"]
        title = f"Excess zero-one loss, τ = {tau:g}"
        note = f"Above that of the true model, {numbers.number(bayes)}."
        charts.append(
            curves(context, tau, title, "zero_one", methods, part="learning", guide=("mle", -1), short=True, note=note)
        )
        for method in methods:
            last = context.select(tau, method, "learning")[-1]
            diagonal = ", ".join(f"{last['w_mean'][k][k]:.2f}" for k in range(2))
            cells = [_plus_minus(last, key) for key in ("excess_risk", "zero_one", "bound")]
            rows.append([f"τ = {tau:g}, {short_name(method)}", diagonal, *cells])
    largest = max(r["n"] for r in context.part("learning"))
    columns = [
        f"n = {numbers.count(largest)}",
        "mean diagonal of W",
        "excess risk",
        "excess zero-one loss",
        "its bound",
    ]
    return ToyCharts(charts, Table(columns, rows))


def toy_sampling(context: ToyStudy) -> ToySampling:
    """Return bias and variance of the estimated partition function for several weights."""
    charts = [_variance(context.part("sampling"), tau) for tau in context.temperatures]
    heuristics = []
    for tau in context.temperatures:
        rows = [r for r in context.part("exponents") if r["tau"] == tau]
        at = [r["exponent"] for r in rows]
        series = [
            Series("variance", at, [r["variance"] for r in rows], 1),
            Series("sum of second moments", at, [r["second_moment"] for r in rows], 6, dashed=True),
        ]
        best = min(rows, key=lambda r: r["second_moment"])["exponent"]
        note = f"The second moment is smallest at b = {best:g}; b = 1 is the balance heuristic."
        charts.append(
            line_chart(f"Weights proportional to pₖᵇ, τ = {tau:g}", series, "exponent b", log_y=True, note=note)
        )
        for value, name in ((0, "uniform weights"), (1, "balance heuristic"), (2, "power heuristic")):
            [r] = [r for r in rows if r["exponent"] == value]
            cells = [numbers.number(r[key]) for key in ("variance", "second_moment")]
            heuristics.append([f"τ = {tau:g}, {name}", *cells])
    bias = [
        [
            f"τ = {r['tau']:g}, {WEIGHTS[r['weights']][0]}",
            _percent(r["bias"]),
            f"{_percent(r['low'])} to {_percent(r['high'])}",
        ]
        for r in context.part("bias")
    ]
    first = context.part("bias")[0]
    return ToySampling(
        first["n"],
        first["repeats"],
        charts,
        Table(["", "mean of Ẑ/Z \u2212 1", "95\u202f% interval"], bias),
        Table(["", "Var Ẑ / Z²", "sum of second moments / Z²"], heuristics),
    )


def toy_finite(context: ToyStudy) -> ToyCharts:
    """Return the errors on a finite Y."""
    methods = ("gcl", "mle", "nuclr", "counts")
    charts = [
        curves(context, tau, f"Error with 25 points, τ = {tau:g}", "error", methods, part="finite", guide=("mle", -0.5),
               short=True)
        for tau in context.temperatures
    ]  # fmt: skip
    rows = []
    for tau in context.temperatures:
        for method in methods:
            own = context.select(tau, method, "finite")
            if not own:
                raise LeaveOut("The finite Y is missing.")
            last = own[-1]
            rows.append(
                [
                    f"τ = {tau:g}, {short_name(method)}",
                    _plus_minus(last, "error"),
                    numbers.number(last["difference_mean"], 2) if last["difference_mean"] > 1e-12 else "0",
                    numbers.number(last["error_term_mean"], 2) if last["error_term_mean"] else numbers.MISSING,
                ]
            )
    largest = numbers.count(max(r["n"] for r in context.part("finite")))
    columns = [f"n = {largest}", "error of the risk", "distance to MLE\u2019s risk", "the paper\u2019s error term"]
    return ToyCharts(charts, Table(columns, rows))


def slope_with_interval(fit: Record | None) -> str:
    """Write a slope with its 95 % interval."""
    if fit is None:
        return numbers.MISSING
    return f"{exponent(fit['slope'])} [{exponent(fit['low'])}, {exponent(fit['high'])}]"


def _percent(value: float) -> str:
    """Write a small relative error in percent."""
    return numbers.percent(value, 2)


def _plus_minus(record: Record, key: str) -> str:
    half = 1.96 * record[f"{key}_std"] / math.sqrt(record["seeds"])
    return f"{numbers.number(record[f'{key}_mean'], 2)} ± {numbers.number(half, 1)}"


def _variance(sampling: list[Record], tau: float) -> Chart:
    series = []
    for weights, (name, color, dashed) in WEIGHTS.items():
        rows = [r for r in sampling if (r["tau"], r["weights"], r["source"]) == (tau, weights, "quadrature")]
        rows.sort(key=lambda r: r["n"])
        band = ([r["relative_variance_q10"] for r in rows], [r["relative_variance_q90"] for r in rows])
        middle = [r["relative_variance_median"] for r in rows]
        series.append(Series(name, sizes_of(rows), middle, color, dashed, band))
    return over_sizes(f"Variance of the estimated Z, τ = {tau:g}", series, "samples n")
