"""What a worker can be asked to do with a cell, as values that fit into a line of JSON."""

import dataclasses
from pathlib import Path
from typing import Any

from nuclr.runs import components as parts
from nuclr.runs.settings import Settings, to_dict
from nuclr.studies.compare import cells, corrected, false_negatives
from nuclr.studies.compare import measure as sets

Shared = parts.Loaders


def train(settings: Settings, cell: Path, tests: list[sets.TestSet], needed: list[str]) -> dict[str, Any]:
    """A job: train this cell and measure it on these sets."""
    return {**_described(settings, cell, tests), "needed": needed}


def examine(
    settings: Settings, cell: Path, tests: list[sets.TestSet], folds: list[corrected.Fold]
) -> dict[str, Any] | None:
    """A job: corrected retrieval of a finished cell, and its share of false negatives; None where all is there."""
    known = not false_negatives.applies(settings) or (cell / false_negatives.FILE).is_file()
    if known and corrected.is_done(cell, folds):
        return None
    return {**_described(settings, cell, tests), "folds": [list(fold) for fold in folds]}


def _described(settings: Settings, cell: Path, tests: list[sets.TestSet]) -> dict[str, Any]:
    described = [dataclasses.asdict(test) for test in tests]
    return {"settings": to_dict(settings), "cell": str(cell), "tests": described}


def run(job: dict[str, Any], shared: Shared) -> None:
    """Do it; `shared` is kept between the jobs of a worker, so that data is decoded once."""
    settings, cell = cells.settings_from(job["settings"]), Path(job["cell"])
    tests = [sets.TestSet(**test) for test in job["tests"]]
    if "needed" in job:
        cells.run_cell(settings, cell, tests, job["needed"], shared)
        return
    corrected.correct_cell(settings, cell, tests, [(tuned, where) for tuned, where in job["folds"]], shared)
    if false_negatives.applies(settings):
        false_negatives.measure_cell(settings, cell, shared)
