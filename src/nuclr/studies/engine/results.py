"""The results of a study, from the outcomes of finished runs: values of every seed, differences, corrections, curves.

`Comparison` is what `nuclr compare` and `nuclr table` return, write as JSON and show on their page.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nuclr.evaluation.intervals import Bootstrap, Fold, Interval, fold, per_seed
from nuclr.evaluation.metrics import SCORE, find_metric, metrics_of, scores, val_metrics
from nuclr.evaluation.retrieval import direction_names
from nuclr.runs import folder as run_folder
from nuclr.studies.engine.measure import BANKS, METRICS, MeasuredSet
from nuclr.studies.engine.plan import Row, Study

DIGITS = 2  # of the values that tables show; rows that agree in all of them are equally good
FIRST = "first"  # in place of a metric: recall@1 (mean of both directions), or accuracy
COMPARED = (SCORE, "zero_shot_acc1", "knn_acc1")  # metrics that differences between rows are about


# -- records -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """A value over the runs of a row, or a published one; fractions in percent.

    Attributes:
        mean: Mean over the runs.
        std: Sample standard deviation; None for a single run.
        per_seed: The value of every run.
        planned: Number of runs that the row has in the end.

    """

    mean: float
    std: float | None = None
    per_seed: tuple[float, ...] = ()
    planned: int = 0

    @property
    def text(self) -> str:
        """The value as tables show it."""
        std = f" ± {self.std:.{DIGITS}f}" if self.std is not None else ""
        some = f" ({len(self.per_seed)} of {self.planned})" if len(self.per_seed) < self.planned else ""
        return f"{self.mean:.{DIGITS}f}{std}{some}"


def make_value(fractions: Sequence[float] | np.ndarray, scale: float = 100.0) -> Value | None:
    """Return mean and standard deviation of the values that are not NaN, fractions in percent; None if all are.

    Example:
        >>> make_value([0.10, 0.12, 0.17]).text, make_value([0.2, float("nan")]).text
        ('13.00 ± 3.61', '20.00 (1 of 2)')

    """
    percent = scale * np.asarray(fractions, dtype=np.float64)
    known = percent[~np.isnan(percent)]
    if not len(known):
        return None
    std = float(known.std(ddof=1)) if len(known) > 1 else None
    return Value(
        float(known.mean()),
        std,
        tuple(known.tolist()),
        len(percent),
    )


@dataclass(frozen=True)
class Column:
    """A metric on a set.

    Attributes:
        key: Unique name in its block.
        title: Name in tables.
        set: Name of the set.
        metric: Name of the metric.
        compared: True if differences between rows are about it.
        of: Keys of columns before it, whose mean it is, in place of a metric.

    """

    key: str
    title: str
    set: str
    metric: str
    compared: bool = False
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """A paired difference between two rows on a set, in percentage points with its interval."""

    row: str
    to: str
    set: str
    points: Interval

    @property
    def verdict(self) -> str:
        """Better or worse if zero is outside of the interval."""
        if not self.points.significant:
            return "no significant difference"
        return "better" if self.points.difference > 0 else "worse"


@dataclass(frozen=True)
class Corrected:
    """Popularity-corrected retrieval of a row on a set: mean recall@1 with a bank, and the gain over plain ranking."""

    set: str
    bank: str
    value: Value | None
    gain: Interval


@dataclass(frozen=True)
class ResultRow:
    """The results of a row.

    Attributes:
        name: Unique name in its block.
        label: Name in tables.
        method: Name of the objective; empty if it is not known.
        values: By the key of the column; None without results.
        runs: State of every run ("done", ...) by name.
        published: Published values by the key of the column.
        corrected: Popularity-corrected retrieval.
        chosen: Settings that tuning chose, by the set that they were tuned on.
        epochs: Epochs at which the run was evaluated.
        curves: The score at these epochs in percent, for every finished run, by the name of the set of held-out pairs;
            a single set has the name "".

    """

    name: str
    label: str
    method: str
    values: dict[str, Value | None]
    runs: dict[str, str] = field(default_factory=dict)
    published: dict[str, Value] = field(default_factory=dict)
    corrected: tuple[Corrected, ...] = ()
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    epochs: tuple[float, ...] = ()
    curves: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """Rows that are compared with one another on the same columns."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[ResultRow, ...]


@dataclass(frozen=True)
class Comparison:
    """The results of a study.

    Attributes:
        kind: Name of its files: "compare", "ablations", "batch_sizes" or "table".
        title: Heading.
        command: The command line.
        seeds: Seeds of the runs.
        blocks: The tables.
        protocol: Sentences that say how the values were obtained.
        versions: Version by package.
        settings: Settings that all runs share.
        differences: Paired differences between rows.
        notes: What limits the comparison.
        published_in: Source of the published values.
        failed: What went wrong, by run.

    """

    kind: str
    title: str
    command: str
    seeds: tuple[int, ...]
    blocks: tuple[Block, ...]
    protocol: tuple[str, ...]
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()
    published_in: str = ""
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[ResultRow, ...]:
        """The rows of all blocks."""
        return tuple(row for block in self.blocks for row in block.rows)

    @property
    def missing(self) -> list[str]:
        """Names of the runs that are not done."""
        return [name for row in self.rows for name, state in row.runs.items() if state != "done"]

    def row(self, name: str) -> ResultRow:
        """Return a row by its name."""
        return next(row for row in self.rows if row.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the JSON file: all fields by name."""
        return dataclasses.asdict(self)


def make_comparison(
    study: Study,
    title: str,
    blocks: Sequence[Block],
    **more: Any,
) -> Comparison:
    """Return the results of a study with the command line, versions and failed runs; `more` has further fields."""
    about = run_folder.environment()
    return Comparison(
        kind=study.plan.name,
        title=title,
        command=about["command"],
        seeds=study.plan.seeds,
        blocks=tuple(blocks),
        versions=about["versions"],
        failed=more.pop("failed", {}) | study.failed,
        **more,
    )


# -- columns and rows --------------------------------------------------------------------------------------------------


def registry_columns(sets: Sequence[MeasuredSet]) -> tuple[Column, ...]:
    """Return all metrics of the registry on every set."""
    columns = []
    for measured in sets:
        titles: dict[str, str] = {}
        for metric in metrics_of(measured.kind):
            if metric.median:
                continue  # a median has no value per query
            if measured.kind != "retrieval":
                titles[metric.key] = metric.label
                continue
            # Both directions of the first metric, recall@1, and the mean of both for all that have one.
            if measured.main and not (titles and metric.both):
                for name in direction_names(measured.sides):
                    titles[f"{name}_{metric.key}"] = f"{name.replace('_to_', '→')} {metric.label}"
            if metric.both:
                titles[f"mean_{metric.key}"] = f"mean {metric.label}"
        for name, title in titles.items():
            key = f"{measured.name}/{name}"
            compared = measured.main and name in COMPARED
            columns.append(Column(key, f"{measured.name} {title}", measured.name, name, compared))
    return tuple(columns)


def result_row(
    study: Study,
    row: Row,
    columns: Sequence[Column],
    published: Mapping[str, Value] | None = None,
) -> ResultRow:
    """Return the results of the runs that are finished; with details, all runs of the row must be."""
    sets = {measured.name: measured for measured in row.sets}
    values: dict[str, Value | None] = {}
    by_seed: dict[str, np.ndarray] = {}
    for column in columns:
        metric = find_metric(column.metric)
        if column.of:
            by_seed[column.key] = np.mean([by_seed[key] for key in column.of], axis=0)
        else:
            by_seed[column.key] = metric_values(
                study,
                row,
                sets.get(column.set),
                column.metric,
            )
        is_number = metric is not None and metric[0].format != "percent"
        values[column.key] = make_value(by_seed[column.key], 1.0 if is_number else 100.0)
    runs = [run for runs in study.finals(row).values() for run in runs]
    curves = _curves(study, row)
    result = ResultRow(
        name=row.name,
        label=row.label,
        method=row.method,
        values=values,
        runs={run.name: study.state(row, run) for run in runs},
        published=dict(published or {}),
        epochs=next((tuple(points) for runs in curves.values() for points in runs), ()),
        curves={name: tuple(tuple(points.values()) for points in runs) for name, runs in curves.items()},
    )
    return _add_details(study, row, result) if study.plan.detailed else result


def metric_values(
    study: Study,
    row: Row,
    measured: MeasuredSet | None,
    name: str,
) -> np.ndarray:
    """Return a metric of every seed, (seeds,), NaN where it was not measured.

    Args:
        study: The runs.
        row: The row.
        measured: The set; values are averaged over its folds. None: it was not measured.
        name: Such as "mean_R@1", "image_to_text_R@5", "zero_shot_acc1" or "first".

    """
    values = np.full(len(study.plan.seeds), np.nan)
    if measured is None:
        return values
    metric, direction = find_metric(name) or (metrics_of(measured.kind)[0], "")
    directions = dict(zip(direction_names(measured.sides), ("x_to_y", "y_to_x"), strict=True))
    for seed in range(len(values)):
        with contextlib.suppress(KeyError, ValueError):  # the run is missing, or the metric was registered later
            folds = folds_of(
                study,
                row,
                measured,
                metric=metric.key,
                seeds=slice(seed, seed + 1),
            )
            values[seed] = per_seed(folds, directions.get(direction))[0]
    return values


def folds_of(
    study: Study,
    row: Row,
    measured: MeasuredSet,
    bank: str | None = None,
    metric: str | None = None,
    seeds: slice = slice(None),
) -> list[Fold]:
    """Return the outcome of a row on a set, ranked by plain scores or corrected with a bank.

    Args:
        study: The runs.
        row: The row.
        measured: The set.
        bank: The bank of corrected scores.
        metric: Key of the metric; None: the first one.
        seeds: Positions of the seeds.

    Raises:
        KeyError: A run or a corrected ranking is missing.
        ValueError: The metric was not measured.

    """
    finals = study.finals(row)
    folds = []
    for tuned, key in study.plan.folds(measured):
        group = key if bank is None else f"{bank}|{tuned}|{key}"
        hits = [study.outcomes(run)[group] for run in finals[tuned][seeds]]
        folds.append(fold(key, hits, 0 if metric is None else hits[0][METRICS].tolist().index(metric)))
    return folds


def _curves(study: Study, row: Row) -> dict[str, list[dict[float, float]]]:
    """Return the score in percent by epoch for every finished run of the first choice, by the set of held-out pairs."""
    curves: dict[str, list[dict[float, float]]] = {}
    for run in next(iter(study.finals(row).values()), []):
        if not run_folder.is_finished(study.path(run)):
            continue
        by_set: dict[str, dict[float, float]] = {}
        for line in run_folder.read_lines(study.path(run) / run_folder.METRICS, {"epoch"}, []):
            for name, value in scores(val_metrics(line)).items():
                by_set.setdefault(name, {})[line["epoch"]] = 100 * value
        for name, points in by_set.items():
            curves.setdefault(name, []).append(points)
    return curves


def _add_details(
    study: Study,
    row: Row,
    result: ResultRow,
) -> ResultRow:
    """Add corrected retrieval with its paired gain over plain ranking, and what tuning chose."""
    bootstrap = Bootstrap(len(study.plan.seeds))
    corrected = []
    for measured in row.sets:
        for bank in BANKS if measured.kind == "retrieval" else ():
            try:
                folds = folds_of(study, row, measured, bank)
            except KeyError:
                continue
            gain = _in_points(bootstrap.difference(folds, folds_of(study, row, measured)))
            corrected.append(Corrected(measured.name, bank, make_value(per_seed(folds)), gain))
    return dataclasses.replace(
        result,
        corrected=tuple(corrected),
        chosen={key: {**changes, **row.changes} for key, changes in study.chosen(row).items()},
    )


def differences_of(study: Study, rows: Sequence[Row]) -> list[Difference]:
    """Return paired differences in points of recall@1 (mean of both directions) or accuracy, with intervals."""
    bootstrap = Bootstrap(len(study.plan.seeds))
    known = {row.name: row for row in rows}
    differences = []
    for row in rows:
        for other in (known[name] for name in row.to if name in known):
            for measured in (measured for measured in row.sets if measured.main):
                interval = bootstrap.difference(folds_of(study, row, measured), folds_of(study, other, measured))
                differences.append(Difference(row.name, other.name, measured.name, _in_points(interval)))
    return differences


def _in_points(interval: Interval) -> Interval:
    return Interval(100 * interval.difference, 100 * interval.low, 100 * interval.high)
