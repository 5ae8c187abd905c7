"""From a request to finished cells: tune every row, then train the chosen settings with all seeds."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nuclr.experiments.compare import jobs, sets
from nuclr.experiments.compare.plan import Cell, Knob, Row
from nuclr.experiments.compare.pool import Pool
from nuclr.experiments.compare.rows import Outcomes, choose, final_cells, reports, tuned_on
from nuclr.training.settings import Settings


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    base: Settings
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    temperatures: tuple[float, ...]
    knobs: dict[str, Knob]
    tests: tuple[sets.TestSet, ...] = ()
    halves: bool = False
    baseline: str = "clip"
    kind: str = "methods"
    data: tuple[str, ...] = ()  # fingerprints of the pairs for training and tuning

    def needed(self) -> list[str]:
        """Sets that every cell is measured on."""
        keys = {key for report in reports(self.halves, list(self.tests)) for fold in report.folds for key in fold}
        return sorted(keys)


class Study:
    """Cells still to train, and what has been found so far."""

    def __init__(self, request: Request, out: Path) -> None:
        self.request, self.out = request, out
        self.outcomes = Outcomes(out / "cells", request.base, request.needed())
        self.rows = {row.name: row for row in request.rows}
        self.keys = tuned_on(request.halves)
        self.failed: dict[str, str] = {}
        self._asked: set[str] = set()
        self._settled: set[str] = set()
        self._cells = 0
        self._begin = time.monotonic()
        self._trained = 0

    def chosen(self, row: Row) -> dict[str, Cell]:
        """The setting of a row for each set that is tuned on; empty where nothing of its grid was finished."""
        if row.parent is not None:
            return self.chosen(self.rows[row.parent])
        return choose(row, self.outcomes, self.keys)

    def finals(self, row: Row) -> dict[str, list[Cell]]:
        """Its cells of all seeds, for each set that is tuned on."""
        return final_cells(row, self.chosen(row), list(self.request.seeds))

    def complete(self, row: Row) -> bool:
        """Whether all cells that its figures need are there."""
        finals = self.finals(row)
        return bool(finals) and all(self.outcomes.is_done(cell) for group in finals.values() for cell in group)

    def run(self, workers: int) -> None:
        """Train all that is missing."""
        pool = Pool(workers, self.out / "logs", self._done)
        self._pool = pool
        for row in self.rows.values():
            for cell in row.grid:
                self._ask(cell)
        self._settle()
        self._tell(f"{self._cells - len(pool.waiting)} of {self._planned()} runs are done already")
        pool.run()

    def _ask(self, cell: Cell) -> None:
        path = self.outcomes.path(cell)
        if path.name in self._asked:
            return
        self._asked.add(path.name)
        self._cells += 1
        if not self.outcomes.is_done(cell):
            settings = cell.settings(self.request.base)
            self._pool.add(jobs.make(settings, path, list(self.request.tests), self.request.needed()))

    def _settle(self) -> None:
        """Ask for the final cells of all rows whose tuning has ended."""
        for row in self.rows.values():
            source = self.rows[row.parent] if row.parent is not None else row
            if row.name in self._settled or not all(self._ended(cell) for cell in source.grid):
                continue
            self._settled.add(row.name)
            for group in self.finals(row).values():
                for cell in group:
                    self._ask(cell)

    def _ended(self, cell: Cell) -> bool:
        return self.outcomes.path(cell).name in self.failed or self.outcomes.is_done(cell)

    def _done(self, job: dict[str, Any], error: str | None) -> None:
        name = Path(job["cell"]).name
        self._trained += 1
        if error is not None:
            self.failed[name] = error
            self._tell(f"{name} failed: {error}")
        self._settle()
        left = self._planned() - self._cells + len(self._pool.waiting) + len(self._pool.running())
        done = self._planned() - left
        seconds = (time.monotonic() - self._begin) / self._trained * left
        running = ", ".join(Path(other["cell"]).name for other in self._pool.running())
        told = f"{done}/{self._planned()} runs, about {_duration(seconds)} left"
        self._tell(f"{told}; finished {name}{f'; running {running}' if running else ''}")

    def _planned(self) -> int:
        """Cells in all; of rows that are still being tuned only the least number of further ones is known."""
        return self._cells + (len(self.request.seeds) - 1) * (len(self.rows) - len(self._settled))

    def _tell(self, text: str) -> None:
        sys.stderr.write(f"compare: {text}\n")
        sys.stderr.flush()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
