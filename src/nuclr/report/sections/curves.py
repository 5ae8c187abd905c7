"""The section "curves" of a training page: what was logged, over epochs, next to the baseline if there is one."""

import itertools
import math
from dataclasses import dataclass
from typing import Any, cast

from nuclr.report import numbers
from nuclr.report.charts.lines import Chart, Color, Series, line_chart
from nuclr.report.render import LeaveOut, Table
from nuclr.report.sections.summary import directions
from nuclr.report.training_run import RunLog, TrainingRun, curve

SIDE_COLORS = (1, 3)
SET_COLORS = (1, 3, 6, 4, 5, 2, 7, 8)
ACCURACIES = (("zero_shot_acc1", "zero_shot_chance", "Zero-shot accuracy"),
              ("knn_acc1", "knn_chance", "Accuracy of the nearest neighbors"))  # fmt: skip
BASELINE_COLOR = 8  # of a baseline with the run's own objective


@dataclass(frozen=True)
class Curves:
    """Content of the section.

    `once` has what was logged only once, None if there is nothing. `temperature` is a sentence that states a fixed
    temperature, otherwise empty.
    """

    charts: list[Chart]
    once: Table | None
    temperature: str


def training_curves(context: TrainingRun) -> Curves:
    """Return a chart of everything that was logged, all over the same epochs; values logged once are a table."""
    log = context.log
    charts = [
        _loss(context),
        *_recalls(context),
        *_recalls_at(context),
        *(_accuracy(context, *names) for names in ACCURACIES),
        *_zeta(context),
        _temperature(context),
        _learning_rates(log),
        _gamma(log),
        _gradient(log),
        _speed(log),
    ]
    drawn = [chart for chart in charts if chart is not None]
    if not drawn:
        raise LeaveOut("Nothing was logged yet, so there are no curves.")
    varies = any("train/scale" in line or "state/tau_x_q50" in line for line in log.metrics)
    fixed = "" if varies else f"The temperature is fixed at {numbers.number(context.temperature())}."
    curves = [chart for chart in drawn if _points(chart) > 1]
    return Curves(curves, _table_of_single_values([chart for chart in drawn if _points(chart) == 1]), fixed)


def _points(chart: Chart) -> int:
    """Return the number of points of the longest curve of a line chart."""
    return max((len(series["x"]) for series in _series(chart)), default=0)


def _series(chart: Chart) -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], (chart.data or {})["series"])


def _table_of_single_values(charts: list[Chart]) -> Table | None:
    """Return the values of charts whose curves have one point each; of a band, both bounds."""
    rows = []
    for chart in charts:
        show = numbers.percent if chart.data and chart.data["percent"] else numbers.number
        for series in _series(chart):
            name = f"{chart.title}: {series['name']}" if len(_series(chart)) > 1 else chart.title
            values = [series[key][0] for key in (("low", "high") if "low" in series else ("y",))]
            rows.append([name, " to ".join(show(value) for value in values), numbers.number(series["x"][0])])
    return Table(["", "value", "epoch"], rows) if rows else None


def _colored(context: TrainingRun) -> list[tuple[RunLog, Color]]:
    """Return run and baseline with their colors."""
    colors: list[Color] = [log.color for log in context.logs]
    if len(colors) > 1 and colors[1] == colors[0]:
        colors[1] = BASELINE_COLOR
    return list(zip(context.logs, colors, strict=True))


def _of_all_runs(context: TrainingRun, key: str) -> list[Series]:
    return [Series(log.method, *curve(log.metrics, key), color) for log, color in _colored(context)]


def _loss(context: TrainingRun) -> Chart | None:
    series = _of_all_runs(context, "train/loss")
    if not series[0].x:
        return None
    note = "Methods have different objectives: compare the shapes, not the heights." if len(series) > 1 else ""
    return _over_epochs(context.log, "Objective, estimated", series, note=note)


def _recalls(context: TrainingRun) -> list[Chart]:
    """Return recall@1 on the held-out pairs; several sets together, for the mean and for each direction."""
    log, named, sets = context.log, directions(context), context.log.sets()
    if not named or not sets:
        return []
    if len(sets) > 1 and context.baseline is None:
        keys = dict.fromkeys(key.rpartition("/")[2] for key, _ in named)
        titles = {"mean": "mean of both directions"} | {key: key.replace("_to_", " to ") for key in keys}
        return [
            _over_epochs(log, f"Recall@1, {title}", _of_sets(log, f"{key}_R@1"), percent=True, zero=True)
            for key, title in titles.items()
        ]
    chance = log.last_evaluation().get(f"{sets[0]}mean_chance@1")
    reference = None if chance is None else (chance, f"chance {numbers.percent(chance, 2)}")
    if context.baseline is None:
        title = "Recall@1 on held-out pairs"
        series = [
            Series(name, *curve(log.metrics, f"val/{key}_R@1"), color)
            for (key, name), color in zip(named, SIDE_COLORS, strict=False)
        ]
    else:
        title, series = "Recall@1, mean of both directions", _of_all_runs(context, f"val/{sets[0]}mean_R@1")
    return [_over_epochs(log, title, series, percent=True, zero=True, reference=reference)]


def _of_sets(log: RunLog, metric: str) -> list[Series]:
    """Return the curve of a metric on each set of held-out pairs."""
    colors = itertools.cycle(SET_COLORS)
    return [
        Series(prefix.rstrip("/"), *curve(log.metrics, f"val/{prefix}{metric}"), color)
        for prefix, color in zip(log.sets(), colors, strict=False)
    ]


def _recalls_at(context: TrainingRun) -> list[Chart]:
    log, charts = context.log, []
    for prefix in [] if context.views else log.sets():
        series = [
            Series(f"@{k}", *curve(log.metrics, f"val/{prefix}mean_R@{k}"), color)
            for k, color in ((10, 6), (5, 4), (1, 1))
        ]
        name = f" on {prefix.rstrip('/')}" if prefix else ""
        title = f"Recall of {log.method}{name}, mean of directions"
        charts.append(_over_epochs(log, title, series, percent=True, zero=True))
    return charts


def _accuracy(context: TrainingRun, key: str, chance_key: str, title: str) -> Chart | None:
    series = _of_all_runs(context, f"val/{key}")
    if not series[0].x:
        return None
    chance = context.log.last_evaluation().get(chance_key)
    reference = None if chance is None else (chance, f"chance {numbers.percent(chance)}")
    return _over_epochs(context.log, title, series, percent=True, zero=True, reference=reference)


def _sides(context: TrainingRun) -> list[tuple[str, str, int]]:
    """Return letter, name and color of both sides."""
    x, y = (words.many for words in context.words)
    if context.views:
        x, y = f"{x}, view 1", f"{y}, view 2"
    return [("y", y, SIDE_COLORS[0]), ("x", x, SIDE_COLORS[1])]


def _zeta(context: TrainingRun) -> list[Chart]:
    log, sides = context.log, _sides(context)
    charts = []
    for side, name, color in sides:
        x, median = curve(log.metrics, f"state/zeta_{side}_q50")
        if not x:
            continue
        quantile = {q: curve(log.metrics, f"state/zeta_{side}_q{q:02d}")[1] for q in (5, 25, 75, 95)}
        series = [
            Series("5 to 95\u202f%", x, median, color, band=(quantile[5], quantile[95]), shade=0.2),
            Series("25 to 75\u202f%", x, median, color, band=(quantile[25], quantile[75]), shade=0.5),
            Series("median", x, median, color),
        ]
        charts.append(_over_epochs(log, f"Zeta of the {name}, quantiles", series))
    if not charts:
        series = [Series(name, *curve(log.metrics, f"train/zeta_{side}"), color) for side, name, color in sides]
        if series[0].x:
            charts.append(_over_epochs(log, "Zeta, mean over the batch", series, note="Quantiles were not logged."))
    return charts


def _temperature(context: TrainingRun) -> Chart | None:
    log = context.log
    x, scale = curve(log.metrics, "train/scale")
    if x:
        return _over_epochs(log, "Temperature, learned", [Series("temperature", x, [1 / v for v in scale], 6)])
    series = []
    for (side, name, _), color in zip(reversed(_sides(context)), SIDE_COLORS, strict=True):
        x, median = curve(log.metrics, f"state/tau_{side}_q50")
        if x:
            low, high = (curve(log.metrics, f"state/tau_{side}_q{q}")[1] for q in ("05", "95"))
            series.append(Series(f"anchors: {name}", x, median, color, band=(low, high)))
    return _over_epochs(log, "Temperatures: median, 5 to 95\u202f%", series) if series else None


def _learning_rates(log: RunLog) -> Chart | None:
    series = [
        Series("encoders", *curve(log.metrics, "train/lr"), 1),
        Series("zeta", *curve(log.metrics, "train/zeta_lr"), 2, dashed=True),
    ]
    series = [s for s in series if s.x and max(s.y) > 0]
    return _over_epochs(log, "Learning rates", series, zero=True) if series else None


def _gamma(log: RunLog) -> Chart | None:
    x, y = curve(log.metrics, "train/gamma")
    if not x or max(y) - min(y) < 1e-9:
        return None
    return _over_epochs(log, "Gamma, the weight of the new batch", [Series("gamma", x, y, 5)], zero=True)


def _gradient(log: RunLog) -> Chart | None:
    x, y = curve(log.metrics, "train/grad_norm")
    if not x:
        return None
    logarithmic = min(y) > 0 and max(y) / min(y) > 50
    series = [Series("norm", x, y, 8)]
    return _over_epochs(log, "Norm of the gradient", series, log_y=logarithmic, zero=not logarithmic)


def _speed(log: RunLog) -> Chart | None:
    lines = [line for line in log.timing if "step" in line]
    if len(lines) < 2:
        return None
    steps = [float(line["step"]) for line in lines]
    rates = [float(line.get("samples_per_second", math.nan)) for line in lines]
    return line_chart("Samples per second", [Series("speed", steps, rates, 8)], "step", zero=True)


def _over_epochs(log: RunLog, title: str, series: list[Series], **options: Any) -> Chart:
    epochs = (0.0, float(log.settings.schedule.epochs))
    return line_chart(title, series, "epoch", x_range=epochs, whole_x=True, **options)
