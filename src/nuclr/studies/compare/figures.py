"""Figures of a comparison: validation recall against epochs, in the paper's manner, and recall against batch size."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from nuclr.studies import style

_LOOK = {
    "clip": (style.INK, "o"),
    "siglip": (style.GREY, "v"),
    "dcl": (style.AMBER, "^"),
    "cyclip": (style.PINK, "<"),
    "sogclr": (style.ORANGE, "s"),
    "isogclr": (style.GREEN, ">"),
    "nuclr": (style.BLUE, "D"),
}


def write(content: dict[str, Any], folder: Path, kind: str) -> list[str]:
    """Draw what there is to draw; returns the names of the figures."""
    rows = content["rows"]
    found: list[str] = []
    with style.style():
        if kind == "methods":
            found += _curves(content, list(rows), "curves", folder)
            if {"nuclr", "sogclr"} <= set(rows):
                found += _curves(content, ["sogclr", "nuclr"], "curves_nuclr_sogclr", folder)
        elif kind == "ablations":
            found += _bars(content, folder)
        else:
            found += _sizes(content, folder)
    return found


def _bands(content: dict[str, Any]) -> str:
    seeds = len(content["seeds"])
    return "one seed" if seeds == 1 else f"mean and standard deviation over {seeds} seeds"


def _curves(content: dict[str, Any], names: list[str], name: str, folder: Path) -> list[str]:
    shown = [row for row in names if content["rows"][row]["curve"]["epochs"]]
    if not shown:
        return []
    title = f"Recall@1 on held-out pairs during training\n{_bands(content)}"
    figure, [[axes]] = style.panels(1, 1, title, (6.6, 4.6))
    for row in shown:
        curve = content["rows"][row]["curve"]
        _band(axes, curve["epochs"], np.array(curve["per_seed"]), content["rows"][row])
    axes.set(xlabel="epoch", ylabel="recall@1, mean of both directions (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=9)
    style.save(figure, folder, name)
    return [name]


def _band(axes: Axes, at: list[float], values: np.ndarray, row: dict[str, Any], label: str | None = None) -> None:
    """A line with its band; values (seeds, points)."""
    color, marker = _LOOK[row["method"]]
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    axes.fill_between(at, mean - std, mean + std, color=color, alpha=0.15, linewidth=0)
    axes.plot(at, mean, color=color, marker=marker, markersize=4.5, label=label or row["label"])


def _main_set(content: dict[str, Any]) -> tuple[str, str, str]:
    """The first set that methods are compared on, its metric, and both in words."""
    first = next(found for found in content["sets"] if found["main"])
    if first["kind"] == "classes":
        return first["name"], "acc@1", f"Accuracy on {first['label']}"
    return first["name"], "mean_R@1", f"Recall@1 on {first['label']}"


def _bars(content: dict[str, Any], folder: Path) -> list[str]:
    where, metric, told = _main_set(content)
    rows = list(content["rows"].values())
    if not rows:
        return []
    title = f"{told}\n{_bands(content)}"
    figure, [[axes]] = style.panels(1, 1, title, (7.0, 1.2 + 0.36 * len(rows)))
    for place, row in enumerate(rows):
        found = row["figures"][where][metric]
        color = _LOOK[row["method"]][0]
        axes.errorbar(found["mean"], place, xerr=found["std"], color=color, marker="o", capsize=3)
        axes.scatter(found["per_seed"], [place] * len(found["per_seed"]), s=10, color=color, alpha=0.35, linewidths=0)
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="recall@1, mean of both directions (%)" if metric == "mean_R@1" else "accuracy (%)")
    style.save(figure, folder, "ablations")
    return ["ablations"]


def _sizes(content: dict[str, Any], folder: Path) -> list[str]:
    where, metric, told = _main_set(content)
    by_method: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for name, row in content["rows"].items():
        by_method.setdefault(row["method"], []).append((int(name.rpartition("=")[2]), row))
    if not by_method:
        return []
    title = f"{told}\n{_bands(content)}"
    figure, [[axes]] = style.panels(1, 1, title, (6.6, 4.6))
    for rows in by_method.values():
        rows.sort(key=lambda pair: pair[0])
        values = np.array([row["figures"][where][metric]["per_seed"] for _, row in rows]).T
        _band(axes, [float(size) for size, _ in rows], values, rows[0][1], rows[0][1]["label"].partition(",")[0])
    sizes = sorted({size for rows in by_method.values() for size, _ in rows})
    axes.set(xscale="log", xlabel="batch size")
    axes.set_ylabel("recall@1, mean of both directions (%)" if metric == "mean_R@1" else "accuracy (%)")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.legend(fontsize=9)
    style.save(figure, folder, "batch_sizes")
    return ["batch_sizes"]
