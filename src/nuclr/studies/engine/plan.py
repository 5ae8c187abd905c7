"""The plan of a study: rows, each with the settings that tuning chooses from, and the runs that they need.

A row is tuned over its grid with the first seed; the best setting is then trained with all seeds. A row with a parent
takes over the setting that the parent was tuned to and changes something in it. A grid of one setting needs no tuning.
Every run is an ordinary run folder, named by its content, so only missing runs are trained, and studies that share a
folder share their runs.

plan.json in the folder holds the settings of everything that was trained, by entry: a row, or all runs together. A
later command in the same folder must use the same settings for the entries that both have. Rows, seeds and test sets
may differ.
"""

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from nuclr import files
from nuclr.errors import UserError
from nuclr.runs import folder as run_folder
from nuclr.runs import settings as s
from nuclr.runs.jobs import Pool
from nuclr.runs.launch import cpu_cores, pick_device
from nuclr.runs.settings import Settings, content_hash
from nuclr.studies.engine.measure import BANKS, HALVES, VAL, Groups, Job, MeasuredSet, read_outcomes
from nuclr.training.logging import duration

PLAN = "plan.json"
CELLS = "cells"
LR_FACTOR = "lr_factor"
HALVED = "halves"  # key of the held-out data that is tuned on one half and reported on the other
Changes = Mapping[str, Any]  # settings by key


def make_run(
    base: Settings,
    changes: Changes,
    seed: int,
    title: str,
) -> Settings:
    """Return the settings of a run: `base` with these changes and this seed.

    Their name consists of the title, the changes and the seed, for the reader, and of a hash of all settings that
    decide the result.
    """
    settings = base
    parts = [title]
    for key, value in changes.items():
        settings = change(settings, key, value)
        shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
        parts.append(f"{key.rpartition('.')[2]}={shown}")
    settings = dataclasses.replace(
        settings,
        seed=seed,
        out=None,
        threads=settings.threads or 1,
    )
    name = "-".join([*parts, f"seed={seed}", content_hash(settings)])
    return dataclasses.replace(settings, name=re.sub(r"[^\w.=+-]+", "-", name))


def change(
    settings: Settings,
    key: str,
    value: Any,
) -> Settings:
    """Return `settings` with one key ("section.key" or "key") changed; "lr_factor" multiplies the learning rate."""
    if key == LR_FACTOR:
        return change(settings, "optimizer.lr", settings.optimizer.lr * value)
    changed: Settings = s.change(settings, key, value)
    return changed


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: Unique name.
        label: Name on tables and charts.
        base: Settings of its runs, with the name of its objective.
        sets: The sets that it is measured on.
        grid: Settings that tuning chooses from, each as changes of `base`; a row with a parent does not use it.
        parent: Row whose chosen setting this row takes over, with `changes`.
        changes: Settings changed in the choice.
        to: Rows that this row is compared with.
        shown: True to train it with all seeds; False if it is only tuned, for the rows that build on it.
        title: First part of the names of its runs.

    """

    name: str
    label: str
    base: Settings
    sets: tuple[MeasuredSet, ...]
    grid: tuple[Changes, ...] = ({},)
    parent: str | None = None
    changes: Changes = field(default_factory=dict)
    to: tuple[str, ...] = ()
    shown: bool = True
    title: str = ""

    @property
    def method(self) -> str:
        """Name of the objective."""
        return self.base.objective.name

    @property
    def tuned(self) -> bool:
        """Whether it has several settings to choose from."""
        return len(self.grid) > 1 and self.parent is None


@dataclass(frozen=True)
class Plan:
    """What a study trains and measures.

    Attributes:
        command: The command, such as "nuclr compare".
        name: Name of its results, such as "compare" for compare.json.
        rows: Rows of the table.
        seeds: Seeds of the final runs; tuning uses the first.
        tuning: Sets that settings are chosen on, one choice per set.
        detailed: Whether rows have popularity-corrected rankings and curves.
        keep_checkpoints: Whether finished runs keep their checkpoints; a grid of hundreds of runs would fill the disk.
        entries: By entry of plan.json: settings by key, which a later command in the same folder must not change.

    """

    command: str
    name: str
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    tuning: tuple[str, ...] = (VAL,)
    detailed: bool = False
    keep_checkpoints: bool = False
    entries: Mapping[str, Changes] = field(default_factory=dict)

    def folds(self, measured: MeasuredSet) -> list[tuple[str, str]]:
        """Return pairs (set that settings were tuned on, set that is measured); metrics are averaged over them."""
        if measured.key == HALVED:
            first, second = HALVES
            return [(first, second), (second, first)]
        return [(tuned, measured.key) for tuned in self.tuning]

    def describe(self) -> str:
        """Return the number of runs that will be trained."""
        tried = sum(len(row.grid) for row in self.rows if row.tuned)
        finals = sum(len(self.seeds) - row.tuned for row in self.rows if row.shown)
        more = " (more if both halves choose different settings)" if len(self.tuning) > 1 else ""
        return f"{tried + finals} runs{more}: {tried} to tune with seed {self.seeds[0]}, then {finals} with the choice"


class Study:
    """The runs of a plan in a folder: those to train, and the outcomes of those that are finished."""

    program = "nuclr.studies.engine.measure"  # of the workers

    def __init__(
        self,
        plan: Plan,
        out: Path,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.plan = plan
        self.out = out
        self.logs = out / "logs"
        self.say = say
        self.rows = {row.name: row for row in plan.rows}
        self.failed: dict[str, str] = {}
        self._made: dict[str, Settings] = {}
        self._outcomes: dict[str, Groups] = {}

    # -- runs and their outcomes ---------------------------------------------------------------------------------------

    def path(self, run: Settings) -> Path:
        """Return the folder of a run."""
        return self.out / CELLS / run.name

    def needed(self, row: Row) -> set[str]:
        """Return the names of the sets that the runs of a row are measured on."""
        measured = {key for one in row.sets for _, key in self.plan.folds(one)}
        return measured | set(self.plan.tuning) if row.tuned else measured

    def is_done(self, run: Settings, needed: Collection[str]) -> bool:
        """Return True if the run is finished and its outcome on all needed sets is stored."""
        return run_folder.is_finished(self.path(run)) and set(needed) <= self.outcomes(run).keys()

    def outcomes(self, run: Settings) -> Groups:
        """Return the outcome of every query by set; each file is read once."""
        if run.name not in self._outcomes:
            self._outcomes[run.name] = read_outcomes(self.path(run))
        return self._outcomes[run.name]

    def score(self, run: Settings, key: str) -> float:
        """Return recall@1 on a set, the mean of both directions, or accuracy; tuning maximizes it."""
        return float(np.mean([hits[:, 0].mean() for hits in self.outcomes(run)[key].values() if hits.ndim > 1]))

    def state(self, row: Row, run: Settings) -> str:
        """Return "done", "partial" or "missing"."""
        if self.is_done(run, self.needed(row)):
            return "done"
        return "partial" if files.is_run(self.path(run)) else "missing"

    # -- tuning --------------------------------------------------------------------------------------------------------

    def grid(self, row: Row) -> list[Settings]:
        """Return the runs that tuning chooses from; none for a single setting."""
        return [self._run_of(row, changes, self.plan.seeds[0]) for changes in row.grid] if row.tuned else []

    def chosen(self, row: Row) -> dict[str, Changes]:
        """Return the changes that tuning chose, for each tuning set; the first ones among equals.

        The dict is empty if no run of the grid is finished.
        """
        if row.parent is not None:
            return self.chosen(self.rows[row.parent])
        if not row.tuned:
            return dict.fromkeys(self.plan.tuning, row.grid[0])
        runs = zip(row.grid, self.grid(row), strict=True)
        done = [(changes, run) for changes, run in runs if self.is_done(run, self.needed(row))]
        choice = {}
        for key in self.plan.tuning if done else ():
            choice[key] = max(done, key=lambda pair: self.score(pair[1], key))[0]
        return choice

    def finals(self, row: Row) -> dict[str, list[Settings]]:
        """Return the runs of all seeds with the chosen setting, for each tuning set.

        A change to a value that the settings already have is left out, so both are the same run.
        """
        changed = {key: value for key, value in row.changes.items() if change(row.base, key, value) != row.base}
        runs = {}
        for key, changes in self.chosen(row).items():
            runs[key] = [self._run_of(row, {**changes, **changed}, seed) for seed in self.plan.seeds]
        return runs

    def complete(self, row: Row) -> bool:
        """Return True if all runs that the row's metrics need are finished."""
        finals = [run for runs in self.finals(row).values() for run in runs]
        return bool(finals) and all(self.state(row, run) == "done" for run in finals)

    def _run_of(
        self,
        row: Row,
        changes: Changes,
        seed: int,
    ) -> Settings:
        key = f"{row.name} {seed} {dict(changes)}"
        if key not in self._made:
            self._made[key] = make_run(
                row.base,
                changes,
                seed,
                row.title or row.method,
            )
        return self._made[key]

    # -- work ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for the length of the block, and store the plan; the folder is created if necessary.

        Raises:
            UserError: The folder cannot be written, is in use, belongs to another command, or has other settings.

        """
        results = [f"{self.plan.name}.{suffix}" for suffix in ("json", "md", "tex")]
        files.check_folder(
            self.out,
            self.plan.command,
            PLAN,
            [PLAN, CELLS, *results],
        )
        with files.take_lock(self.out, self.plan.command, "--out "):
            files.remove_temporaries(self.out)
            write_plan(self.out / PLAN, self.plan)
            yield

    def run(
        self,
        workers: int | None,
        done: Callable[[], object] = lambda: None,
    ) -> None:
        """Train and measure what is missing.

        Args:
            workers: Number of runs at the same time. None: one per CPU core, or one on a GPU.
            done: Called after every run.

        Raises:
            nuclr.runs.launch.Interrupted: On SIGINT or SIGTERM, after all workers have written checkpoints.

        """
        on_cpu = pick_device(self.plan.rows[0].base.device).type == "cpu"
        size = workers or (cpu_cores() if on_cpu else 1)
        # What tuning chose is known only when its runs have ended.
        for title, runs_of in (("runs to tune", self._grid_runs), ("runs with all seeds", self._final_runs)):
            needed: dict[str, tuple[Settings, set[str]]] = {}
            for row in self.plan.rows:
                for run, groups in runs_of(row):
                    needed.setdefault(run.name, (run, set()))[1].update(groups)
            missing = [self.job(run, groups) for run, groups in needed.values() if not self.is_done(run, groups)]
            if needed:
                self.say(
                    f"{len(needed)} {title}: {len(needed) - len(missing)} are done, the others train or are measured"
                )
            self._work(missing, size, done)

    def _work(
        self,
        jobs: Sequence[Job],
        size: int,
        done: Callable[[], object],
    ) -> None:
        """Work on jobs until all have ended."""
        begin = time.monotonic()

        def on_done(job: Job, error: str | None) -> None:
            self._outcomes.pop(job.name, None)  # it may have been read before the job
            if error is not None:
                self.failed[job.name] = error
                self.say(f"{job.name} failed: {error}")
            left = len(pool.waiting) + len(pool.running())
            ended = len(jobs) - left
            # Runs go in rounds of `size`; before the end of the first one, those next to it are nearly done as well.
            seconds = (time.monotonic() - begin) / math.ceil(ended / size) * math.ceil(left / size)
            self.say(f"{ended} runs done, {left} left, about {duration(seconds)}; finished {job.name}")
            done()

        pool = Pool(size, self.logs, on_done, self.program)
        pool.waiting.extend(jobs)
        pool.run()

    def _grid_runs(self, row: Row) -> list[tuple[Settings, set[str]]]:
        """Return the runs that the settings of a row are chosen from, each with its groups of outcomes."""
        source = self.rows[row.parent] if row.parent is not None else row
        return [(run, self.needed(source)) for run in self.grid(source)]

    def _final_runs(self, row: Row) -> Iterator[tuple[Settings, set[str]]]:
        """Yield the runs of a row with the chosen settings, each with its groups of outcomes."""
        ranked = [one for one in row.sets if one.kind == "retrieval"] if self.plan.detailed else []
        folds = [fold for one in ranked for fold in self.plan.folds(one)]
        for tuned, runs in self.finals(row).items() if row.shown else ():
            corrected = {"|".join((bank, *fold)) for bank in BANKS for fold in folds if fold[0] == tuned}
            yield from ((run, self.needed(row) | corrected) for run in runs)

    def job(self, run: Settings, needed: Collection[str]) -> Job:
        """Return the work on one run."""
        tests = {one.key: dataclasses.asdict(one) for row in self.plan.rows for one in row.sets if one.path}
        return Job(
            name=run.name,
            settings=s.to_dict(run),
            folder=str(self.path(run)),
            tests=list(tests.values()),
            needed=sorted(needed),
            keep_checkpoints=self.plan.keep_checkpoints,
        )


def write_plan(path: Path, plan: Plan) -> None:
    """Store the settings of what is about to be trained, after a check that earlier commands had the same.

    Raises:
        UserError: An entry has another value now; the message names the key.

    """
    stored: dict[str, dict[str, str]] = {}
    if path.is_file():
        try:
            content = files.parse_json(files.read_bytes(path))["entries"]
            stored = TypeAdapter(dict[str, dict[str, str]]).validate_python(content)
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(f"{path}: of an earlier version, or damaged; name another folder with --out") from None
    for name, settings in plan.entries.items():
        now = {key: str(value) for key, value in settings.items()}
        before = stored.setdefault(name, now)
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                raise UserError(
                    f"{name}: {key} is {now.get(key, 'the default')}, but {before.get(key, 'the default')} in {path}; "
                    "use the same settings to resume, or name another folder with --out"
                )
    with files.user_errors(path):
        files.write_json(path, {"written_by": plan.command, "entries": stored})
