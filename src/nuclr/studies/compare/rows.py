"""The rows of a table and how their settings are found.

A row is tuned over its own grid, or takes the setting that another row was tuned to and changes something in it: so
are ablations and batch sizes made. `Tuning` says on which held-out images a setting is chosen and where it is reported.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nuclr.runs.settings import Settings
from nuclr.studies.compare import cells
from nuclr.studies.compare import measure as sets
from nuclr.studies.compare.arrays import read_groups
from nuclr.studies.compare.corrected import CORRECTED
from nuclr.studies.compare.plan import Cell, Row, change


@dataclass(frozen=True)
class Report:
    """A figure's set: for each way of tuning (the set it was tuned on), the set that it is reported on."""

    name: str
    label: str
    folds: tuple[tuple[str, str], ...]
    kind: str = "pairs"
    main: bool = True


def tuned_on(halves: bool) -> tuple[str, ...]:
    """The sets that settings are chosen on, one choice each."""
    return sets.HALVES if halves else (sets.VAL,)


def reports(halves: bool, tests: list[sets.TestSet]) -> list[Report]:
    """What is reported; figures of the pairs that tuning saw are for reference, and not `main` where others are."""
    a, b = sets.HALVES
    found = []
    if halves:
        found.append(Report("halves", "held-out pairs, the half that tuning did not see", ((a, b), (b, a))))
    whole = tuple((key, sets.VAL) for key in tuned_on(halves))
    label = "all held-out pairs, half of them seen by tuning" if halves else "held-out pairs, also tuned on"
    found.append(Report("val", label, whole, main=not halves and not tests))
    for test in tests:
        folds = tuple((key, test.key) for key in tuned_on(halves))
        found.append(Report(test.name, test.name, folds, test.kind))
    return found


class Outcomes:
    """Cells on disk below `folder`, read once each."""

    def __init__(self, folder: Path, base: Settings, needed: list[str]) -> None:
        self.folder, self.base, self.needed = folder, base, needed
        self._hits: dict[str, dict[str, sets.Hits]] = {}
        self._corrected: dict[str, dict[str, sets.Hits]] = {}
        self._done: set[str] = set()
        self._paths: dict[tuple[object, ...], Path] = {}

    def path(self, cell: Cell) -> Path:
        """Its folder."""
        key = (cell.method, cell.seed, *cell.changes.items())
        if key not in self._paths:
            self._paths[key] = self.folder / cell.settings(self.base).name
        return self._paths[key]

    def is_done(self, cell: Cell) -> bool:
        """Whether it was trained and measured."""
        path = self.path(cell)
        if path.name not in self._done and cells.is_done(path, self.needed):
            self._done.add(path.name)
        return path.name in self._done

    def hits(self, cell: Cell) -> dict[str, sets.Hits]:
        """Outcome on every set."""
        path = self.path(cell)
        if path.name not in self._hits:
            self._hits[path.name] = read_groups(path / cells.HITS)
        return self._hits[path.name]

    def corrected(self, cell: Cell) -> dict[str, sets.Hits]:
        """Outcome of corrected ranking; empty where it was not made."""
        path = self.path(cell)
        if path.name not in self._corrected:
            self._corrected[path.name] = read_groups(path / CORRECTED)
        return self._corrected[path.name]

    def score(self, cell: Cell, key: str) -> float:
        """Mean recall@1 of both directions on a set: what tuning goes by."""
        hits = self.hits(cell)[key]
        return float(np.mean([hits[direction][:, 0].mean() for direction in ("i2t", "t2i")]))


def choose(row: Row, outcomes: Outcomes, keys: tuple[str, ...]) -> dict[str, Cell]:
    """The best finished cell of the grid for each set that is tuned on; the first of equals."""
    done = [cell for cell in row.grid if outcomes.is_done(cell)]
    return {key: max(done, key=lambda cell: outcomes.score(cell, key)) for key in keys} if done else {}


def final_cells(row: Row, chosen: dict[str, Cell], seeds: list[int], base: Settings) -> dict[str, list[Cell]]:
    """For each set that was tuned on, the cells of all seeds with the setting chosen there.

    A change to what the base has already is none, so that both are one cell.
    """
    changes = {key: value for key, value in row.changes.items() if change(base, key, value) != base}
    return {
        key: [Cell(row.name, row.method, {**cell.changes, **changes}, seed) for seed in seeds]
        for key, cell in chosen.items()
    }
