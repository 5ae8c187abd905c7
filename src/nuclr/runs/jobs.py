"""Worker processes for many jobs: the pool that hands jobs out, and the program of a worker.

A worker is `python -m MODULE`, where the module ends with `serve(Job, run)`. It reads jobs as lines of JSON from stdin
and writes one line per finished job to stdout. It lives as long as the pool, because importing torch takes seconds. It
runs in a session of its own, so Ctrl-C reaches only the parent, which then asks the workers to stop; they write their
checkpoints and end. A worker whose stdin closes (its parent is gone, even by SIGKILL) ends at once, and the next
command resumes the run that it was training from its checkpoint.
"""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nuclr.errors import UserError
from nuclr.runs.launch import Interrupted, Signals

STOP_SECONDS = 60.0  # that a worker may take to write a checkpoint


class Worker(subprocess.Popen[bytes]):
    """A worker process with its current job, None if it is idle."""

    def __init__(self, log: Path, program: str) -> None:
        self.log = log
        self.job: Any = None
        with log.open("ab") as file:
            super().__init__(
                [sys.executable, "-m", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def send(self, job: Any) -> None:
        """Send a job. A worker that has ended is noticed when its answer is read."""
        assert self.stdin is not None
        self.job = job
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(json.dumps(dataclasses.asdict(job)).encode() + b"\n")
            self.stdin.flush()


class Pool:
    """A queue of jobs, and workers that take jobs from it.

    Args:
        size: Number of processes.
        logs: Folder for the workers' log files.
        done: Called as `done(job, error)` for every job that has ended; may add jobs to `waiting`.
        program: Module that a worker runs, which must understand the jobs.

    Attributes:
        waiting: The queue. A job is a dataclass of values that JSON can hold, and has a `name`.

    """

    def __init__(
        self,
        size: int,
        logs: Path,
        done: Callable[[Any, str | None], None],
        program: str,
    ) -> None:
        self.size = size
        self.logs = logs
        self.done = done
        self.program = program
        self.waiting: deque[Any] = deque()
        self._workers: list[Worker] = []
        self._started = 0

    def running(self) -> list[Any]:
        """Return the jobs in progress."""
        return [worker.job for worker in self._workers if worker.job is not None]

    def run(self) -> None:
        """Work until the queue is empty.

        Raises:
            Interrupted: On SIGINT or SIGTERM, after all workers have ended.

        """
        self.logs.mkdir(parents=True, exist_ok=True)
        with Signals():
            try:
                self._feed()
                while self.running():
                    workers: dict[Any, Worker] = {worker.stdout: worker for worker in self._workers}
                    for stdout in wait(list(workers)):
                        self._read_answer(workers[stdout])
                    self._feed()
            finally:
                self._end()

    def _feed(self) -> None:
        """Give a job to every idle worker, and start workers while jobs wait."""
        idle = [worker for worker in self._workers if worker.job is None]
        while self.waiting and (idle or len(self._workers) < self.size):
            if not idle:
                idle = [Worker(self.logs / f"worker-{self._started}.log", self.program)]
                self._started += 1
                self._workers += idle
            idle.pop().send(self.waiting.popleft())

    def _read_answer(self, worker: Worker) -> None:
        assert worker.stdout is not None
        job = worker.job
        worker.job = None
        line = worker.stdout.readline()
        if line.endswith(b"\n"):
            error = json.loads(line)
        else:  # the process has ended
            self._workers.remove(worker)
            error = f"its process ended with status {worker.wait()}, see {worker.log}"
        if job is not None:
            self.done(job, error)

    def _end(self) -> None:
        """Let workers that have a job write a checkpoint; kill the others, and those that take too long."""
        for worker in self._workers:
            worker.send_signal(signal.SIGKILL if worker.job is None else signal.SIGTERM)
        limit = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            try:
                worker.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def serve(job_class: Callable[..., Any], run: Callable[[Any, dict[Any, Any]], None]) -> None:
    """Run a worker's program: do jobs from stdin until it closes.

    Args:
        job_class: Makes a job of the values in a line.
        run: Called as `run(job, shared)`; `shared` is the same dict for all jobs of the worker. A UserError is
            reported as it is, any other error with its type and a traceback in the log.

    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    answers = sys.stdout
    sys.stdout = sys.stderr  # printed text must not mix with the answers
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(job_class(**json.loads(line)))
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    shared: dict[Any, Any] = {}
    while True:
        error = None
        try:
            run(jobs.get(), shared)
        except UserError as failed:
            error = str(failed)
        except Interrupted as stopped:
            os._exit(stopped.status)
        except Exception as failed:
            traceback.print_exc()
            error = f"{type(failed).__name__}: {failed}"
        answers.write(json.dumps(error) + "\n")
        answers.flush()
