"""Train the runs of the demo in parallel, and collect what they found."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nuclr import files
from nuclr.errors import UserError
from nuclr.objectives import entry
from nuclr.runs import folder
from nuclr.runs.settings import Settings, to_dict
from nuclr.studies.compare.pool import Pool
from nuclr.studies.demo import worker
from nuclr.training.guards import TrainingFailed

SEEDS = 3
SUMMARY = "demo.json"
WORKER = "nuclr.studies.demo.worker"
METHODS = ("clip", "sogclr", "nuclr")  # one temperature suits all three: docs/results.md
MAIN = "nuclr"

Results = dict[str, list[dict[str, Any]]]  # by method, per seed: the content of results.json and of search.json


def is_demo(settings: Settings) -> bool:
    """Return whether the settings train NUCLR on built-in pairs with held-out pairs, on one process."""
    builtin = str(settings.data.train).partition(":")[0] == "builtin" and settings.data.val is not None
    return settings.objective.name == MAIN and builtin and int(os.environ.get("WORLD_SIZE", "1")) == 1


def planned_runs(settings: Settings, out: Path) -> dict[tuple[str, int], tuple[Settings, Path]]:
    """Return settings and folder of every run, by method and seed.

    The run of NUCLR with the first seed is in `out` itself, the others are in `out`/seeds.
    """
    runs = {}
    for seed in range(settings.seed, settings.seed + SEEDS):
        for method in METHODS:
            main = (method, seed) == (MAIN, settings.seed)
            chosen = dataclasses.replace(settings.objective, name=method)
            name = settings.name if main else f"{settings.name} ({entry(method).label}, seed {seed})"
            own = dataclasses.replace(settings, name=name, objective=chosen, seed=seed, threads=1, report=False)
            runs[method, seed] = own, out if main else out / folder.SEEDS / f"{method}-{seed}"
    return runs


def train_all(settings: Settings, out: Path, say: Callable[[str], None]) -> Results:
    """Train all runs that are not finished, in as many processes as there are cores.

    Args:
        settings: of the run of NUCLR with the first seed.
        out: its folder.
        say: called with a line about the progress after every run.

    Returns:
        By method, per seed, the content of results.json and, with the key "search", that of search.json.

    Raises:
        UserError: all runs failed for the same reason.
        TrainingFailed: a run failed.
        Stop: SIGINT or SIGTERM, after all processes have written checkpoints.

    """
    runs = planned_runs(settings, out)
    failed: dict[str, str] = {}
    begin = time.monotonic()
    done = 0

    def ended(job: worker.Job, error: str | None) -> None:
        nonlocal done
        done += 1
        if error is not None:
            failed[job.name] = error
        left = (time.monotonic() - begin) / done * (planned - done)
        say(f"{done} of {planned} models trained" + (f", about {left:.0f} s left" if done < planned else ""))

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool: Pool[worker.Job] = Pool(min(cores, len(runs)), out / folder.SEEDS / "logs", ended, WORKER)
    for own, path in runs.values():
        if not (folder.is_finished(path) and (path / worker.MEASURED).is_file()):
            pool.add(worker.Job(to_dict(own), str(path)))
    planned = len(pool.waiting)
    pool.run()
    if len(failed) == len(runs) and len(set(failed.values())) == 1:  # no run can be trained with these settings
        raise UserError(next(iter(failed.values())))
    for name, error in failed.items():
        raise TrainingFailed(f"{name}: {error}")
    results: Results = {method: [] for method in METHODS}
    for (method, _), (_, path) in runs.items():
        search = files.parse_json(files.read_text(path / worker.MEASURED))
        results[method].append({**(folder.read_results(path) or {}), "search": search})
    files.write_json(out / SUMMARY, results)
    return results


class ProgressLine:
    """The last line about the progress: replaced on a terminal, written now and then elsewhere."""

    def __init__(self, every: float = 20.0) -> None:
        self.every, self._last, self._width = every, time.monotonic(), 0

    def say(self, text: str) -> None:
        """Show a line."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r   {text:{self._width}}")
            self._width = len(text)
        elif time.monotonic() - self._last >= self.every:
            self._last = time.monotonic()
            sys.stderr.write(f"   {text}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Remove the line from a terminal."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r   {'':{self._width}}\r")
            sys.stderr.flush()
