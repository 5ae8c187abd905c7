"""Worker processes that train and examine cells: jobs, the pool that hands them out, and the worker's own program.

A worker is `python -m nuclr.studies.compare.pool`, or another module that calls `serve`. It reads jobs as lines of JSON
from stdin and writes one line per finished job to stdout. It lives as long as the pool, because importing torch takes
seconds. It runs in a session of its own, so Ctrl-C reaches only the parent, which then asks the workers to stop; they
write their checkpoints and end. A worker whose stdin closes (its parent is gone, even by SIGKILL) ends at once, and the
next command resumes the cell that it was training from its checkpoint.
"""

import contextlib
import dataclasses
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Generic, Protocol, TextIO, TypeVar

from nuclr.errors import UserError

# This module does not import torch at the top: a worker must listen to its stdin before the slow imports begin.

STOP_SECONDS = 60.0
PROGRAM = "nuclr.studies.compare.pool"


class AnyJob(Protocol):
    """A dataclass of values that JSON can hold."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """What messages call it."""
        ...


J = TypeVar("J", bound=AnyJob)


@dataclass(frozen=True)
class Job:
    """Work on one cell, as values that JSON can hold.

    Attributes:
        settings: Settings of the run, by section.
        cell: Folder of the run.
        tests: Test sets (fields of `measure.TestSet`).
        needed: Sets to measure after training; None if the cell is trained and the job is to examine it.
        folds: For a job that examines: (tuned on, reported on) pairs of sets for corrected retrieval.

    """

    settings: dict[str, Any]
    cell: str
    tests: list[dict[str, Any]]
    needed: list[str] | None = None
    folds: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the cell."""
        return Path(self.cell).name


def run_job(job: Job, shared: dict[Any, Any]) -> None:
    """Train and measure a cell, or examine a trained one.

    Args:
        job: What to do.
        shared: Loaders kept between the jobs of a worker, so images are decoded once.

    """
    from nuclr.runs import config
    from nuclr.studies.compare import cells
    from nuclr.studies.compare.measure import TestSet

    settings = config.from_dict(job.settings)  # imports the plugins, which may register the objective
    run = cells.open_cell(Path(job.cell), settings, shared)
    tests = [TestSet(**test) for test in job.tests]
    if job.needed is not None:
        cells.run_cell(run, tests, job.needed, shared)
        return
    cells.correct_cell(run, tests, [(tuned, reported) for tuned, reported in job.folds])
    if cells.has_false_negatives(settings):
        cells.measure_false_negatives(run)


class Stop(BaseException):
    """Raised when a signal asks the command to end; `status` is the exit status that a shell reports for it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number


class Worker(Generic[J]):
    """One worker process, its log file and its current job."""

    def __init__(self, log: Path, program: str) -> None:
        self.log = log
        self.job: J | None = None
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def send(self, job: J) -> None:
        """Send a job. A worker that has ended is noticed when its answer is read."""
        assert self.process.stdin is not None
        self.job = job
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(dataclasses.asdict(job)).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """Read one answer; None if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None


class Pool(Generic[J]):
    """A queue of jobs and `size` workers that take jobs from it.

    Args:
        size: Number of processes.
        logs: Folder for the workers' log files.
        done: Called as `done(job, error)` for every job that has ended; may `add` further jobs.
        program: Module that a worker runs, which must understand the jobs.

    """

    def __init__(self, size: int, logs: Path, done: Callable[[J, str | None], None], program: str = PROGRAM) -> None:
        self.size, self.logs, self.done, self.program = size, logs, done, program
        self.waiting: deque[J] = deque()
        self.workers: list[Worker[J]] = []

    def add(self, job: J) -> None:
        """Put a job into the queue."""
        self.waiting.append(job)

    def running(self) -> list[J]:
        """Return the jobs in progress."""
        return [worker.job for worker in self.workers if worker.job is not None]

    def run(self) -> None:
        """Work until the queue is empty.

        Raises:
            Stop: On SIGINT or SIGTERM, after all workers have ended.

        """
        if not self.waiting:
            return
        self.logs.mkdir(parents=True, exist_ok=True)
        with stop_on_signals(), selectors.DefaultSelector() as selector:
            try:
                for number in range(min(self.size, len(self.waiting))):
                    self._start(selector, number)
                while self.running():
                    for key, _ in selector.select():
                        self._answered(selector, key.data)
                    self._feed(selector)
            finally:
                self._end()

    def _start(self, selector: selectors.BaseSelector, number: int) -> None:
        worker: Worker[J] = Worker(self.logs / f"worker-{number}.log", self.program)
        self.workers.append(worker)
        selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
        if self.waiting:
            worker.send(self.waiting.popleft())

    def _answered(self, selector: selectors.BaseSelector, worker: Worker[J]) -> None:
        answer, job = worker.answer(), worker.job
        worker.job = None
        if answer is None:
            selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
            self.workers.remove(worker)
            status = worker.process.wait()
            answer = {"error": f"its process ended with status {status}, see {worker.log}"}
        if job is not None:
            self.done(job, answer["error"])

    def _feed(self, selector: selectors.BaseSelector) -> None:
        for worker in self.workers:
            if worker.job is None and self.waiting:
                worker.send(self.waiting.popleft())
        while self.waiting and len(self.workers) < self.size:
            used = {worker.log for worker in self.workers}
            self._start(selector, next(n for n in range(self.size) if self.logs / f"worker-{n}.log" not in used))

    def _end(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                if worker.job is not None:
                    worker.process.terminate()
                else:
                    worker.process.kill()
        limit = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            try:
                worker.process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self.workers = []


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise `Stop` in the block on SIGINT or SIGTERM."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Stop(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {}
    with contextlib.suppress(ValueError):  # signals can only be handled in the main thread
        before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(job_class: Callable[..., J], run: Callable[[J, dict[Any, Any]], None]) -> None:
    """Run a worker's program: do jobs from stdin until it closes.

    Args:
        job_class: Makes a job of the values in a line.
        run: Called as `run(job, shared)`; `shared` is the same dict for all jobs of the worker.

    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    answers = sys.stdout
    sys.stdout = sys.stderr  # printed text must not mix with the answers
    jobs: queue.SimpleQueue[J] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, jobs, job_class), daemon=True).start()

    from nuclr.training.guards import Interrupted, TrainingFailed

    shared: dict[Any, Any] = {}
    while True:
        job = jobs.get()
        try:
            run(job, shared)
            error = None
        except (UserError, TrainingFailed) as failed:
            error = str(failed)
        except (Interrupted, KeyboardInterrupt):
            os._exit(130)
        except Exception as failed:
            traceback.print_exc()
            error = f"{type(failed).__name__}: {failed}"
        answers.write(json.dumps({"job": job.name, "error": error}) + "\n")
        answers.flush()


def _listen(lines: TextIO, jobs: "queue.SimpleQueue[J]", job_class: Callable[..., J]) -> None:
    for line in lines:
        jobs.put(job_class(**json.loads(line)))
    os._exit(1)


if __name__ == "__main__":
    serve(Job, run_job)
