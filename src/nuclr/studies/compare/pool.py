"""Worker processes, and which of them does what; nothing here knows what a job is.

Workers live long, as importing torch takes seconds, and are in sessions of their own: Ctrl-C reaches only the parent,
which then asks them to stop, and they write their checkpoints.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

STOP_SECONDS = 60.0


class Stop(BaseException):
    """A signal asked for the end; `status` is what a shell reports for it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number


class Worker:
    """One process, its log, and the job that it has."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.job: dict[str, Any] | None = None
        self.since = 0.0
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nuclr.studies.compare.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def give(self, job: dict[str, Any]) -> None:
        """Send a job; a worker that is gone shows when its answer is read."""
        assert self.process.stdin is not None
        self.job, self.since = job, time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """One line of it; None where the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None


class Pool:
    """`size` workers that take jobs from a queue.

    `done(job, error)` is called for every job that has ended, and may `add` further ones.
    """

    def __init__(self, size: int, logs: Path, done: Callable[[dict[str, Any], str | None], None]) -> None:
        self.size, self.logs, self.done = size, logs, done
        self.waiting: deque[dict[str, Any]] = deque()
        self.workers: list[Worker] = []

    def add(self, job: dict[str, Any]) -> None:
        """Put a job into the queue."""
        self.waiting.append(job)

    def running(self) -> list[dict[str, Any]]:
        """Jobs under way."""
        return [worker.job for worker in self.workers if worker.job is not None]

    def run(self) -> None:
        """Until no job is left. Raises Stop on SIGINT or SIGTERM, with all workers ended."""
        if not self.waiting:
            return
        self.logs.mkdir(parents=True, exist_ok=True)
        with _signals(), selectors.DefaultSelector() as selector:
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
        worker = Worker(self.logs / f"worker-{number}.log")
        self.workers.append(worker)
        selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
        if self.waiting:
            worker.give(self.waiting.popleft())

    def _answered(self, selector: selectors.BaseSelector, worker: Worker) -> None:
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
                worker.give(self.waiting.popleft())
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
def _signals() -> Iterator[None]:
    def stop(number: int, _frame: FrameType | None) -> None:
        raise Stop(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {}
    with contextlib.suppress(ValueError):  # not the main thread: then signals are not ours
        before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
