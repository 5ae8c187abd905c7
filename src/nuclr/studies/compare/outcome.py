"""From finished cells to figures: per seed, their mean and spread, and differences with intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nuclr.studies.compare import cells, corrected, false_negatives
from nuclr.studies.compare import measure as sets
from nuclr.studies.compare.arrays import read_groups
from nuclr.studies.compare.measure import KS
from nuclr.studies.compare.plan import Cell, Row
from nuclr.studies.compare.rows import Report
from nuclr.studies.compare.statistics import DIRECTIONS, Bootstrap, Fold, fold, interval, per_seed
from nuclr.studies.compare.study import Study

PLAIN, BANKS = "plain", corrected.BANKS


def folds_of(study: Study, row: Row, report: Report, k: int = 1, ranking: str = PLAIN) -> list[Fold]:
    """The outcome of a row on a set, ranked by plain scores or corrected with a bank."""
    finals = study.finals(row)

    def hits(cell: Cell, tuned: str, where: str) -> sets.Hits:
        if ranking == PLAIN:
            return study.outcomes.hits(cell)[where]
        return study.outcomes.corrected(cell)[corrected.name_of((tuned, where), ranking)]

    return [fold(where, [hits(cell, tuned, where) for cell in finals[tuned]], k) for tuned, where in report.folds]


def main_reports(study: Study) -> list[Report]:
    """The sets that methods are compared on."""
    return [report for report in study.reports() if report.main]


def groups(found: Sequence[Report]) -> dict[str, list[Report]]:
    """Means over several sets: of all (the paper's Mean), of those for retrieval, of those for classification."""
    kinds = {"mean": None, "retrieval": "pairs", "classification": "classes"}
    chosen = {name: [r for r in found if kind in (None, r.kind)] for name, kind in kinds.items()}
    return {name: r for name, r in chosen.items() if len(r) > 1 and (name == "mean" or len(r) < len(found))}


def figures(study: Study, row: Row) -> dict[str, Any]:
    """In percent, by set and metric: the figure of every seed, mean and standard deviation."""
    found: dict[str, Any] = {}
    for report in study.reports():
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


def corrections(study: Study, row: Row) -> dict[str, Any]:
    """Mean recall@1 of corrected ranking by set and bank, and its paired gain over the plain one, with interval."""
    bootstrap = Bootstrap(len(study.request.seeds))
    found: dict[str, Any] = {}
    for report in (report for report in study.reports() if report.kind == "pairs"):
        plain = folds_of(study, row, report)
        for bank in BANKS:
            try:
                folds = folds_of(study, row, report, ranking=bank)
            except KeyError:  # not made, as its job failed
                continue
            here = {"mean_R@1": spread(per_seed(folds)), "gain": bootstrap.difference(folds, plain)}
            for k in KS[1:]:
                here[f"mean_R@{k}"] = spread(per_seed(folds_of(study, row, report, k, bank)))
            found.setdefault(report.name, {})[bank] = here
    return found


def false_negative_share(study: Study, row: Row) -> dict[str, Any] | None:
    """In percent, of the negatives' weight on both sides; None where the truth is not known."""
    group = next(iter(study.finals(row).values()))
    found = [read_groups(study.outcomes.path(cell) / false_negatives.FILE).get("") for cell in group]
    if any(one is None for one in found):
        return None
    known = [one for one in found if one is not None]
    shares = np.array([one["weighted"].mean() for one in known])
    return {"weighted": spread(shares), "uniform": 100 * float(known[0]["uniform"])}


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
    compared = [(row.name, other) for row in rows for other in row.to if other in by_name]
    for a, b in compared:
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
