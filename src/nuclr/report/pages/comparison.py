"""The page of `nuclr compare`: one section per study (methods, ablations, batch sizes), from its JSON file."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nuclr import files, objectives
from nuclr.errors import UserError
from nuclr.report import numbers
from nuclr.report.charts.lines import Chart, Color, Series, line_chart
from nuclr.report.charts.spreads import Interval, interval_chart
from nuclr.report.render import Context, LeaveOut, Options, Page, Section, Table, Tile, describe
from nuclr.runs.side_words import direction

FILES = {"methods": "compare.json", "ablations": "ablations.json", "batch_sizes": "batch_sizes.json"}
MEAN_COLUMNS = (("mean_R@1", "mean @1"), ("mean_R@5", "mean @5"), ("mean_R@10", "mean @10"))
COMPARED_METRICS = ("mean_R@1", "acc@1", "first")  # those that differences are about
VERSIONS = (("nuclr", "version"), ("python", "python"), ("torch", "torch"), ("numpy", "numpy"))
OTHER_COLOR = 7  # of an objective that is not registered
MOST_INTERVALS = 14  # in one chart
UNITS = {"pairs": "recall@1 (mean of both directions)", "classes": "accuracy"}  # of differences, by kind of the set
MOST_BANDS = 4
MOST_TILES = 8

Results = dict[str, Any]  # content of one of the JSON files


@dataclass
class Comparison(Context):
    """The studies of a comparison by their keys."""

    studies: dict[str, Results] = field(kw_only=True)

    @property
    def first(self) -> Results:
        """The study that the summary is about."""
        return next(iter(self.studies.values()))


@dataclass(frozen=True)
class Summary:
    """Content of the section "summary"."""

    tiles: list[Tile]


@dataclass(frozen=True)
class Study:
    """Content of a study's section."""

    explanation: str
    tables: list[tuple[str, Table]]
    curves: list[Chart]
    intervals: list[Chart]
    unit: str
    corrected: Table | None
    false_negatives: Table | None
    chosen: Table
    protocol: list[str]
    command: str


@dataclass(frozen=True)
class CommonSettings:
    """Content of the section "repeat"."""

    settings: str
    versions: str


def _open(path: Path, _: Options) -> Comparison:
    """Read the studies; one that cannot be read is a note, unless it is the only one."""
    studies, notes, problems = {}, [], []
    for key, name in FILES.items():
        if (path / name).is_file():
            try:
                studies[key] = _read(path / name)
            except UserError as error:
                problems.append(error)
    if not studies:
        raise problems[0]
    notes += [str(error) for error in problems]
    for study in studies.values():
        notes += [f"Not shown, because its runs are missing: {name}." for name in study.get("missing", [])]
        notes += [f"A run failed: {name}: {reason}" for name, reason in study.get("failed", {}).items()]
    context = Comparison(title="Comparison", sentence="", notes=notes, studies=studies)
    try:
        context.sentence = _sentence(context.first)
    except (KeyError, TypeError, AttributeError) as error:
        context.note(f"The settings of the comparison cannot be read: {describe(error)}")
    return context


def _read(path: Path) -> Results:
    try:
        content: Results = files.parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("rows"), dict) or not content["rows"]:
            raise ValueError("it has no rows")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} was not written by nuclr compare, or is damaged ({error})") from None
    return content


def _sentence(study: Results) -> str:
    labels = ", ".join(row["label"] for row in study["rows"].values())
    data = study["settings"].get("data.train", "the same pairs")
    return f"{labels}: {_seeds(study)} each, tuned over grids of the same size, on {data}."


def _seeds(study: Results) -> str:
    count = len(study["seeds"])
    return f"{count} seed" if count == 1 else f"{count} seeds"


def comparison_summary(context: Comparison) -> Summary:
    """Return the main metric of the first study as headline numbers."""
    where, metric = _main_metric(context.first)
    unit = "accuracy" if metric.startswith("acc") else "recall@1"
    tiles = []
    for row in list(context.first["rows"].values())[:MOST_TILES]:
        value = row["metrics"][where][metric]
        detail = f"± {value['std']:.1f}, {unit}, {where}"
        tiles.append(Tile(row["label"], f"{value['mean']:.1f}{numbers.SPACE}%", detail))
    return Summary(tiles)


def _main_metric(study: Results) -> tuple[str, str]:
    """Return the first set that methods are compared on, and its metric."""
    main = next(s for s in study["sets"] if s["main"])
    return main["name"], "acc@1" if main["kind"] == "classes" else "mean_R@1"


def comparison_study(key: str, context: Comparison) -> Study:
    """Return the tables and charts of one study."""
    if key not in context.studies:
        raise LeaveOut  # nobody asked for this study
    study = context.studies[key]
    return Study(
        explanation=f"Percent, mean and standard deviation over {_seeds(study)}. Bold: the best mean @1 or accuracy, "
        "if it differs significantly from all rows that it is compared with.",
        tables=result_tables(study),
        curves=_size_curves(study) if key == "batch_sizes" else _training_curves(study),
        intervals=_difference_charts(study),
        unit=" or ".join(dict.fromkeys(UNITS[reported["kind"]] for reported in study["sets"])),
        corrected=corrected_table(study),
        false_negatives=false_negative_table(study),
        chosen=chosen_table(study),
        protocol=study["protocol"],
        command=study["command"],
    )


def common_settings(context: Comparison) -> CommonSettings:
    """Return the settings that all runs share."""
    return CommonSettings(
        settings="\n".join(f"{key}: {value}" for key, value in context.first["settings"].items()),
        versions=", ".join(f"{name} {context.first[key]}" for name, key in VERSIONS if key in context.first),
    )


# Tables


def result_tables(study: Results) -> list[tuple[str, Table]]:
    """Return a title and a table per test set, and a table of the averages over sets."""
    tables = []
    x, y = study["sides"]
    directions = tuple((f"{a}_to_{b}_R@1", f"{direction(a, b)} @1") for a, b in ((x, y), (y, x)))
    for test_set in study["sets"]:
        columns = (("acc@1", "accuracy"),) if test_set["kind"] == "classes" else directions + MEAN_COLUMNS
        name, label = test_set["name"], test_set["label"]
        title = name if label == name else f"{name}: {label}"
        tables.append((title, _metric_table(study, [(name, *column) for column in columns])))
    if study["averages"]:
        averages = [(name, "first", _average_name(name)) for name in study["averages"]]
        tables.append(("Averages over sets", _metric_table(study, averages)))
    return tables


def _average_name(average: str) -> str:
    name = average.removeprefix("average: ")
    return "mean of all sets" if name == "mean" else f"mean of {name} sets"


def _metric_table(study: Results, columns: list[tuple[str, str, str]]) -> Table:
    """Return the table of these columns: (set, metric, title)."""
    rows, means = [], []
    for row in study["rows"].values():
        values = [row["metrics"][where][metric] for where, metric, _ in columns]
        rows.append([row["label"], *(_cell(value) for value in values)])
        means.append([value["mean"] for value in values])
    best: set[tuple[int, int]] = set()
    for column, ((where, metric, _), values) in enumerate(zip(columns, np.array(means).T, strict=True)):
        first = int(values.argmax())
        if metric in COMPARED_METRICS and _is_significant(study, list(study["rows"])[first], where):
            best.add((first, column + 1))
    return Table(["", *(title for _, _, title in columns)], rows, frozenset(best))


def _is_significant(study: Results, name: str, where: str) -> bool:
    """Return whether a row differs significantly on a set from all rows that it is compared with, at least one."""
    own = [d["outside"] for d in study["differences"] if d["set"] == where and name in (d["row"], d["to"])]
    return bool(own) and all(own)


def _cell(value: dict[str, Any]) -> str:
    return f"{value['mean']:.2f} ± {value['std']:.2f}"


def corrected_table(study: Results) -> Table | None:
    """Return plain and popularity-corrected ranking, with gains."""
    rows = []
    for row in study["rows"].values():
        for where, banks in row["corrected"].items():
            cells = [_cell(row["metrics"][where]["mean_R@1"])]
            for bank in ("train", "queries"):
                gain = banks[bank]["gain"] if bank in banks else None
                cells.append(_cell(banks[bank]["mean_R@1"]) if gain else numbers.MISSING)
                cells.append(_gain(gain) if gain else numbers.MISSING)
            rows.append([row["label"], where, *cells])
    columns = ["", "set", "plain", "bank: training queries", "gain", "bank: own queries", "gain"]
    return Table(columns, rows) if rows else None


def _gain(gain: dict[str, Any]) -> str:
    value, low, high = (numbers.signed(gain[key]) for key in ("difference", "low", "high"))
    return f"{value} [{low}, {high}]"


def false_negative_table(study: Results) -> Table | None:
    """Return the weight on known false negatives, if they are known."""
    rows = [
        [row["label"], _cell(row["false_negatives"]["weighted"]), f"{row['false_negatives']['uniform']:.2f}"]
        for row in study["rows"].values()
        if row.get("false_negatives")
    ]
    return Table(["", "at the trained temperature", "with equal weights"], rows) if rows else None


def chosen_table(study: Results) -> Table:
    """Return the settings that tuning chose."""
    rows = []
    for row in study["rows"].values():
        for where, changes in row["tuning"]["chosen"].items():
            settings = ", ".join(f"{key.removeprefix('objective.')} {value}" for key, value in changes.items())
            rows.append([row["label"], where, settings])
    return Table(["", "tuned on", "setting"], rows)


# Charts


def _color(method: str) -> Color:
    return objectives.entry(method).color if method in objectives.names() else OTHER_COLOR


def _band(name: str, x: list[float], values: np.ndarray, color: Color, dashed: bool = False) -> Series:
    """Return the mean over seeds of percent (seeds, points) as fractions, with the standard deviation as a band."""
    values = values / 100
    mean = values.mean(axis=0)
    std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
    band = ((mean - std).tolist(), (mean + std).tolist()) if len(values) > 1 else None
    return Series(name, x, mean.tolist(), color, dashed, band)


def _training_curves(study: Results) -> list[Chart]:
    series: list[Series] = []
    used: set[Color] = set()
    for row in study["rows"].values():
        curve = row["curve"]
        if not curve["epochs"]:
            continue
        color = _color(row["method"])
        if color in used:  # ablations are all of one method
            color = next((slot for slot in range(1, 9) if slot not in used), color)
        epochs = [float(epoch) for epoch in curve["epochs"]]
        series.append(_band(row["label"], epochs, np.array(curve["per_seed"]), color, dashed=color in used))
        used.add(color)
    if not series:
        return []
    note = "Mean over the seeds; bands are one standard deviation." if len(study["seeds"]) > 1 else ""
    if len(series) > MOST_BANDS:
        series, note = [replace(s, band=None) for s in series], "Mean over the seeds."
    classes = next(one for one in study["sets"] if one["name"] == "val")["kind"] == "classes"
    title = "Accuracy while training" if classes else "Recall@1 while training, mean of directions"
    return [line_chart(title, series, "epoch", percent=True, whole_x=True, note=note)]


def _size_curves(study: Results) -> list[Chart]:
    where, metric = _main_metric(study)
    by_method: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for name, row in study["rows"].items():
        by_method.setdefault(row["method"], []).append((float(name.rpartition("=")[2]), row))
    series = []
    for method, rows in by_method.items():
        rows.sort(key=lambda pair: pair[0])
        values = np.array([row["metrics"][where][metric]["per_seed"] for _, row in rows]).T
        label = rows[0][1]["label"].partition(",")[0]
        series.append(_band(label, [size for size, _ in rows], values, _color(method)))
    ticks = sorted({x for s in series for x in s.x})
    title = f"Recall@1 on {where} against batch size"
    return [line_chart(title, series, "batch size", percent=True, log_x=True, x_ticks=ticks)] if series else []


def _difference_charts(study: Results) -> list[Chart]:
    by_set: dict[str, list[Interval]] = {}
    for d in study["differences"]:
        name = f"{study['rows'][d['row']]['label']} over {study['rows'][d['to']]['label']}"
        by_set.setdefault(d["set"], []).append(Interval(name, d["difference"], d["low"], d["high"], d["outside"]))
    titles = {name: _average_name(name) if name in study["averages"] else name for name in by_set}
    return [
        interval_chart(f"Differences, {titles[name]}", rows[:MOST_INTERVALS], "points") for name, rows in by_set.items()
    ]


STUDY_TEMPLATE = "sections/comparison_study.html"
PAGE = Page(
    kind="comparison",
    files=tuple(FILES.values()),
    open=_open,
    sections=[
        Section("summary", "Summary", "sections/tiles.html", comparison_summary, heading=False),
        Section("methods", "Methods", STUDY_TEMPLATE, partial(comparison_study, "methods")),
        Section("ablations", "Ablations", STUDY_TEMPLATE, partial(comparison_study, "ablations")),
        Section("batch-sizes", "Batch sizes", STUDY_TEMPLATE, partial(comparison_study, "batch_sizes")),
        Section("repeat", "Settings in common", "sections/comparison_settings.html", common_settings, menu="Settings"),
    ],
)
