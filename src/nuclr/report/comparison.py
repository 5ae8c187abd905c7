"""The page of `nuclr compare`: what its JSON files hold -> what the template shows."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.errors import UserError
from nuclr.report import comparison_tables as tables
from nuclr.report import numbers
from nuclr.report.charts import Chart, Series, line_chart
from nuclr.report.spreads import Interval, interval_chart
from nuclr.report.summary import Table, Tile

FILES = {"methods": "compare.json", "ablations": "ablations.json", "batch_sizes": "batch_sizes.json"}
SLOTS = {"nuclr": 1, "sogclr": 2, "isogclr": 3, "cyclip": 4, "siglip": 5, "dcl": 6, "clip": 8}
MOST_INTERVALS = 14  # in one chart
MOST_BANDS = 4


@dataclass(frozen=True)
class Study:
    """One of the comparison's studies: methods, ablations or batch sizes."""

    key: str
    title: str
    tables: list[tuple[str, Table]]
    told: str
    curves: list[Chart]
    intervals: list[Chart]
    corrected: Table | None
    false_negatives: Table | None
    chosen: Table
    protocol: list[str]
    command: str


@dataclass
class ComparisonPage:
    """All that the template needs."""

    title: str
    sentence: str
    tiles: list[Tile]
    notes: list[str]
    studies: list[Study]
    settings: str
    versions: str


def is_comparison(path: Path) -> bool:
    """Whether a comparison was finished here."""
    return any((path / name).is_file() for name in FILES.values())


def comparison_page(path: Path) -> ComparisonPage:
    """Read the folder."""
    contents = {key: _read(path / name) for key, name in FILES.items() if (path / name).is_file()}
    first = next(iter(contents.values()))
    try:
        studies = [_study(key, content) for key, content in contents.items()]
        labels = [row["label"] for row in first["rows"].values()]
        seeds = len(first["seeds"])
        notes = []
        for content in contents.values():
            notes += [f"Not shown, as its runs are missing: {name}." for name in content["missing"]]
            notes += [f"A run failed: {name}: {reason}" for name, reason in content["failed"].items()]
        return ComparisonPage(
            title="Comparison",
            sentence=f"{', '.join(labels)}: {seeds} seed{_s(seeds)} each, tuned over grids of the same "
            f"size, on {first['settings'].get('data.train', 'the same pairs')}.",
            tiles=_tiles(first),
            notes=notes,
            studies=studies,
            settings="\n".join(f"{key}: {value}" for key, value in first["settings"].items()),
            versions=", ".join(
                f"{name} {first[key]}" for name, key in (("nuclr", "version"), ("python", "python"), ("torch", "torch"),
                                                         ("numpy", "numpy")) if key in first
            ),
        )  # fmt: skip
    except (KeyError, TypeError, IndexError, StopIteration) as error:
        raise UserError(
            f"{path}: not what this version of nuclr compare writes ({type(error).__name__}: {error})"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "rows" not in content:
            raise ValueError("no rows")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not what nuclr compare writes ({error})") from None
    return content


def _main(content: dict[str, Any]) -> tuple[str, str]:
    """The first set that methods are compared on, and its metric."""
    found = next(s for s in content["sets"] if s["main"])
    return found["name"], "acc@1" if found["kind"] == "classes" else "mean_R@1"


def _tiles(content: dict[str, Any]) -> list[Tile]:
    where, metric = _main(content)
    what = "accuracy" if metric.startswith("acc") else "recall@1"
    found = []
    for row in list(content["rows"].values())[:8]:
        value = row["metrics"][where][metric]
        spread = f"± {value['std']:.1f}, {what}, {where}"
        found.append(Tile(row["label"], f"{value['mean']:.1f}{numbers.SPACE}%", spread))
    return found


def _study(key: str, content: dict[str, Any]) -> Study:
    seeds = len(content["seeds"])
    return Study(
        key=key,
        title=content["title"],
        tables=tables.tables(content),
        told=f"Percent, mean and standard deviation over {seeds} seed{_s(seeds)}; the best is stressed.",
        curves=_sizes(content) if key == "batch_sizes" else _curves(content),
        intervals=_intervals(content),
        corrected=tables.corrected(content),
        false_negatives=tables.false_negatives(content),
        chosen=tables.chosen(content),
        protocol=content["protocol"],
        command=content["command"],
    )


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _band(name: str, x: list[float], values: np.ndarray, slot: int, dashed: bool) -> Series:
    """Percent of every seed (seeds, points) -> a curve of fractions with its standard deviation."""
    values = values / 100
    mean = values.mean(axis=0)
    std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
    band = ((mean - std).tolist(), (mean + std).tolist()) if len(values) > 1 else None
    return Series(name, x, mean.tolist(), slot, dashed, band)


def _curves(content: dict[str, Any]) -> list[Chart]:
    series, used = [], set()
    for row in content["rows"].values():
        curve = row["curve"]
        if not curve["epochs"]:
            continue
        slot = SLOTS.get(row["method"], 7)
        if slot in used:  # ablations are all of one method
            slot = next((free for free in range(1, 9) if free not in used), slot)
        epochs = [float(epoch) for epoch in curve["epochs"]]
        series.append(_band(row["label"], epochs, np.array(curve["per_seed"]), slot, slot in used))
        used.add(slot)
    if not series:
        return []
    note = "Mean over the seeds; bands are one standard deviation." if len(content["seeds"]) > 1 else ""
    if len(series) > MOST_BANDS:
        series, note = [replace(s, band=None) for s in series], "Mean over the seeds."
    title = "Recall@1 while training, mean of directions"
    return [line_chart(title, series, "epoch", percent=True, whole_x=True, note=note)]


def _sizes(content: dict[str, Any]) -> list[Chart]:
    where, metric = _main(content)
    by_method: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for name, row in content["rows"].items():
        by_method.setdefault(row["method"], []).append((float(name.rpartition("=")[2]), row))
    series = []
    for method, rows in by_method.items():
        rows.sort(key=lambda pair: pair[0])
        values = np.array([row["metrics"][where][metric]["per_seed"] for _, row in rows]).T
        label = rows[0][1]["label"].partition(",")[0]
        series.append(_band(label, [size for size, _ in rows], values, SLOTS.get(method, 7), False))
    ticks = sorted({x for s in series for x in s.x})
    title = f"Recall@1 on {where} against batch size"
    return [line_chart(title, series, "batch size", percent=True, log_x=True, x_ticks=ticks)] if series else []


def _intervals(content: dict[str, Any]) -> list[Chart]:
    found: dict[str, list[Interval]] = {}
    for d in content["differences"]:
        name = f"{content['rows'][d['row']]['label']} over {content['rows'][d['to']]['label']}"
        found.setdefault(d["set"], []).append(Interval(name, d["difference"], d["low"], d["high"], d["outside"]))
    named = {name: tables.named(name) if name in content["averages"] else name for name in found}
    return [
        interval_chart(f"Differences, {named[name]}", rows[:MOST_INTERVALS], "points") for name, rows in found.items()
    ]
