"""From finished cells to metrics: values per seed with mean and spread, and differences with intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nuclr.evaluation.metric_names import set_prefixes
from nuclr.evaluation.retrieval import direction_names
from nuclr.runs.folder import read_results
from nuclr.studies.compare import cells
from nuclr.studies.compare.measure import KS, Hits
from nuclr.studies.compare.plan import Cell, Row
from nuclr.studies.compare.statistics import Bootstrap, Fold, fold, interval, per_seed
from nuclr.studies.compare.study import ReportedSet, Study

PLAIN = "plain"


def folds_of(study: Study, row: Row, reported: ReportedSet, k: int = 1, ranking: str = PLAIN) -> list[Fold]:
    """Return the outcome of a row on a set, ranked by plain scores or corrected with a bank."""
    finals = study.finals(row)

    def hits(cell: Cell, tuned: str, set_name: str) -> Hits:
        if ranking == PLAIN:
            return study.outcomes.hits(cell)[set_name]
        return study.outcomes.corrected(cell)[cells.corrected_name((tuned, set_name), ranking)]

    return [
        fold(set_name, [hits(cell, tuned, set_name) for cell in finals[tuned]], k) for tuned, set_name in reported.folds
    ]


def main_sets(study: Study) -> list[ReportedSet]:
    """Return the sets that methods are compared on."""
    return [reported for reported in study.request.reported_sets() if reported.main]


def averages(sets: Sequence[ReportedSet]) -> dict[str, list[ReportedSet]]:
    """Return the groups of sets that are averaged: all sets (the paper's Mean), retrieval sets, classification sets."""
    kinds = {"mean": None, "retrieval": "pairs", "classification": "classes"}
    members = {name: [one for one in sets if kind in (None, one.kind)] for name, kind in kinds.items()}
    return {
        f"average: {name}": group
        for name, group in members.items()
        if len(group) > 1 and (name == "mean" or len(group) < len(sets))
    }


def metrics(study: Study, row: Row) -> dict[str, Any]:
    """Return the metrics of a row in percent, by set and name: the value of every seed, mean, standard deviation."""
    by_set: dict[str, Any] = {}
    for reported in study.request.reported_sets():
        values: dict[str, Any] = {}
        for k in KS:
            folds = folds_of(study, row, reported, k)
            if reported.kind == "classes":
                values[f"acc@{k}"] = spread(per_seed(folds))
                continue
            directions = dict(zip(("x_to_y", "y_to_x"), direction_names(study.request.sides.names), strict=True))
            for direction, name in directions.items():
                values[f"{name}_R@{k}"] = spread(per_seed(folds, direction))
            values[f"mean_R@{k}"] = spread(per_seed(folds))
        by_set[reported.name] = values
    for name, members in averages(main_sets(study)).items():
        means = np.mean([per_seed(folds_of(study, row, reported)) for reported in members], axis=0)
        by_set[name] = {"first": spread(means)}
    return by_set


def chance(study: Study, rows: Sequence[Row]) -> float | None:
    """Return mean recall@10 of random scores on the held-out pairs in percent; None if it is not known."""
    for row in rows:
        for cell in next(iter(study.finals(row).values())):
            values = (read_results(study.outcomes.path(cell)) or {}).get("val", {})
            first = next(iter(set_prefixes(values)), "")
            if f"{first}mean_chance@10" in values:
                return 100 * float(values[f"{first}mean_chance@10"])
    return None


def spread(values: np.ndarray) -> dict[str, Any]:
    """Return fractions of each seed as percent: mean, sample standard deviation, and the values themselves."""
    percent = 100 * values
    std = float(percent.std(ddof=1)) if len(percent) > 1 else 0.0
    return {"mean": float(percent.mean()), "std": std, "per_seed": percent.tolist()}


def corrections(study: Study, row: Row) -> dict[str, Any]:
    """Return mean recall of corrected ranking by set and bank, and its paired gain over plain ranking."""
    bootstrap = Bootstrap(len(study.request.seeds))
    by_set: dict[str, Any] = {}
    for reported in (reported for reported in study.request.reported_sets() if reported.kind == "pairs"):
        plain = folds_of(study, row, reported)
        for bank in cells.BANKS:
            try:
                folds = folds_of(study, row, reported, ranking=bank)
            except KeyError:  # its job failed
                continue
            values = {"mean_R@1": spread(per_seed(folds)), "gain": bootstrap.difference(folds, plain)}
            for k in KS[1:]:
                values[f"mean_R@{k}"] = spread(per_seed(folds_of(study, row, reported, k, bank)))
            by_set.setdefault(reported.name, {})[bank] = values
    return by_set


def false_negative_share(study: Study, row: Row) -> dict[str, Any] | None:
    """Return the share of the negatives' weight on false negatives, in percent; None if the truth is not known."""
    group = next(iter(study.finals(row).values()))
    stored = [cells.read_groups(study.outcomes.path(cell) / cells.FALSE_NEGATIVES).get("") for cell in group]
    known = [arrays for arrays in stored if arrays is not None]
    if len(known) < len(stored):
        return None
    shares = np.array([arrays["weighted"].mean() for arrays in known])
    return {"weighted": spread(shares), "uniform": 100 * float(known[0]["uniform"])}


def differences(study: Study, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return paired differences in points of recall@1 (mean of both directions) or accuracy, with intervals."""
    bootstrap = Bootstrap(len(study.request.seeds))
    by_name = {row.name: row for row in rows}
    mains = main_sets(study)
    sets = {reported.name: [reported] for reported in mains} | averages(mains)
    values: dict[tuple[str, str], tuple[float, np.ndarray]] = {}
    for name, row in by_name.items():
        for title, members in sets.items():
            folds = [folds_of(study, row, reported) for reported in members]
            point = np.mean([per_seed(one).mean() for one in folds])
            values[name, title] = float(point), np.mean([bootstrap.metrics(one) for one in folds], axis=0)
    results = []
    for a, b in ((row.name, other) for row in rows for other in row.to if other in by_name):
        for title in sets:
            (point_a, drawn_a), (point_b, drawn_b) = values[a, title], values[b, title]
            difference = interval(100 * (point_a - point_b), 100 * (drawn_a - drawn_b))
            results.append({"row": a, "to": b, "set": title, **difference})
    return results


def curves(study: Study, row: Row) -> dict[str, Any]:
    """Return recall@1 on the held-out pairs during training, in percent, for all seeds of the first tuning set."""
    group = next(iter(study.finals(row).values()))
    per_cell = [cells.curve(study.outcomes.path(cell)) for cell in group]
    return {
        "epochs": [epoch for epoch, _ in per_cell[0]],
        "per_seed": [[100 * value for _, value in points] for points in per_cell],
    }


def tuning(study: Study, row: Row) -> dict[str, Any]:
    """Return the settings that were tried, with their scores, and the chosen ones."""
    keys = study.request.tuning_sets()
    tried = [
        {"changes": cell.changes, "score": {key: 100 * study.outcomes.score(cell, key) for key in keys}}
        for cell in row.grid
        if study.outcomes.is_done(cell)
    ]
    chosen = {key: {**cell.changes, **row.changes} for key, cell in study.chosen(row).items()}
    return {"chosen": chosen, "tried": tried}
