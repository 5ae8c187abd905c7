"""Run a comparison: tune every row, train the chosen settings with all seeds, and find the stored outcomes.

A row is tuned over its own grid, or takes over the setting that its parent row was tuned to and changes something in
it. `Request` is what the user asked for, `Outcomes` reads finished cells, and `Study` decides which cells to train.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nuclr.runs.settings import Settings, to_dict
from nuclr.runs.side_words import SideWords, name_sides
from nuclr.studies.compare import cells
from nuclr.studies.compare.measure import HALVES, VAL, Hits, TestSet
from nuclr.studies.compare.plan import Cell, Hyperparameter, Row, change
from nuclr.studies.compare.pool import Job, Pool
from nuclr.studies.compare.statistics import DIRECTIONS

IMAGES, CAPTIONS = name_sides("image", "image", "text", "text")

# ---------------------------------------------------------------------------------------------------------------------
# The request, and the sets that it reports on


@dataclass(frozen=True)
class ReportedSet:
    """A set of the table.

    Attributes:
        name: Key in compare.json.
        label: Name for readers.
        folds: Pairs (set that settings were tuned on, set that is measured); metrics are averaged over them.
        kind: "pairs" (retrieval) or "classes" (classification).
        main: True if methods are compared on it; metrics on pairs that tuning has seen are only for reference.

    """

    name: str
    label: str
    folds: tuple[tuple[str, str], ...]
    kind: str = "pairs"
    main: bool = True


@dataclass(frozen=True)
class ComparedSides:
    """The words for both sides, and whether pairs have groups, whose x and y all belong together."""

    x: SideWords = IMAGES
    y: SideWords = CAPTIONS
    grouped: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """The names of the sides, as in the names of metrics."""
        return self.x.name, self.y.name

    @property
    def clusters(self) -> str:
        """What is cut in halves and drawn by the bootstrap: "images", or groups of both sides' items."""
        return f"groups of {self.x.many} and {self.y.many}" if self.grouped else self.x.many

    @property
    def partners(self) -> str:
        """What stays together in a cluster, in words."""
        if self.grouped:
            return f"all {self.x.many} and {self.y.many} of a group stay together"
        return f"{self.y.many} stay with their {self.x.one}"


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        base: Settings that all cells share.
        rows: Rows of the table.
        seeds: Seeds of the final runs; tuning uses the first.
        temperatures: Temperatures that each method is tuned over.
        tuned: The other hyperparameter that each method is tuned over.
        tests: Test sets.
        halves: True to tune on one half of the held-out pairs and report on the other, and the reverse.
        baseline: Method that the others are compared with.
        kind: "methods", "ablations" or "batch_sizes".
        data: Fingerprints of the training pairs and of the held-out pairs.
        sides: What tables and pages call the sides.

    """

    base: Settings
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    temperatures: Mapping[str, tuple[float, ...]]
    tuned: dict[str, Hyperparameter]
    tests: tuple[TestSet, ...] = ()
    halves: bool = False
    baseline: str = "clip"
    kind: str = "methods"
    data: tuple[str, ...] = ()
    sides: ComparedSides = ComparedSides()

    def tuning_sets(self) -> tuple[str, ...]:
        """Return the sets that settings are chosen on, one choice per set."""
        return HALVES if self.halves else (VAL,)

    def reported_sets(self) -> list[ReportedSet]:
        """Return the sets of the table."""
        a, b = HALVES
        kind = "classes" if self.base.data.contrasts_views else "pairs"
        held_out = "labeled images" if self.base.data.contrasts_views else "held-out pairs"
        reported = []
        if self.halves:
            label = f"{held_out}, the half that tuning did not see"
            reported.append(ReportedSet("halves", label, ((a, b), (b, a)), kind))
        label = f"all {held_out}, half of them seen by tuning" if self.halves else f"{held_out}, also tuned on"
        whole = tuple((key, VAL) for key in self.tuning_sets())
        reported.append(ReportedSet("val", label, whole, kind, main=not self.halves and not self.tests))
        for test in self.tests:
            folds = tuple((key, test.key) for key in self.tuning_sets())
            reported.append(ReportedSet(test.name, test.name, folds, "pairs" if test.kind == "pairs" else "classes"))
        return reported

    def needed(self) -> list[str]:
        """Return the names of the sets that every cell is measured on."""
        return sorted({key for reported in self.reported_sets() for fold in reported.folds for key in fold})

    def describe(self, listed: bool = False) -> str:
        """Return how many runs will be trained and, with `listed`, the grid of every row."""
        tuned = [row for row in self.rows if row.grid]
        grid = sum(len(row.grid) for row in tuned)
        finals = sum(len(self.seeds) - (row.parent is None) for row in self.rows if row.shown)
        again = f" (up to {grid + 2 * finals} if both halves choose different settings)" if self.halves else ""
        lines = [
            f"{grid + finals} runs in total{again}: {grid} to tune {len(tuned)} methods with seed {self.seeds[0]}, "
            f"then {finals} to train the chosen settings with {len(self.seeds)} seeds"
        ]
        if listed:
            for row in self.rows:
                tried = [
                    ", ".join(f"{key.removeprefix('objective.')} {value}" for key, value in cell.changes.items())
                    for cell in row.grid
                ]
                lines += [f"{row.label}: {'; '.join(tried) or f'as tuned for {row.parent}'}"]
        return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Finished cells


class Outcomes:
    """Cells on disk below `folder`; each file is read once."""

    def __init__(self, folder: Path, base: Settings, needed: list[str]) -> None:
        self.folder, self.base, self.needed = folder, base, needed
        self._hits: dict[str, dict[str, Hits]] = {}
        self._corrected: dict[str, dict[str, Hits]] = {}
        self._done: set[str] = set()
        self._paths: dict[tuple[object, ...], Path] = {}

    def path(self, cell: Cell) -> Path:
        """Return the folder of a cell."""
        key = (cell.method, cell.seed, *cell.changes.items())
        if key not in self._paths:
            self._paths[key] = self.folder / cell.settings(self.base).name
        return self._paths[key]

    def is_done(self, cell: Cell) -> bool:
        """Return True if the cell was trained and measured."""
        path = self.path(cell)
        if path.name not in self._done and cells.is_done(path, self.needed):
            self._done.add(path.name)
        return path.name in self._done

    def hits(self, cell: Cell) -> dict[str, Hits]:
        """Return the outcome of every query, by set."""
        path = self.path(cell)
        if path.name not in self._hits:
            self._hits[path.name] = cells.read_groups(path / cells.HITS)
        return self._hits[path.name]

    def corrected(self, cell: Cell) -> dict[str, Hits]:
        """Return the outcome of corrected ranking; an empty dict if it was not computed."""
        path = self.path(cell)
        if path.name not in self._corrected:
            self._corrected[path.name] = cells.read_groups(path / cells.CORRECTED)
        return self._corrected[path.name]

    def score(self, cell: Cell, key: str) -> float:
        """Return recall@1 on a set, the mean of both directions, or accuracy; tuning maximizes it."""
        hits = self.hits(cell)[key]
        return float(np.mean([hits[direction][:, 0].mean() for direction in DIRECTIONS if direction in hits]))


# ---------------------------------------------------------------------------------------------------------------------
# The study


class Study:
    """The cells of a request: those to train, and those that are finished."""

    def __init__(self, request: Request, out: Path) -> None:
        self.request, self.out = request, out
        self.outcomes = Outcomes(out / "cells", request.base, request.needed())
        self.rows = {row.name: row for row in request.rows}
        self.failed: dict[str, str] = {}
        self._requested: set[str] = set()
        self._settled: set[str] = set()
        self._begin = time.monotonic()
        self._trained = 0
        self._to_examine = 0

    def chosen(self, row: Row) -> dict[str, Cell]:
        """Return the cell that tuning chose, for each tuning set; the first one among equals.

        The dict is empty if no cell of the grid is finished.
        """
        if row.parent is not None:
            return self.chosen(self.rows[row.parent])
        done = [cell for cell in row.grid if self.outcomes.is_done(cell)]
        if not done:
            return {}
        return {key: max(done, key=lambda cell: self.outcomes.score(cell, key)) for key in self.request.tuning_sets()}

    def finals(self, row: Row) -> dict[str, list[Cell]]:
        """Return the cells of all seeds with the chosen setting, for each tuning set.

        A change to a value that the base settings already have is left out, so both are the same cell.
        """
        base = self.request.base
        changes = {key: value for key, value in row.changes.items() if change(base, key, value) != base}
        return {
            key: [Cell(row.name, row.method, {**cell.changes, **changes}, seed) for seed in self.request.seeds]
            for key, cell in self.chosen(row).items()
        }

    def complete(self, row: Row) -> bool:
        """Return True if all cells that the row's metrics need are finished."""
        finals = self.finals(row)
        return bool(finals) and all(self.outcomes.is_done(cell) for group in finals.values() for cell in group)

    def shown(self) -> list[Row]:
        """Return the rows of the table that are complete."""
        return [row for row in self.rows.values() if row.shown and self.complete(row)]

    def run(self, workers: int) -> None:
        """Train all missing cells."""
        self._pool: Pool[Job] = Pool(workers, self.out / "logs", self._on_trained)
        for row in self.rows.values():
            for cell in row.grid:
                self._request(cell)
        self._settle()
        done = len(self._requested) - len(self._pool.waiting)
        _log(f"{self.request.describe()}; {done} are already done")
        self._pool.run()

    def examine(self, workers: int) -> None:
        """Compute corrected retrieval and the share of false negatives for the final cells."""
        requested: dict[str, tuple[Cell, list[tuple[str, str]]]] = {}
        retrieval = [reported for reported in self.request.reported_sets() if reported.kind == "pairs"]
        for row in self.shown():
            finals = self.finals(row)
            for tuned, set_name in (fold for reported in retrieval for fold in reported.folds):
                for cell in finals[tuned]:
                    requested.setdefault(self.outcomes.path(cell).name, (cell, []))[1].append((tuned, set_name))
        self._pool = Pool(workers, self.out / "logs", self._on_examined)
        for cell, repeated in requested.values():
            folds, path, settings = list(dict.fromkeys(repeated)), self.outcomes.path(cell), self._settings(cell)
            measured = not cells.has_false_negatives(settings) or (path / cells.FALSE_NEGATIVES).is_file()
            if not (measured and cells.is_corrected(path, folds)):
                self._pool.add(dataclasses.replace(self._job(cell), folds=folds))
        self._to_examine = len(self._pool.waiting)
        if self._to_examine:
            _log(f"corrected retrieval of {self._to_examine} runs")
        self._pool.run()

    def _settings(self, cell: Cell) -> Settings:
        return cell.settings(self.request.base)

    def _job(self, cell: Cell, needed: list[str] | None = None) -> Job:
        tests = [dataclasses.asdict(test) for test in self.request.tests]
        return Job(to_dict(self._settings(cell)), str(self.outcomes.path(cell)), tests, needed)

    def _request(self, cell: Cell) -> None:
        name = self.outcomes.path(cell).name
        if name in self._requested:
            return
        self._requested.add(name)
        if not self.outcomes.is_done(cell):
            self._pool.add(self._job(cell, self.request.needed()))

    def _settle(self) -> None:
        """Request the final cells of all rows whose tuning has ended."""
        for row in self.rows.values():
            source = self.rows[row.parent] if row.parent is not None else row
            if row.name in self._settled or not all(self._ended(cell) for cell in source.grid):
                continue
            self._settled.add(row.name)
            if row.shown:
                for cell in (cell for group in self.finals(row).values() for cell in group):
                    self._request(cell)

    def _ended(self, cell: Cell) -> bool:
        return self.outcomes.path(cell).name in self.failed or self.outcomes.is_done(cell)

    def _on_trained(self, job: Job, error: str | None) -> None:
        self._trained += 1
        if error is not None:
            self.failed[job.name] = error
            _log(f"{job.name} failed: {error}")
        self._settle()
        planned = self._planned()
        left = planned - len(self._requested) + len(self._pool.waiting) + len(self._pool.running())
        seconds = (time.monotonic() - self._begin) / self._trained * left
        running = ", ".join(other.name for other in self._pool.running())
        progress = f"{planned - left}/{planned} runs, about {_duration(seconds)} left"
        _log(f"{progress}; finished {job.name}{f'; running {running}' if running else ''}")

    def _on_examined(self, job: Job, error: str | None) -> None:
        if error is not None:
            self.failed[f"{job.name} (corrected)"] = error
        left = len(self._pool.waiting) + len(self._pool.running())
        _log(f"corrected {self._to_examine - left}/{self._to_examine} runs; {error or job.name}")

    def _planned(self) -> int:
        """Return the number of cells in total; rows still being tuned count with the smallest possible number."""
        return len(self._requested) + sum(
            len(self.request.seeds) - (row.parent is None)
            for row in self.rows.values()
            if row.shown and row.name not in self._settled
        )


def _log(text: str) -> None:
    sys.stderr.write(f"compare: {text}\n")
    sys.stderr.flush()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
