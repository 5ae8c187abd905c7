"""Processes that are forked from one that has imported everything they need.

A tiny run takes less than a second of CPU, and importing torch and transformers four to seven. So tests that start many
processes, to kill them or to compare one with several, fork them. How `python -m nuclr` and torchrun themselves start
and end is tested in tests/training/test_exit.py, tests/training/test_loop.py and tests/cli/test_app.py.
"""

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

from tests.training import runs

# Also what torch and transformers import only at the first use. The server has no threads, so forking it is safe.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch._dynamo", "kornia", "nuclr.cli.app", "nuclr.models.networks", "nuclr.runs.run", "nuclr.training.loop"]
)


class Fork:
    """A forked process, with the part of the interface of subprocess.Popen that the tests need."""

    def __init__(self, function: Callable, arguments: list[str], environment: dict[str, str]) -> None:
        self._files = [tempfile.NamedTemporaryFile("r") for _ in range(2)]  # noqa: SIM115
        names = [file.name for file in self._files]
        self._process = _context.Process(target=_run, args=(function, arguments, environment, names))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait until the process has ended; return stdout and stderr."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        out, err = (file.read() for file in self._files)
        return out, err

    def dump_stacks(self) -> None:
        """Let the process write the stacks of its threads to stderr."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)


def start(arguments: list, world: int = 1, ranks: Sequence[int] | None = None) -> list[Fork]:
    """Start `nuclr train` as `runs.start` does; wait for it with `runs.finish`."""
    return [Fork(_train, list(map(str, arguments)), environment) for environment in runs.environments(world, ranks)]


def call(function: Callable, arguments: list, world: int) -> None:
    """Call a function of a module in `world` processes with the variables that torchrun sets, and wait for them."""
    environments = runs.environments(world, range(world))
    outcomes = runs.finish([Fork(function, list(map(str, arguments)), environment) for environment in environments])
    for rank, (status, _, err) in enumerate(outcomes):
        assert status == 0, f"process {rank} of {world}: {err[-3000:]}"


def _train(*arguments: str) -> None:
    from nuclr.cli import app

    sys.argv = ["nuclr", "train", *arguments]
    app.main()


def _run(function: Callable, arguments: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    for descriptor, name in enumerate(outputs, start=1):
        file = os.open(name, os.O_WRONLY)
        os.dup2(file, descriptor)
        os.close(file)
    faulthandler.register(signal.SIGUSR1, file=2)
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)
