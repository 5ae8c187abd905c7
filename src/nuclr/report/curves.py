"""The training curves of a run, over epochs, beside those of its baseline where there is one."""

import math
from typing import Any

from nuclr.report import numbers
from nuclr.report.charts import Chart, Series, line_chart
from nuclr.report.logs import RunLog, curve

DIRECTIONS = (("image_to_text", "image to text", 1), ("text_to_image", "text to image", 3))


def training_curves(run: RunLog) -> list[Chart]:
    """Those for which something was logged, all over the same epochs."""
    found = [_objective(run), _recall(run), _recall_at(run), _zero_shot(run), *_zeta(run), _temperature(run)]
    found += [_rates(run), _gamma(run), _gradient(run), _speed(run)]
    return [chart for chart in found if chart is not None]


def _objective(run: RunLog) -> Chart | None:
    series = [Series(r.method, *curve(r.metrics, "train/loss"), slot) for r, slot in _runs(run)]
    if not series[0].x:
        return None
    note = "Methods have different objectives: compare shapes, not heights." if len(series) > 1 else ""
    return _over_epochs(run, "Objective, estimated", series, note=note)


def _recall(run: RunLog) -> Chart | None:
    if run.baseline is None:
        series = [Series(name, *curve(run.metrics, f"val/{key}_R@1"), slot) for key, name, slot in DIRECTIONS]
    else:
        series = [Series(r.method, *curve(r.metrics, "val/mean_R@1"), slot) for r, slot in _runs(run)]
    chance = run.last().get("mean_chance@1")
    if not series[0].x:
        return None
    title = "Recall@1, mean of both directions" if run.baseline else "Recall@1 on held-out pairs"
    reference = None if chance is None else (chance, f"chance {numbers.percent(chance, 2)}")
    return _over_epochs(run, title, series, percent=True, zero=True, reference=reference)


def _recall_at(run: RunLog) -> Chart | None:
    series = [Series(f"@{k}", *curve(run.metrics, f"val/mean_R@{k}"), slot) for k, slot in ((10, 6), (5, 4), (1, 1))]
    if not series[0].x:
        return None
    return _over_epochs(run, f"Recall of {run.method}, mean of directions", series, percent=True, zero=True)


def _zero_shot(run: RunLog) -> Chart | None:
    series = [Series(r.method, *curve(r.metrics, "val/zero_shot_acc1"), slot) for r, slot in _runs(run)]
    if not series[0].x:
        return None
    chance = run.last().get("zero_shot_chance")
    reference = None if chance is None else (chance, f"chance {numbers.percent(chance)}")
    return _over_epochs(run, "Zero-shot accuracy", series, percent=True, zero=True, reference=reference)


def _zeta(run: RunLog) -> list[Chart]:
    found = []
    for side, name, slot in (("y", "captions", 1), ("x", "images", 3)):
        x, median = curve(run.metrics, f"state/zeta_{side}_q50")
        if not x:
            continue
        quantile = {q: curve(run.metrics, f"state/zeta_{side}_q{q:02d}")[1] for q in (5, 25, 75, 95)}
        series = [
            Series("5 to 95\u202f%", x, median, slot, band=(quantile[5], quantile[95])),
            Series("25 to 75\u202f%", x, median, slot, band=(quantile[25], quantile[75])),
        ]
        found.append(_over_epochs(run, f"Zeta of the {name}, quantiles", series))
    if not found:
        series = [
            Series(name, *curve(run.metrics, f"train/zeta_{side}"), slot)
            for side, name, slot in (("y", "captions", 1), ("x", "images", 3))
        ]
        if series[0].x:
            found.append(_over_epochs(run, "Zeta, mean over the batch", series, note="Quantiles were not logged."))
    return found


def _temperature(run: RunLog) -> Chart | None:
    x, scale = curve(run.metrics, "train/scale")
    if x:
        series = [Series("temperature", x, [1 / v for v in scale], 6)]
        return _over_epochs(run, "Temperature, learned", series)
    series = []
    for side, name, slot in (("x", "anchors: images", 1), ("y", "anchors: captions", 3)):
        x, median = curve(run.metrics, f"state/tau_{side}_q50")
        if x:
            band = tuple(curve(run.metrics, f"state/tau_{side}_q{q}")[1] for q in ("05", "95"))
            series.append(Series(name, x, median, slot, band=(band[0], band[1])))
    return _over_epochs(run, "Temperatures: median, 5 to 95\u202f%", series) if series else None


def _rates(run: RunLog) -> Chart | None:
    series = [
        Series("encoders", *curve(run.metrics, "train/lr"), 1),
        Series("zeta", *curve(run.metrics, "train/zeta_lr"), 2, dashed=True),
    ]
    series = [s for s in series if s.x and max(s.y) > 0]
    return _over_epochs(run, "Learning rates", series, zero=True) if series else None


def _gamma(run: RunLog) -> Chart | None:
    x, y = curve(run.metrics, "train/gamma")
    if not x or max(y) - min(y) < 1e-9:
        return None
    return _over_epochs(run, "Gamma, the weight of the new batch", [Series("gamma", x, y, 5)], zero=True)


def _gradient(run: RunLog) -> Chart | None:
    x, y = curve(run.metrics, "train/grad_norm")
    if not x:
        return None
    log = min(y) > 0 and max(y) / min(y) > 50
    return _over_epochs(run, "Norm of the gradient", [Series("norm", x, y, 8)], log_y=log, zero=not log)


def _speed(run: RunLog) -> Chart | None:
    steps = [float(line["step"]) for line in run.timing if "step" in line]
    rates = [float(line.get("samples_per_second", math.nan)) for line in run.timing if "step" in line]
    if len(steps) < 2:
        return None
    return line_chart("Samples a second", [Series("speed", steps, rates, 8)], "step", zero=True)


def _runs(run: RunLog) -> list[tuple[RunLog, int]]:
    return [(run, 1)] + ([(run.baseline, 2)] if run.baseline else [])


def _over_epochs(run: RunLog, title: str, series: list[Series], **options: Any) -> Chart:
    epochs = (0.0, float(run.config["schedule"]["epochs"]))
    return line_chart(title, series, "epoch", x_range=epochs, whole_x=True, **options)
