"""Train and evaluate what is missing, one run after another, each command in a process of its own."""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nuclr.runs import folder
from nuclr.studies.compare.pool import stop_on_signals
from nuclr.studies.table import attached
from nuclr.studies.table.plan import PlannedRun

LOCK_SECONDS = attached.STOP_SECONDS + 30.0  # that a run of a killed command may still take to write its checkpoint
LINES = 3  # of a failed command's output that are shown


def run_missing(
    runs: Sequence[PlannedRun],
    processes: int = 1,
    say: Callable[[str], None] = lambda _: None,
    done: Callable[[PlannedRun], None] = lambda _: None,
) -> dict[str, str]:
    """Train and evaluate all runs that are not done.

    Args:
        runs: The runs, in this order.
        processes: Number of processes per training, started by torchrun if more than one.
        say: Called with a line of progress.
        done: Called after each run that was worked on.

    Returns:
        What went wrong, by the name of the run; the others were still worked on.

    Raises:
        nuclr.studies.compare.pool.Stop: On SIGINT or SIGTERM, after the current command has ended.

    """
    failed: dict[str, str] = {}
    missing = [run for run in runs if run.state() != "done"]
    say(f"{len(runs) - len(missing)} of {len(runs)} runs are already done")
    begin = time.monotonic()
    for number, run in enumerate(missing, start=1):
        say(f"run {number} of {len(missing)}: {run.name} (log: {run.log})")
        error = _run(run, processes)
        if error is not None:
            failed[run.name] = error
            say(f"{run.name} failed: {error}")
        left = (time.monotonic() - begin) / number * (len(missing) - number)
        say(f"{number} of {len(missing)} runs have ended, about {duration(left)} left")
        done(run)
    return failed


def _run(run: PlannedRun, processes: int) -> str | None:
    """Train and evaluate one run; return what went wrong."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    if not run.trained:
        _wait_for_lock(run.folder / folder.LOCK)
    if not run.trained:
        error = execute(run.train_command(processes, here=True), run.log)
        if error is not None:
            return error
    run.results.mkdir(parents=True, exist_ok=True)
    for command, path in run.evaluate_commands(run.missing_columns(), here=True):
        if not path.is_file():
            error = execute(command, run.log)
            if error is not None:
                return error
    return None


def execute(command: list[str], log: Path) -> str | None:
    """Run a command to its end and append its output to `log`; return the last lines if it failed.

    The command ends with this process, even if that is killed (see `attached`).

    Raises:
        nuclr.studies.compare.pool.Stop: On SIGINT or SIGTERM, after the command has ended.

    """
    with log.open("ab") as file:
        begin = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", attached.__name__, *command],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            with stop_on_signals():
                process.wait()
        finally:
            process.stdin.close()  # type: ignore[union-attr]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2 * attached.STOP_SECONDS)
    if process.returncode == 0:
        return None
    with log.open("rb") as file:
        file.seek(begin)
        lines = [line for line in file.read()[-4000:].decode("utf-8", "replace").splitlines() if line.strip()]
    said = " ".join(line.strip() for line in lines[-LINES:]) if lines else "it printed nothing"
    return f"status {process.returncode}: {said}"


def _wait_for_lock(path: Path) -> None:
    """Wait until no process holds the lock of a run: one of a command that was killed may be writing a checkpoint."""
    end = time.monotonic() + LOCK_SECONDS
    while path.is_file() and time.monotonic() < end:
        with path.open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.5)


def duration(seconds: float) -> str:
    """Return seconds as minutes, hours or days.

    Example:
        >>> duration(95), duration(3 * 3600 + 120), duration(85 * 3600)
        ('1:35 min', '3:02 h', '3.5 days')

    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{seconds / 86400:.1f} days"
    return f"{hours}:{minutes:02d} h" if hours else f"{minutes}:{rest:02d} min"
