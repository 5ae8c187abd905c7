"""What a worker can be asked to do with a cell, as values that fit into a line of JSON."""

import dataclasses
from pathlib import Path
from typing import Any

from nuclr.experiments.compare import cells, sets
from nuclr.training import parts
from nuclr.training.settings import Settings, to_dict

Shared = parts.Loaders


def make(settings: Settings, cell: Path, tests: list[sets.TestSet], needed: list[str]) -> dict[str, Any]:
    """A job: train this cell and measure it on these sets."""
    described = [dataclasses.asdict(test) for test in tests]
    return {"settings": to_dict(settings), "cell": str(cell), "tests": described, "needed": needed}


def run(job: dict[str, Any], shared: Shared) -> None:
    """Do it; `shared` is kept between the jobs of a worker, so that data is decoded once."""
    tests = [sets.TestSet(**test) for test in job["tests"]]
    cells.run_cell(cells.settings_from(job["settings"]), Path(job["cell"]), tests, job["needed"], shared)
