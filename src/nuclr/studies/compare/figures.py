"""Figures of a comparison: validation recall against epochs as in the paper, ablations, recall against batch size."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from nuclr.objectives import entry, names
from nuclr.studies import figure_style

# One marker per objective, in the order of the registry.
MARKERS = ("o", "v", "^", "<", "s", ">", "D", "P", "X", "*", "p", "h", "d")


def write(content: dict[str, Any], folder: Path, kind: str) -> list[str]:
    """Draw the figures of a study and return their names."""
    rows = content["rows"]
    drawn: list[str] = []
    with figure_style.house_style():
        if kind == "methods":
            drawn += _curves(content, list(rows), "curves", folder)
            compared = [(name, other) for name, row in rows.items() for other in entry(row["method"]).compare_to]
            for name, other in compared:
                if other in rows:
                    drawn += _curves(content, [other, name], f"curves_{name}_{other}", folder)
        elif kind == "ablations":
            drawn += _bars(content, folder)
        else:
            drawn += _sizes(content, folder)
    return drawn


def _bands(content: dict[str, Any]) -> str:
    seeds = len(content["seeds"])
    return "one seed" if seeds == 1 else f"mean and standard deviation over {seeds} seeds"


def _curves(content: dict[str, Any], rows: list[str], name: str, folder: Path) -> list[str]:
    shown = [row for row in rows if content["rows"][row]["curve"]["epochs"]]
    if not shown:
        return []
    classes = next(reported for reported in content["sets"] if reported["name"] == "val")["kind"] == "classes"
    metric = "Accuracy on labeled images" if classes else "Recall@1 on held-out pairs"
    title = f"{metric} during training\n{_bands(content)}"
    figure, [[axes]] = figure_style.panels(1, 1, title, (6.6, 4.6))
    for row in shown:
        curve = content["rows"][row]["curve"]
        _band(axes, curve["epochs"], np.array(curve["per_seed"]), content["rows"][row])
    axes.set(xlabel="epoch", ylabel="accuracy (%)" if classes else "recall@1, mean of both directions (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=9)
    figure_style.save(figure, folder, name)
    return [name]


def _band(axes: Axes, at: list[float], values: np.ndarray, row: dict[str, Any], label: str | None = None) -> None:
    """Draw the mean with a band of one standard deviation; values (seeds, points)."""
    color = entry(row["method"]).color
    marker = MARKERS[names().index(row["method"]) % len(MARKERS)]
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    axes.fill_between(at, mean - std, mean + std, color=color, alpha=0.15, linewidth=0)
    axes.plot(at, mean, color=color, marker=marker, markersize=4.5, label=label or row["label"])


def _main_set(content: dict[str, Any]) -> tuple[str, str, str]:
    """Return the first set that methods are compared on, its metric, and a title."""
    first = next(reported for reported in content["sets"] if reported["main"])
    if first["kind"] == "classes":
        return first["name"], "acc@1", f"Accuracy on {first['label']}"
    return first["name"], "mean_R@1", f"Recall@1 on {first['label']}"


def _bars(content: dict[str, Any], folder: Path) -> list[str]:
    set_name, metric, heading = _main_set(content)
    rows = list(content["rows"].values())
    if not rows:
        return []
    title = f"{heading}\n{_bands(content)}"
    figure, [[axes]] = figure_style.panels(1, 1, title, (7.0, 1.2 + 0.36 * len(rows)))
    for height, row in enumerate(rows):
        value = row["metrics"][set_name][metric]
        color = entry(row["method"]).color
        axes.errorbar(value["mean"], height, xerr=value["std"], color=color, marker="o", capsize=3)
        axes.scatter(value["per_seed"], [height] * len(value["per_seed"]), s=10, color=color, alpha=0.35, linewidths=0)
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="recall@1, mean of both directions (%)" if metric == "mean_R@1" else "accuracy (%)")
    figure_style.save(figure, folder, "ablations")
    return ["ablations"]


def _sizes(content: dict[str, Any], folder: Path) -> list[str]:
    set_name, metric, heading = _main_set(content)
    by_method: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for name, row in content["rows"].items():
        by_method.setdefault(row["method"], []).append((int(name.rpartition("=")[2]), row))
    if not by_method:
        return []
    title = f"{heading}\n{_bands(content)}"
    figure, [[axes]] = figure_style.panels(1, 1, title, (6.6, 4.6))
    for rows in by_method.values():
        rows.sort(key=lambda pair: pair[0])
        values = np.array([row["metrics"][set_name][metric]["per_seed"] for _, row in rows]).T
        _band(axes, [float(size) for size, _ in rows], values, rows[0][1], rows[0][1]["label"].partition(",")[0])
    sizes = sorted({size for rows in by_method.values() for size, _ in rows})
    axes.set(xscale="log", xlabel="batch size")
    axes.set_ylabel("recall@1, mean of both directions (%)" if metric == "mean_R@1" else "accuracy (%)")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.legend(fontsize=9)
    figure_style.save(figure, folder, "batch_sizes")
    return ["batch_sizes"]
