"""The page of `nuclr compare`: what its JSON files hold -> what the template shows."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.errors import UserError
from nuclr.report import numbers
from nuclr.report.charts import Chart, Interval, Series, interval_chart, line_chart
from nuclr.report.summary import Table, Tile

FILES = {"methods": "compare.json", "ablations": "ablations.json", "batch_sizes": "batch_sizes.json"}
SLOTS = {"nuclr": 1, "sogclr": 2, "isogclr": 3, "cyclip": 4, "siglip": 5, "dcl": 6, "clip": 8}
MOST_INTERVALS = 14  # in one chart
VERDICTS = {(True, True): "better", (True, False): "worse"}


@dataclass(frozen=True)
class Study:
    """One of the comparison's studies: methods, ablations or batch sizes."""

    key: str
    title: str
    table: Table
    told: str
    curves: list[Chart]
    intervals: list[Chart]
    differences: Table | None
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
        value = row["figures"][where][metric]
        spread = f"± {value['std']:.1f}, {what}, {where}"
        found.append(Tile(row["label"], f"{value['mean']:.1f}{numbers.SPACE}%", spread))
    return found


def _study(key: str, content: dict[str, Any]) -> Study:
    seeds = len(content["seeds"])
    return Study(
        key=key,
        title=content["title"],
        table=_figures(content),
        told=f"Percent, mean and standard deviation over {seeds} seed{_s(seeds)}; the best is stressed.",
        curves=_sizes(content) if key == "batch_sizes" else _curves(content),
        intervals=_intervals(content),
        differences=_differences(content),
        corrected=_corrected(content),
        false_negatives=_false_negatives(content),
        chosen=_chosen(content),
        protocol=content["protocol"],
        command=content["command"],
    )


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _columns(content: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(set, metric, title) of what the table shows."""
    found: list[tuple[str, str, str]] = []
    for report in content["sets"]:
        name = report["name"]
        if report["kind"] == "classes":
            found.append((name, "acc@1", f"{name}: accuracy"))
        elif report["main"]:
            wanted = (("image_to_text_R@1", "image to text @1"), ("text_to_image_R@1", "text to image @1"))
            wanted += (("mean_R@1", "mean @1"), ("mean_R@5", "mean @5"), ("mean_R@10", "mean @10"))  # type: ignore[assignment]
            found += [(name, metric, f"{name}: {title}") for metric, title in wanted]
        else:
            found.append((name, "mean_R@1", f"{name}: mean @1"))
    return found + [(name, "first", name) for name in content["averages"]]


def _figures(content: dict[str, Any]) -> Table:
    shown = _columns(content)
    rows, means = [], []
    for row in content["rows"].values():
        found = [row["figures"][where][metric] for where, metric, _ in shown]
        rows.append([row["label"], *(_cell(one) for one in found)])
        means.append([one["mean"] for one in found])
    best = set()
    if len(means) > 1:
        best = {(int(r), c + 1) for c, r in enumerate(np.argmax(np.array(means), axis=0))}
    return Table(["", *(title for _, _, title in shown)], rows, best)


def _cell(found: dict[str, Any]) -> str:
    return f"{found['mean']:.2f} ± {found['std']:.2f}"


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
        epochs = [float(epoch) for epoch in curve["epochs"]]
        series.append(_band(row["label"], epochs, np.array(curve["per_seed"]), slot, slot in used))
        used.add(slot)
    if not series:
        return []
    note = "Mean over the seeds; bands are one standard deviation." if len(content["seeds"]) > 1 else ""
    return [line_chart("Recall@1 on held-out pairs, mean of both directions", series, "epoch", percent=True, note=note)]


def _sizes(content: dict[str, Any]) -> list[Chart]:
    where, metric = _main(content)
    by_method: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for name, row in content["rows"].items():
        by_method.setdefault(row["method"], []).append((float(name.rpartition("=")[2]), row))
    series = []
    for method, rows in by_method.items():
        rows.sort(key=lambda pair: pair[0])
        values = np.array([row["figures"][where][metric]["per_seed"] for _, row in rows]).T
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
    return [
        interval_chart(
            f"Differences on {name}", rows[:MOST_INTERVALS], "points", "Grey: zero lies within the interval."
        )
        for name, rows in found.items()
    ]


def _differences(content: dict[str, Any]) -> Table | None:
    rows = [
        [
            f"{content['rows'][d['row']]['label']} over {content['rows'][d['to']]['label']}",
            d["set"],
            numbers.signed(d["difference"]),
            f"{numbers.signed(d['low'])} to {numbers.signed(d['high'])}",
            VERDICTS.get((bool(d["outside"]), d["difference"] > 0), "not told apart"),
        ]
        for d in content["differences"]
    ]
    return Table(["", "set", "points", "95\u202f% interval", "verdict"], rows, set()) if rows else None


def _corrected(content: dict[str, Any]) -> Table | None:
    rows = []
    for row in content["rows"].values():
        for where, banks in row["corrected"].items():
            cells = [_cell(row["figures"][where]["mean_R@1"])]
            for bank in ("train", "queries"):
                gain = banks[bank]["gain"] if bank in banks else None
                cells.append(_cell(banks[bank]["mean_R@1"]) if gain else numbers.MISSING)
                cells.append(_gain(gain) if gain else numbers.MISSING)
            rows.append([row["label"], where, *cells])
    columns = ["", "set", "plain", "bank: training queries", "gain", "bank: own queries", "gain"]
    return Table(columns, rows, set()) if rows else None


def _gain(gain: dict[str, Any]) -> str:
    value, low, high = (numbers.signed(gain[key]) for key in ("difference", "low", "high"))
    return f"{value} [{low}, {high}]"


def _false_negatives(content: dict[str, Any]) -> Table | None:
    rows = [
        [row["label"], _cell(row["false_negatives"]["weighted"]), f"{row['false_negatives']['uniform']:.2f}"]
        for row in content["rows"].values()
        if row.get("false_negatives")
    ]
    return Table(["", "at the trained temperature", "with equal weights"], rows, set()) if rows else None


def _chosen(content: dict[str, Any]) -> Table:
    rows = []
    for row in content["rows"].values():
        for where, changes in row["tuning"]["chosen"].items():
            told = ", ".join(f"{key.removeprefix('objective.')} {value}" for key, value in changes.items())
            rows.append([row["label"], where, told])
    return Table(["", "tuned on", "setting"], rows, set())
