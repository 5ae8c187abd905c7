"""From finished cells to figures: per seed, their mean and spread, and differences with intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nuclr.experiments.compare import cells
from nuclr.experiments.compare.plan import Row
from nuclr.experiments.compare.rows import Report, reports
from nuclr.experiments.compare.sets import KS
from nuclr.experiments.compare.statistics import DIRECTIONS, Bootstrap, Fold, fold, interval, per_seed
from nuclr.experiments.compare.study import Study


def folds_of(study: Study, row: Row, report: Report, k: int = 1) -> list[Fold]:
    """The outcome of a row on a set."""
    finals = study.finals(row)
    return [fold(where, [study.outcomes.hits(cell)[where] for cell in finals[key]], k) for key, where in report.folds]


def main_reports(study: Study) -> list[Report]:
    """The sets that methods are compared on."""
    return [report for report in reports(study.request.halves, list(study.request.tests)) if report.main]


def groups(found: Sequence[Report]) -> dict[str, list[Report]]:
    """Means over several sets: of all, of those for retrieval, of those for classification; where there are several."""
    kinds = {"mean": None, "retrieval": "pairs", "classification": "classes"}
    chosen = {name: [r for r in found if kind in (None, r.kind)] for name, kind in kinds.items()}
    chosen = {name: members for name, members in chosen.items() if members}
    if len(found) < 2:
        return {}
    return {name: members for name, members in chosen.items() if name == "mean" or len(members) < len(found)}


def figures(study: Study, row: Row) -> dict[str, Any]:
    """In percent, by set and metric: the figure of every seed, mean and standard deviation."""
    found: dict[str, Any] = {}
    everywhere = reports(study.request.halves, list(study.request.tests))
    for report in everywhere:
        here: dict[str, Any] = {}
        for k in KS:
            folds = folds_of(study, row, report, k)
            if report.kind == "classes":
                here[f"acc@{k}"] = spread(per_seed(folds))
                continue
            for direction in ("i2t", "t2i"):
                here[f"{DIRECTIONS[direction]}_R@{k}"] = spread(per_seed(folds, direction))
            here[f"mean_R@{k}"] = spread(per_seed(folds))
        found[report.name] = here
    for name, members in groups(main_reports(study)).items():
        found[f"average: {name}"] = {
            "first": spread(np.mean([per_seed(folds_of(study, row, report)) for report in members], axis=0))
        }
    return found


def spread(values: np.ndarray) -> dict[str, Any]:
    """Fractions of each seed -> percent: mean, sample standard deviation, all."""
    percent = 100 * values
    std = float(percent.std(ddof=1)) if len(percent) > 1 else 0.0
    return {"mean": float(percent.mean()), "std": std, "per_seed": percent.tolist()}


def pairs_to_compare(study: Study, names: Sequence[str]) -> list[tuple[str, str]]:
    """Every row with its baseline, and NUCLR with SogCLR, the step that the paper is about."""
    baseline = study.request.baseline
    found = [(name, baseline) for name in names if name != baseline and baseline in names]
    step = ("nuclr", "sogclr")
    return [*found, step] if set(step) <= set(names) and step not in found else found


def differences(study: Study, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Paired differences in points of recall@1 (mean of both directions) or accuracy, with intervals."""
    bootstrap = Bootstrap(len(study.request.seeds))
    found = []
    by_name = {row.name: row for row in rows}
    mains = main_reports(study)
    asked = {report.name: [report] for report in mains}
    asked |= {f"average: {name}": members for name, members in groups(mains).items()}
    values: dict[tuple[str, str], tuple[float, np.ndarray]] = {}
    for name, row in by_name.items():
        for title, members in asked.items():
            folds = [folds_of(study, row, report) for report in members]
            point = np.mean([per_seed(one).mean() for one in folds])
            values[name, title] = float(point), np.mean([bootstrap.figures(one) for one in folds], axis=0)
    for a, b in pairs_to_compare(study, list(by_name)):
        for title in asked:
            (point_a, drawn_a), (point_b, drawn_b) = values[a, title], values[b, title]
            told = interval(100 * (point_a - point_b), 100 * (drawn_a - drawn_b))
            found.append({"row": a, "to": b, "set": title, **told})
    return found


def curves(study: Study, row: Row) -> dict[str, Any]:
    """Mean recall@1 on the held-out pairs after every evaluation, in percent, for the seeds of the first choice."""
    group = next(iter(study.finals(row).values()))
    found = [cells.curve(study.outcomes.path(cell)) for cell in group]
    return {
        "epochs": [epoch for epoch, _ in found[0]],
        "per_seed": [[100 * value for _, value in one] for one in found],
    }


def tuning(study: Study, row: Row) -> dict[str, Any]:
    """What was tried and chosen."""
    tried = [
        {"changes": cell.changes, "score": {key: 100 * study.outcomes.score(cell, key) for key in study.keys}}
        for cell in row.grid
        if study.outcomes.is_done(cell)
    ]
    chosen = {key: {**cell.changes, **row.changes} for key, cell in study.chosen(row).items()}
    return {"chosen": chosen, "tried": tried}
