"""Tables of benchmarks/search.py: changes against plain search, with intervals over all cells at once.

A *cell* is a set, an encoder and a regime; the queries of its splits are pooled. Changes are in points (percent). The
standard error of a cell is that of a paired bootstrap over queries, with Poisson weights that are the same for all
methods. A cell is "below plain" if its change is negative and significant at 5 % after Holm's correction over all cells
of the method; "above" likewise. Means over cells weigh all cells equally, and their intervals resample every cell.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

DRAWS = 1000
LEVEL = 0.05
METRICS = ("recall@1", "MRR")
CHOSEN_ON = ("acl", "debian")
LOOKED_AT = ("tldr_pages",)
CLEAN = "clean-2000"

Key = tuple[str, str, str]  # set, encoder, regime


@dataclass(frozen=True)
class Cell:
    """Means of a cell, and the changes of every bootstrap draw.

    Attributes:
        means: Per method and metric, in percent.
        change: Per method, change of recall@1 and MRR against plain, (2,).
        draws: The same in every draw, (DRAWS, 2).
        queries: Number of queries.

    """

    means: dict[str, dict[str, float]]
    change: dict[str, np.ndarray]
    draws: dict[str, np.ndarray]
    queries: int

    def error(self, method: str) -> np.ndarray:
        """Return the standard errors of the changes, (2,)."""
        return self.draws[method].std(axis=0)


def read_cells(files: Iterable[Path]) -> dict[Key, Cell]:
    """Return the cells of result files named {set}-{encoder}-{split}-{family}.npz."""
    parts: dict[Key, dict[str, dict[str, list[np.ndarray]]]] = {}
    for file in files:
        name, encoder = file.stem.split("-")[:2]
        with np.load(file) as content:
            for key in content:
                regime, method, measure = key.split("|")
                measures = parts.setdefault((name, encoder, regime), {}).setdefault(method, {})
                measures.setdefault(measure, []).append(content[key])
    cells = {}
    for key, methods in parts.items():
        pooled = {}
        for method, measures in methods.items():
            pooled[method] = {measure: np.concatenate(values) for measure, values in measures.items()}
        cells[key] = make_cell(pooled)
    return cells


@cache
def bootstrap_weights(queries: int) -> np.ndarray:
    """Return the weights of queries in every draw, (DRAWS, queries).

    They are the same for all cells: cells with the same test queries are not independent, and those with others are.
    """
    weights = np.random.default_rng(0).poisson(1, (DRAWS, queries)).astype(np.float32)
    return weights / np.maximum(weights.sum(axis=1, keepdims=True), 1)


def make_cell(pooled: dict[str, dict[str, np.ndarray]]) -> Cell:
    """Return a cell from the ranks of its queries."""
    means = {}
    values = {}
    for method, measures in pooled.items():
        rank = measures["rank"].astype(np.float64)
        values[method] = 100 * np.stack([rank == 1, 1 / rank], axis=1)
        means[method] = {
            "recall@1": float(values[method][:, 0].mean()),
            "recall@10": 100 * float((rank <= 10).mean()),
            "MRR": float(values[method][:, 1].mean()),
            "nDCG@10": 100 * float(measures["ndcg"].astype(np.float64).mean()),
            "never found": 100 * float(measures["never"].mean()),
        }
    methods = list(values)
    changes = np.concatenate([values[method] - values["plain"] for method in methods], axis=1)
    drawn = (bootstrap_weights(len(changes)) @ changes.astype(np.float32)).astype(np.float64)
    change = {method: changes[:, 2 * number :][:, :2].mean(axis=0) for number, method in enumerate(methods)}
    draws = {method: drawn[:, 2 * number :][:, :2] for number, method in enumerate(methods)}
    return Cell(means, change, draws, len(changes))


# -- statistics --------------------------------------------------------------------------------------------------------


def significant(cells: list[Cell], method: str, metric: int) -> list[int]:
    """Return per cell -1, 0 or 1: below plain, no significant difference, above (Holm, two-sided)."""
    p_values = []
    for cell in cells:
        error = cell.error(method)[metric]
        size = abs(cell.change[method][metric])
        p_values.append(1.0 if size == 0 else 2 * NormalDist().cdf(-size / max(error, 1e-9)))
    signs = [0] * len(cells)
    for number, row in enumerate(np.argsort(p_values)):
        if p_values[row] > LEVEL / (len(cells) - number):
            break
        signs[row] = int(np.sign(cells[row].change[method][metric]))
    return signs


def mean_change(cells: list[Cell], method: str, other: str = "plain", metric: int = 0) -> dict[str, float]:
    """Return the mean over cells of the difference of two methods, with its 95 % interval."""
    exact = np.mean([cell.change[method][metric] - cell.change[other][metric] for cell in cells])
    draws = np.mean([cell.draws[method][:, metric] - cell.draws[other][:, metric] for cell in cells], axis=0)
    low, high = np.quantile(draws, [LEVEL / 2, 1 - LEVEL / 2])
    return {"mean": float(exact), "low": float(low), "high": float(high)}


def summarize(cells: dict[Key, Cell], method: str) -> dict[str, Any]:
    """Return the numbers of a method over the cells in which it was measured."""
    own = {key: cell for key, cell in cells.items() if method in cell.change}
    every = list(own.values())
    summary: dict[str, Any] = {"cells": len(every)}
    for number, metric in enumerate(METRICS):
        changes = {key: float(cell.change[method][number]) for key, cell in own.items()}
        signs = significant(every, method, number)
        worst = min(changes, key=lambda key: changes[key])
        # the interval of Bonferroni is the one of Holm's first step
        reach = NormalDist().inv_cdf(1 - LEVEL / 2 / len(own)) * float(own[worst].error(method)[number])
        summary[metric] = {
            **mean_change(every, method, metric=number),
            "worst": changes[worst],
            "worst_cell": ", ".join(worst),
            "worst_interval": [changes[worst] - reach, changes[worst] + reach],
            "below_plain": signs.count(-1),
            "above_plain": signs.count(1),
            "below": [", ".join(key) for key, sign in zip(own, signs, strict=True) if sign < 0],
            "below_minus_one": sum(change < -1 for change in changes.values()),
            "regimes": {},
        }
        for regime in dict.fromkeys(regime for _, _, regime in own):
            part = [change for key, change in changes.items() if key[2] == regime]
            summary[metric]["regimes"][regime] = {"mean": float(np.mean(part)), "worst": min(part)}
    for group, names in groups(cells).items():
        for regime in ("all", CLEAN):
            part = [cell for key, cell in own.items() if key[0] in names and regime in ("all", key[2])]
            if part:
                summary.setdefault(group, {})[regime] = mean_change(part, method)
    return summary


def groups(cells: dict[Key, Cell]) -> dict[str, list[str]]:
    """Return the sets that settings were chosen on, that were looked at, and that were not used."""
    names = list(dict.fromkeys(name for name, _, _ in cells))
    return {
        "chosen on": [name for name in names if name in CHOSEN_ON],
        "looked at": [name for name in names if name in LOOKED_AT],
        "not used": [name for name in names if name not in CHOSEN_ON + LOOKED_AT],
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def with_interval(value: dict[str, float]) -> str:
    """Return a mean with its interval."""
    return f"{value['mean']:+.2f} [{value['low']:+.2f}, {value['high']:+.2f}]"


def method_table(summaries: dict[str, dict[str, Any]], methods: list[str], metric: str) -> str:
    """Return the change against plain per method: over all cells and per regime."""
    regimes = list(dict.fromkeys(regime for method in methods for regime in summaries[method][metric]["regimes"]))
    rows = []
    for method in methods:
        values = summaries[method][metric]
        row = [method, f"{values['mean']:+.2f}", f"{values['worst']:+.1f}"]
        row += [f"{values['below_plain']} / {values['above_plain']} of {summaries[method]['cells']}"]
        for regime in regimes:
            part = values["regimes"].get(regime)
            row.append(f"{part['mean']:+.1f} ({part['worst']:+.1f})" if part else "")
        rows.append(row)
    return table([f"change of {metric}", "mean", "worst cell", "below / above plain", *regimes], rows)


def group_table(summaries: dict[str, dict[str, Any]], methods: list[str]) -> str:
    """Return the change of recall@1 by how sets were used."""
    columns = [(group, regime) for group in ("chosen on", "looked at", "not used") for regime in ("all", CLEAN)]
    rows = []
    for method in methods:
        row = [method]
        for group, regime in columns:
            value = summaries[method].get(group, {}).get(regime)
            row.append(with_interval(value) if value else "")
        rows.append(row)
    heads = [f"{group}: {'all regimes' if regime == 'all' else regime}" for group, regime in columns]
    return table(["change of recall@1", *heads], rows)


def metric_table(cells: dict[Key, Cell], methods: list[str]) -> str:
    """Return the means of all metrics in the clean regime."""
    clean = [cell for key, cell in cells.items() if key[2] == CLEAN]
    names = list(clean[0].means["plain"])
    rows = []
    for method in methods:
        if all(method in cell.means for cell in clean):
            rows.append([method, *(f"{np.mean([cell.means[method][name] for cell in clean]):.1f}" for name in names)])
    return table([CLEAN, *names], rows)


def cell_table(cells: dict[Key, Cell], method: str) -> str:
    """Return the change of recall@1 of a method in every cell; * is significant (Holm)."""
    own = {key: cell for key, cell in cells.items() if method in cell.change}
    signs = dict(zip(own, significant(list(own.values()), method, 0), strict=True))
    regimes = list(dict.fromkeys(key[2] for key in own))
    rows = []
    for name, encoder in dict.fromkeys(key[:2] for key in own):
        row = [f"{name}, {encoder}"]
        for regime in regimes:
            cell = own.get((name, encoder, regime))
            mark = "*" if signs.get((name, encoder, regime)) else ""
            plain = f" ({cell.means['plain']['recall@1']:.1f})" if cell and regime == CLEAN else ""
            row.append(f"{cell.change[method][0]:+.1f}{mark}{plain}" if cell else "")
        rows.append(row)
    return table([f"{method}, change of recall@1", *regimes], rows)


def worst_table(summaries: dict[str, dict[str, Any]], methods: list[str]) -> str:
    """Return the worst cell of each method with its simultaneous interval."""
    rows = []
    for method in methods:
        values = summaries[method]["recall@1"]
        low, high = values["worst_interval"]
        rows.append([method, values["worst_cell"], f"{values['worst']:+.2f} [{low:+.2f}, {high:+.2f}]"])
    return table(["method", "worst cell", "change of recall@1, simultaneous 95 % interval"], rows)


def report(files: Iterable[Path]) -> tuple[str, dict[str, Any]]:
    """Return the Markdown text and the numbers behind it."""
    cells = read_cells(files)
    methods = list(dict.fromkeys(method for cell in cells.values() for method in cell.change))
    summaries = {method: summarize(cells, method) for method in methods if method != "plain"}

    def ordered(names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: -summaries[name]["recall@1"]["mean"])

    tuned = ordered(name for name in summaries if name.endswith(", tuned"))
    answers = ordered(name for name in summaries if name.endswith(", answers"))
    default = ordered(name for name in summaries if name not in tuned + answers)
    peers = [name for name in default if "ours" not in name and not name.startswith("whitened")]
    comparisons = {}
    for clean in (CLEAN, "clean"):
        part = [cell for key, cell in cells.items() if key[2].startswith(clean)]
        ranked = sorted(peers, key=lambda name: -mean_change(part, name)["mean"])
        for name in (ranked[0], "CSLS", "NNN"):
            comparisons[f"{clean}: ours minus {name}"] = mean_change(part, "ours", name)
        best = max((name for name in tuned if "ours" not in name), key=lambda name: mean_change(part, name)["mean"])
        comparisons[f"{clean}: ours minus {best} (with labels)"] = mean_change(part, "ours", best)
        comparisons[f"{clean}: ours, tuned minus {best}"] = mean_change(part, "ours, tuned", best)
    every = list(cells.values())
    for name in peers:
        comparisons[f"all cells: ours minus {name}"] = mean_change(every, "ours", name)
    lines = [f"Queries per cell: {min(cell.queries for cell in every):,} to {max(cell.queries for cell in every):,}.\n"]
    lines.append("Without labels; per regime the mean over sets and encoders (the worst of them):\n")
    lines += [method_table(summaries, default, metric) for metric in METRICS]
    lines.append("With the answers of the log:\n")
    lines += [method_table(summaries, answers, metric) for metric in METRICS]
    lines.append("Tuned with labels of a further split, once per set and encoder:\n")
    lines += [method_table(summaries, tuned, "recall@1")]
    lines.append("By the use of the sets for choosing the settings of our default:\n")
    lines += [group_table(summaries, [*default, *answers])]
    lines += [metric_table(cells, ["plain", *default, *tuned])]
    lines += [cell_table(cells, name) for name in ("ours", "ours, answers")]
    lines += [worst_table(summaries, default)]
    lines += [table(["comparison", "recall@1"], [[name, with_interval(value)] for name, value in comparisons.items()])]
    numbers = {
        "methods": summaries,
        "comparisons": comparisons,
        "cells": {", ".join(key): cell.means for key, cell in cells.items()},
    }
    return "\n".join(lines), numbers
