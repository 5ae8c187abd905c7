"""The test sets of a table's columns on disk: where they are, and whether they can be read."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from nuclr.errors import UserError
from nuclr.evaluation.retrieval import direction_names
from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL
from nuclr.remote import is_url
from nuclr.runs.settings import Data
from nuclr.studies.evaluate import tasks
from nuclr.studies.table.table_file import Column

PROMPTS_OPTION = "--prompts"  # of nuclr evaluate


def locate(column: Column, tests: Path) -> Column:
    """Return the column with its test set relative to the folder `tests`.

    A standard set without a folder, such as "mscoco", is in the folder of its name.

    Example:
        >>> locate(Column("COCO", "mscoco", "retrieval", "mean_R@1"), Path("data")).test
        'mscoco:data/mscoco'

    """
    name, _, below = column.test.partition(":")
    if name in RETRIEVAL or name in CLASSIFICATION:
        return dataclasses.replace(column, test=f"{name}:{tests / (below or name)}")
    if name == "builtin" or is_url(column.test):
        return column
    return dataclasses.replace(column, test=str(tests / column.test))


def problems(columns: Iterable[tuple[Column, Data]]) -> list[str]:
    """Open each test set once and return what is wrong, so that nobody trains for days and then cannot evaluate.

    Args:
        columns: Columns with the path of their test set, each with the data settings of a run to be evaluated on it.

    Returns:
        A line per test set that cannot be read.

    """
    lines: dict[Column, str | None] = {}
    for column, data in columns:
        if column not in lines:
            try:
                _open(column, data)
                lines[column] = None
            except UserError as error:
                lines[column] = f"column {column.title}: {error}"
    return [line for line in lines.values() if line is not None]


def _open(column: Column, data: Data) -> None:
    share, outside = data.max_bad_share, data.allow_outside
    if column.kind == "retrieval":
        pairs = tasks.open_retrieval(column.test, None, None, share, outside, data).pairs
        directions = (*direction_names((pairs.x_name, pairs.y_name)), "mean")
        direction, _, depth = column.metric.rpartition("_")
        if direction not in directions:
            allowed = ", ".join(f"{name}_{depth}" for name in directions)
            raise UserError(f"metric is {column.metric!r}, but {column.test} has {allowed}")
    else:
        tasks.open_classification(column.test, column.prompts, share, allow_outside=outside)
