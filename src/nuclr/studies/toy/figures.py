"""Figures of the toy study, each readable on its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.mlab import GaussianKDE
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from nuclr.evaluation import rank_correlation
from nuclr.studies import figure_style
from nuclr.studies.toy import spaces
from nuclr.studies.toy.spaces import TEMPERATURES, Draw, draw, generator, popularities

NAMES = (
    "spaces",
    "popularity_maps",
    "popularity_distributions",
    "error",
    "error_term",
    "bound_term",
    "sampling_variance",
    "excess_risk",
)

_METHODS = {
    "gcl": ("GCL: uniform popularity", figure_style.ORANGE, "s", "-"),
    "gcl_constant": ("GCL with its best constant", figure_style.AMBER, "P", "--"),
    "mle": ("MLE: exact partition function", figure_style.INK, "o", "-"),
    "true_q": ("true popularity", figure_style.GREEN, "v", ":"),
    "nuclr": ("NUCLR: estimated, scale from the maxima", figure_style.BLUE, "D", "-"),
    "nuclr_area": ("NUCLR: estimated, scale from the area of Y", figure_style.SKY, "^", "--"),
}
_WEIGHTS = {
    "single": ("all samples from one proposal", figure_style.PINK, ":"),
    "uniform": ("uniform weights", figure_style.ORANGE, "--"),
    "balance": ("balance heuristic", figure_style.BLUE, "-"),
}


def write_figures(study: dict[str, Any], folder: Path, shown_n: int, base_seed: int = 0) -> None:
    """Draw all figures into a folder.

    Args:
        study: The content of toy.json.
        folder: Existing folder to write to.
        shown_n: Number of pairs in the figures that show a single sample.
        base_seed: Start of the random numbers.

    """
    samples = {tau: draw(shown_n, tau, generator(base_seed, t, shown_n, 0)) for t, tau in enumerate(TEMPERATURES)}
    with figure_style.house_style():
        _spaces(samples, folder)
        _maps(samples, folder)
        _distributions(samples, folder)
        _error(study, folder)
        _popularity_error(study, folder, "error_term", "The error term  (1/n) Σᵢⱼ |1/q̃ⱼ - 1/qⱼ| exp((sᵢⱼ - 1)/τ)")
        _popularity_error(study, folder, "bound_term", "The sum  Σⱼ |1/q̃ⱼ - 1/qⱼ|")
        _variance(study["sampling"], folder)
        _excess_risk(study, folder)


def _spaces(samples: dict[float, Draw], folder: Path) -> None:
    title = "The two spaces: each y is drawn from p(y|x) ∝ exp(x·y/τ) and has the color of its anchor x"
    figure, [row] = figure_style.panels(
        1, 1 + len(samples), title, (4.6, 3.4), width_ratios=[2.0] + [1.0] * len(samples)
    )
    first = next(iter(samples.values()))
    for axes, (tau, sample) in zip(row[1:], samples.items(), strict=True):
        _scatter(axes, sample, sample.y)
        axes.set(title=f"y on the unit square, τ = {tau}", xlabel="y₁", ylabel="y₂", xlim=(0, 1), ylim=(0, 1))
    points = _scatter(row[0], first, first.x)
    row[0].set(title=f"x, uniform on the upper half disc (n = {len(first.x)})", xlabel="x₁", ylabel="x₂")
    row[0].set(xlim=(-1, 1), ylim=(0, 1), xticks=[-1, -0.5, 0, 0.5, 1])
    for axes in row:
        axes.set_aspect("equal")
    figure.colorbar(points, ax=row[-1], label="direction of x (degrees)", ticks=[0, 45, 90, 135, 180])
    figure_style.save(figure, folder, "spaces")


def _scatter(axes: Axes, sample: Draw, at: Tensor) -> Any:
    direction = torch.rad2deg(torch.atan2(sample.x[:, 1], sample.x[:, 0])).numpy()
    return axes.scatter(
        at[:, 0].numpy(),
        at[:, 1].numpy(),
        c=direction,
        cmap="viridis",
        vmin=0,
        vmax=180,
        s=9,
        linewidths=0,
        clip_on=False,
    )


def _maps(samples: dict[float, Draw], folder: Path) -> None:
    n = len(next(iter(samples.values())).x)
    title = f"Popularity q(y)/n over the unit square: the truth, and the estimate from the scores of {n} pairs"
    figure, grid = figure_style.panels(len(samples), 3, title, (4.2, 3.7))
    side = np.linspace(0, 1, 61)
    nodes = torch.cartesian_prod(*torch.from_numpy(side).expand(2, -1))
    for row, (tau, sample) in zip(grid, samples.items(), strict=True):
        log_q = popularities(sample)["nuclr"]
        true = (spaces.log_popularity(sample.x, nodes, tau).exp() / n).numpy()
        estimated = (spaces.interpolate(sample, log_q, nodes, tau).exp() / n).numpy()
        levels = MaxNLocator(24).tick_values(min(true.min(), estimated.min()), max(true.max(), estimated.max()))
        for axes, values, name in ((row[0], true, "true"), (row[1], estimated, "estimated at the dots, interpolated")):
            filled = axes.contourf(side, side, values.reshape(61, 61).T, levels=levels, cmap="viridis")
            axes.scatter(sample.y[:, 0].numpy(), sample.y[:, 1].numpy(), s=1.5, c="white", linewidths=0, alpha=0.6)
            axes.set(title=f"τ = {tau}: {name}", xlabel="y₁", ylabel="y₂", aspect="equal")
            axes.grid(False)
        figure.colorbar(filled, ax=row[1], label="q(y)/n", ticks=levels[::4])
        correlation = rank_correlation(sample.log_q, sample.log_q_true)
        at_true, at_estimated = ((log.exp() / n).numpy() for log in (sample.log_q_true, log_q))
        row[2].axline((1, 1), slope=1, color=figure_style.GREY, linewidth=1)
        row[2].scatter(at_true, at_estimated, s=6, color=figure_style.BLUE, linewidths=0, alpha=0.6)
        row[2].set(title=f"τ = {tau}: rank correlation {correlation:.4f}", aspect="equal")
        row[2].set(xlabel="true q(y)/n", ylabel="estimated q(y)/n")
    figure_style.save(figure, folder, "popularity_maps")


def _distributions(samples: dict[float, Draw], folder: Path) -> None:
    n = len(next(iter(samples.values())).x)
    title = f"How popularity is distributed over {n} samples (kernel density estimate)"
    figure, [row] = figure_style.panels(1, len(samples), title, (5.2, 3.6))
    for axes, (tau, sample) in zip(row, samples.items(), strict=True):
        relative = {method: log_q.exp().numpy() / n for method, log_q in popularities(sample).items()}
        low, high = relative["true_q"].min(), relative["true_q"].max()
        grid = np.linspace(max(0, low - 0.2 * (high - low)), high + 0.2 * (high - low), 400)
        for method in ("true_q", "nuclr", "nuclr_area"):
            label, color, _, dashes = _METHODS[method]
            density = GaussianKDE(relative[method]).evaluate(grid)
            wide = {"linestyle": "-", "linewidth": 6, "alpha": 0.4} if method == "true_q" else {"linestyle": dashes}
            axes.plot(grid, density, color=color, label=label, **wide)
        axes.axvline(1, color=figure_style.ORANGE, label=_METHODS["gcl"][0] + ", q = n")
        axes.set(title=f"τ = {tau}", xlabel="q(y)/n", ylabel="density of samples", xlim=(grid[0], grid[-1]))
        axes.set_ylim(bottom=0)
    _legend_below(figure, row[0])
    figure_style.save(figure, folder, "popularity_distributions")


def _error(study: dict[str, Any], folder: Path) -> None:
    seeds = min(r["seeds"] for r in study["records"])
    title = f"Generalization error |empirical risk - true risk|: mean of {seeds} or more samples, band 10 to 90 %"
    figure, [row] = figure_style.panels(1, len(TEMPERATURES), title, (5.4, 4.2))

    def band(r: dict[str, Any]) -> tuple[float, float, float]:
        return r["error_mean"], r["error_q10"], r["error_q90"]

    for axes, tau in zip(row, TEMPERATURES, strict=True):
        _power_laws(axes, study, "records", "error", tau, band, tuple(_METHODS), "mle", -0.5)
        axes.set(title=f"τ = {tau}", ylabel="generalization error", ylim=(3e-4, 0.2))
    _legend_below(figure, row[0])
    figure_style.save(figure, folder, "error")


def _popularity_error(study: dict[str, Any], folder: Path, key: str, title: str) -> None:
    title += " of an approximate popularity q̃, mean ± standard deviation"
    figure, [row] = figure_style.panels(1, len(TEMPERATURES), title, (5.4, 4.2))
    for axes, tau in zip(row, TEMPERATURES, strict=True):
        methods = ("gcl", "gcl_constant", "nuclr", "nuclr_area")
        _power_laws(axes, study, "records", key, tau, _around_mean(key), methods, "nuclr", -0.5)
        axes.set(title=f"τ = {tau}", ylabel="error of the popularity")
    _legend_below(figure, row[0])
    figure_style.save(figure, folder, key)


def _excess_risk(study: dict[str, Any], folder: Path) -> None:
    title = "Learning W in s = xᵀWy: excess true risk, mean ± standard deviation"
    figure, [row] = figure_style.panels(1, len(TEMPERATURES), title, (5.4, 4.2))
    for axes, tau in zip(row, TEMPERATURES, strict=True):
        band = _around_mean("excess_risk")
        _power_laws(axes, study, "learning", "excess_risk", tau, band, ("gcl", "mle", "nuclr"), "mle", -1.0)
        axes.set(title=f"τ = {tau}", ylabel="excess true risk")
    _legend_below(figure, row[0])
    figure_style.save(figure, folder, "excess_risk")


def _around_mean(key: str) -> Callable[[dict[str, Any]], tuple[float, float, float]]:
    def band(r: dict[str, Any]) -> tuple[float, float, float]:
        mean, std = r[f"{key}_mean"], r[f"{key}_std"]
        return mean, max(mean - std, mean / 10), mean + std

    return band


def _labels(study: dict[str, Any], part: str, key: str) -> dict[str, str]:
    """Return the label of each method, with the fitted slopes of its curves in the order of the panels."""
    labels = {method: label for method, (label, *_) in _METHODS.items()}
    for method in labels:
        fits = {
            fit["tau"]: f"{fit['slope']:.2f}"
            for fit in study["slopes"]
            if (fit["part"], fit["method"], fit["quantity"]) == (part, method, key)
        }
        if all(tau in fits for tau in TEMPERATURES):
            labels[method] += f" (slopes {' and '.join(fits[tau] for tau in TEMPERATURES)})"
    return labels


def _guide(axes: Axes, rows: list[dict[str, Any]], key: str, exponent: float) -> None:
    """Draw a line of the given exponent below a curve."""
    sizes = np.array([rows[0]["n"], rows[-1]["n"]])
    guide = rows[0][f"{key}_mean"] / 2 * (sizes / sizes[0]) ** exponent
    axes.plot(sizes, guide, color=figure_style.GREY, linewidth=1, linestyle="--", label=f"guide: slope {exponent:g}")


def _power_laws(
    axes: Axes,
    study: dict[str, Any],
    part: str,
    key: str,
    tau: float,
    band: Callable[[dict[str, Any]], tuple[float, float, float]],
    methods: tuple[str, ...],
    guided: str,
    exponent: float,
) -> None:
    """Draw a quantity against n on logarithmic axes, one curve per method, and a guide below the curve of `guided`."""
    labels = _labels(study, part, key)
    curves = {
        method: [r for r in study[part] if (r["tau"], r["method"]) == (tau, method)] for method in (*methods, guided)
    }
    for method in methods:
        _, color, marker, dashes = _METHODS[method]
        sizes = [r["n"] for r in curves[method]]
        middle, low, high = zip(*(band(r) for r in curves[method]), strict=True)
        if method != "true_q":
            axes.fill_between(sizes, low, high, color=color, alpha=0.12, linewidth=0)
        axes.plot(sizes, middle, color=color, marker=marker, markersize=4.5, linestyle=dashes, label=labels[method])
    _guide(axes, curves[guided], key, exponent)
    axes.set(xscale="log", yscale="log", xlabel="number of pairs n")
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.minorticks_off()


def _variance(records: list[dict[str, Any]], folder: Path) -> None:
    title = "Variance of the estimated partition function Ẑ(x): median and 10 to 90 % over anchors x"
    figure, [row] = figure_style.panels(1, len(TEMPERATURES), title, (5.4, 4.2))
    for axes, tau in zip(row, TEMPERATURES, strict=True):
        at_tau = [r for r in records if r["tau"] == tau]
        for weights, (label, color, dashes) in _WEIGHTS.items():
            rows = [r for r in at_tau if r["weights"] == weights and r["source"] == "quadrature"]
            at = [r["n"] * r["m"] for r in rows]
            low, high = ([r[f"relative_variance_{end}"] for r in rows] for end in ("q10", "q90"))
            axes.fill_between(at, low, high, color=color, alpha=0.12, linewidth=0)
            middle = [r["relative_variance_median"] for r in rows]
            axes.plot(at, middle, color=color, linestyle=dashes, label=f"{label}, exact")
        repeated = [r for r in at_tau if r["source"] == "repeated draws"]
        for r, marker in zip(repeated, ("o", "D", "s"), strict=True):
            label = f"balance heuristic, measured: n = {r['n']}, m = {r['m']}"
            at, middle = r["n"] * r["m"], r["relative_variance_median"]
            axes.plot(at, middle, marker, color=figure_style.INK, markerfacecolor="white", label=label)
        axes.set(title=f"τ = {tau}", xscale="log", yscale="log", ylabel="Var Ẑ(x) / Z(x)²")
        axes.set_xlabel("samples m·n, from n proposals with m samples each")
    _legend_below(figure, row[0])
    figure_style.save(figure, folder, "sampling_variance")


def _legend_below(figure: Any, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
