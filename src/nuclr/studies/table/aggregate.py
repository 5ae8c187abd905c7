"""From results to the content of the table: values of every run, mean and standard deviation, best row, differences.

The value of a cell is the mean over runs (seeds), with the sample standard deviation. The column "Mean" averages the
columns within each run first, so its standard deviation is that of the runs' means.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import nuclr
from nuclr.errors import UserError
from nuclr.studies.compare.row_metrics import spread
from nuclr.studies.table import evaluations
from nuclr.studies.table.columns import locate
from nuclr.studies.table.evaluations import Evaluation
from nuclr.studies.table.plan import PlannedRun
from nuclr.studies.table.table_file import MEAN, Block, Column, Published, Row, Table

COMMAND = "nuclr table"
DIGITS = 2  # of the values that the table shows; rows that agree in all of them are equally good
PROTOCOL = (
    "Percent. Each value is the mean over the seeds, with the sample standard deviation.",
    "Retrieval: recall@1, mean of both directions, unless the column names another metric. Classification: zero-shot "
    "top-1 accuracy.",
    "Mean: the columns are averaged for each seed, then over the seeds.",
    "The best value of each column among the rows of a block is in bold.",
)
Found = tuple[Evaluation, dict[str, Any]]


def summarize(table: Table, runs: Sequence[PlannedRun], tests: Path, command: str) -> dict[str, Any]:
    """Return the content of table.json from the results that exist.

    Args:
        table: What the table file says.
        runs: The runs of the rows that are trained here.
        tests: Folder that test sets are relative to.
        command: The command line, for the record.

    Raises:
        UserError: Results are damaged, of another test set, or do not have a column.

    """
    blocks = [_block(table, block, [run for run in runs if run.block == block.title], tests) for block in table.blocks]
    published = any(row["published"] for block in blocks for row in block["rows"])
    return {
        "written_by": COMMAND,
        "version": nuclr.__version__,
        "title": table.title,
        "command": command,
        "unit": "percent",
        "seeds": list(table.seeds),
        "published_in": table.published_in if published else None,
        "protocol": list(PROTOCOL),
        "blocks": blocks,
    }


def _block(table: Table, block: Block, runs: Sequence[PlannedRun], tests: Path) -> dict[str, Any]:
    columns = [locate(column, tests) for column in block.columns]
    waiting = list(runs)
    rows, found = [], []
    for row in block.rows:
        if row.config is None:
            where = f"{block.title}, {row.label}" if block.title else str(row.label)
            groups = evaluations.gather(row.results, where)
            results = [_elsewhere(group, columns, where) for group in groups]
            names = [str(group[0].content["subject"].get("seed", group[0].subject)) for group in groups]
            own, label = [], str(row.label)
            objective = groups[0][0].content["subject"].get("objective")
        else:
            own, waiting = waiting[: len(table.seeds)], waiting[len(table.seeds) :]
            results = [[run.result(column) if run.trained else None for column in block.columns] for run in own]
            names = [str(run.seed) for run in own]
            label, objective = own[0].label, own[0].settings.objective.name
        found.append(results)
        rows.append(_row(row, label, objective, columns, results, names, table.mean, own))
    for k, column in enumerate(columns):
        of_column = [one[k] for results in found for one in results]
        evaluations.check_same_set(column, [result for result in of_column if result is not None])
    titles = [column.title for column in columns] + ([MEAN] if table.mean and len(columns) > 1 else [])
    for title in titles:
        _mark_best(rows, title)
    return {
        "title": block.title,
        "columns": titles,
        "tests": [{"title": c.title, "kind": c.kind, "test": c.test, "metric": c.metric} for c in columns],
        "rows": rows,
    }


def _elsewhere(group: Sequence[Evaluation], columns: Sequence[Column], where: str) -> list[Found | None]:
    results = [evaluations.find(group, column, elsewhere=True) for column in columns]
    for column, result in zip(columns, results, strict=True):
        if result is None:
            paths = ", ".join(str(one.path) for one in group)
            have = [name for one in group for name in one.entries(column.kind)]
            raise UserError(
                f"{where}: {paths} has no {column.kind} result on {column.test} (it has {', '.join(have) or 'none'}); "
                f"evaluate with --{column.kind} {column.test}"
            )
    return results


def _row(
    row: Row,
    label: str,
    objective: str | None,
    columns: Sequence[Column],
    results: Sequence[Sequence[Found | None]],
    names: Sequence[str],
    mean: bool,
    own: Sequence[PlannedRun],
) -> dict[str, Any]:
    fractions = np.full((len(results), len(columns)), np.nan)
    for i, run in enumerate(results):
        for j, (column, result) in enumerate(zip(columns, run, strict=True)):
            if result is not None:
                fractions[i, j] = evaluations.value(*result, column)
    cells = {column.title: _cell(fractions[:, j], names) for j, column in enumerate(columns)}
    if mean and len(columns) > 1:
        cells[MEAN] = _cell(fractions.mean(axis=1), names)
    return {
        "label": label,
        "objective": objective,
        "runs": {run.name: run.state() for run in own},
        "cells": cells,
        "best": [],
        "published": {
            title: {"mean": one.mean, "std": one.std, "text": value_text(one.mean, one.std)}
            for title, one in row.published.items()
        },
        "differences": _differences(cells, row.published),
    }


def _cell(fractions: np.ndarray, names: Sequence[str]) -> dict[str, Any] | None:
    """Return mean, standard deviation and values of the runs that have a value; None if no run has one."""
    present = ~np.isnan(fractions)
    if not present.any():
        return None
    values = spread(fractions[present])
    std = values["std"] if present.sum() > 1 else None
    some = f" ({present.sum()} of {len(names)})" if not present.all() else ""
    seeds = [name for name, one in zip(names, present, strict=True) if one]
    return values | {"seeds": seeds, "text": value_text(values["mean"], std) + some}


def value_text(mean: float, std: float | None) -> str:
    """Return a value as the table shows it; `std` is None for a single run.

    Example:
        >>> value_text(24.0, 0.5), value_text(24.0, None)
        ('24.00 ± 0.50', '24.00')

    """
    return f"{mean:.{DIGITS}f}" + (f" ± {std:.{DIGITS}f}" if std is not None else "")


def _differences(cells: Mapping[str, Any], published: Mapping[str, Published]) -> dict[str, float]:
    """Return ours minus the published value, where both exist."""
    return {title: cells[title]["mean"] - one.mean for title, one in published.items() if cells.get(title) is not None}


def _mark_best(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Add the title to `best` of the rows with the largest mean, unless all rows are equal or there is only one."""
    means = {k: round(row["cells"][title]["mean"], DIGITS) for k, row in enumerate(rows) if row["cells"][title]}
    if len(means) < 2 or max(means.values()) == min(means.values()):
        return
    for k, mean in means.items():
        if mean == max(means.values()):
            rows[k]["best"].append(title)


def missing_runs(content: Mapping[str, Any]) -> list[str]:
    """Return the names of the runs that are not done."""
    return [
        name
        for block in content["blocks"]
        for row in block["rows"]
        for name, state in row["runs"].items()
        if state != "done"
    ]
