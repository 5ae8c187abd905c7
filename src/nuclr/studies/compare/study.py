"""From a request to finished cells: tune every row, then train the chosen settings with all seeds."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nuclr.runs.settings import Settings
from nuclr.studies.compare import jobs
from nuclr.studies.compare import measure as sets
from nuclr.studies.compare.plan import Cell, Knob, Row
from nuclr.studies.compare.pool import Pool
from nuclr.studies.compare.rows import Outcomes, Report, choose, final_cells, reports, tuned_on


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
        found = reports(self.halves, list(self.tests))
        return sorted({key for report in found for fold in report.folds for key in fold})


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
        return final_cells(row, self.chosen(row), list(self.request.seeds), self.request.base)

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

    def examine(self, workers: int) -> None:
        """Corrected retrieval and the share of false negatives, of the cells that figures are made from."""
        asked: dict[str, tuple[Cell, list[tuple[str, str]]]] = {}
        for row in self.shown():
            for report in (report for report in self.reports() if report.kind == "pairs"):
                for tuned, where in report.folds:
                    for cell in self.finals(row)[tuned]:
                        asked.setdefault(self.outcomes.path(cell).name, (cell, []))[1].append((tuned, where))
        self._pool = Pool(workers, self.out / "logs", self._examined)
        for cell, folds in asked.values():
            settings, path = cell.settings(self.request.base), self.outcomes.path(cell)
            job = jobs.examine(settings, path, list(self.request.tests), list(dict.fromkeys(folds)))
            if job is not None:
                self._pool.add(job)
        self._to_examine = len(self._pool.waiting)
        if self._to_examine:
            self._tell(f"corrected retrieval of {self._to_examine} runs")
        self._pool.run()

    def _examined(self, job: dict[str, Any], error: str | None) -> None:
        name = Path(job["cell"]).name
        if error is not None:
            self.failed[f"{name} (corrected)"] = error
        left = len(self._pool.waiting) + len(self._pool.running())
        self._tell(f"corrected {self._to_examine - left}/{self._to_examine} runs; {error or name}")

    def shown(self) -> list[Row]:
        """Rows with all their figures."""
        return [row for row in self.rows.values() if row.shown and self.complete(row)]

    def reports(self) -> list[Report]:
        """The sets that figures are made on."""
        return reports(self.request.halves, list(self.request.tests))

    def _ask(self, cell: Cell) -> None:
        path = self.outcomes.path(cell)
        if path.name in self._asked:
            return
        self._asked.add(path.name)
        self._cells += 1
        if not self.outcomes.is_done(cell):
            settings = cell.settings(self.request.base)
            self._pool.add(jobs.train(settings, path, list(self.request.tests), self.request.needed()))

    def _settle(self) -> None:
        """Ask for the final cells of all rows whose tuning has ended."""
        for row in self.rows.values():
            source = self.rows[row.parent] if row.parent is not None else row
            if row.name in self._settled or not all(self._ended(cell) for cell in source.grid):
                continue
            self._settled.add(row.name)
            if not row.shown:
                continue
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
        return self._cells + sum(
            len(self.request.seeds) - (row.parent is None)
            for row in self.rows.values()
            if row.shown and row.name not in self._settled
        )

    def _tell(self, text: str) -> None:
        sys.stderr.write(f"compare: {text}\n")
        sys.stderr.flush()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
