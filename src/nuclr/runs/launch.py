"""Processes, devices and signals: a single process, or as many as torchrun started.

A process that waits for another one gives up after a while. `NUCLR_TIMEOUT` sets the number of seconds; the default is
300 for processes that have not joined yet, and 1800 for an answer during the run, because another process may be busy
for minutes. The end of another process is noticed in the next exchange with it, and that of torchrun within seconds.
"""

import contextlib
import datetime
import gc
import itertools
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from nuclr import distributed
from nuclr.errors import UserError
from nuclr.runs.settings import Settings

JOIN_SECONDS = 300.0
ANSWER_SECONDS = 1800.0
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container on Linux: "QUOTA PERIOD", or "max PERIOD"
GRACE_SECONDS = 4.0  # in which the program itself may notice the end of another process, at an exchange


def pick_device(name: str) -> torch.device:
    """Return the device; "auto" is an accelerator if there is one, else the CPU. Each torchrun process has its own."""
    chosen = name
    if name == "auto":
        chosen = "cuda" if torch.cuda.is_available() else "cpu"
    if chosen == "cuda":
        chosen = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        return torch.empty(1, device=chosen).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device: {name!r} cannot be used here ({str(error).splitlines()[0][:80]}); use cpu or auto"
        ) from None


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text("ascii").split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroups, or no quota ("max")
        return cores


class LostProcess(RuntimeError):  # noqa: N818 (the name says what happened)
    """Another process of the run has ended, did not join, or did not answer in time."""


@contextlib.contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Join the other processes of torchrun for the length of the block; does nothing for a single process.

    Raises:
        LostProcess: if the others do not join, or one of them ends or does not answer during the block.
        UserError: if `NUCLR_TIMEOUT` or a variable that torchrun sets is wrong.

    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events, and synchronization, are those of the current device
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or (dist.is_available() and dist.is_initialized()):
        yield
        return
    _join("nccl" if device.type == "cuda" else "gloo")
    stopped = threading.Event()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch_torchrun, args=[stopped], name="nuclr-torchrun", daemon=True).start()
    handler = None
    try:
        yield
    except BaseException as error:
        lost = _lost(error)
        if lost is not None and threading.current_thread() is threading.main_thread():
            # torchrun sends SIGTERM when a process dies; it must not end this one before the reason is reported.
            handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _clear_frames(error)
        if lost is not None:
            raise lost from None
        raise
    finally:
        stopped.set()
        # A group that is still referenced keeps its threads alive until the interpreter exits, which can then abort.
        gc.collect()
        dist.destroy_process_group()
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _join(backend: str) -> None:
    world = int(os.environ["WORLD_SIZE"])
    join_seconds = _timeout(JOIN_SECONDS)
    try:
        # In two steps, because joining has a shorter timeout than an exchange.
        rendezvous = dist.rendezvous("env://", timeout=datetime.timedelta(seconds=join_seconds))
        store, own_rank, world = next(rendezvous)
        dist.init_process_group(
            backend,
            store=store,
            rank=own_rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=_timeout(ANSWER_SECONDS)),
        )
    except ValueError as error:  # a variable of torchrun is missing
        raise UserError(f"WORLD_SIZE is {world}, but the processes cannot join ({error}); use torchrun") from None
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200].rstrip(".")
        raise LostProcess(
            f"the {world} processes of this run did not all join within {join_seconds:g} s (NUCLR_TIMEOUT): {reason}"
        ) from None


def _timeout(default: float) -> float:
    text = os.environ.get("NUCLR_TIMEOUT") or str(default)
    if not text.replace(".", "", 1).isdecimal() or not 1 <= float(text) <= 1e6:
        raise UserError(f"NUCLR_TIMEOUT is {text!r}; it needs a number of seconds from 1 to 1000000")
    return float(text)


def _lost(error: BaseException) -> LostProcess | None:
    """Return the error to report if `error` says that communication with another process failed, otherwise None."""
    message = str(error)
    if not isinstance(error, RuntimeError) or not (isinstance(error, dist.DistError) or "/gloo/" in message):
        return None
    reason = "has ended"
    if "timed out" in message.lower():
        reason = f"did not answer within {_timeout(ANSWER_SECONDS):g} s (NUCLR_TIMEOUT)"
    return LostProcess(_describe_loss(dist.get_rank(), "another process", reason))


def _describe_loss(
    rank: int,
    other: str,
    reason: str = "has ended",
) -> str:
    return f"process {rank} lost {other}, which {reason}; the run can be continued with --resume"


def _watch_torchrun(stopped: threading.Event) -> None:
    """End this process with one line if torchrun, which started it, ends before `stopped` is set.

    torchrun ends the processes of its machine when one of them dies. If it is killed itself, nobody else would.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        if stopped.wait(0.5):
            return
    if not stopped.wait(GRACE_SECONDS):
        sys.stderr.write(f"nuclr: {_describe_loss(dist.get_rank(), 'torchrun')}\n")
        os._exit(1)


def _clear_frames(error: BaseException | None) -> None:
    """Delete the local variables of the calls that failed, since they may refer to the group of processes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_first() -> bool:
    """Return whether this is the first process, also before the processes joined and after they left."""
    return int(os.environ.get("RANK", "0")) == 0


class ElsewhereError(Exception):
    """The first process failed and has reported why."""


def on_first(function: Callable[[], Any]) -> Any:
    """Call a function on the first process while the others wait; if it fails, all processes stop."""
    try:
        result = function() if distributed.rank() == 0 else None
    except Exception:
        distributed.exchange([1])
        raise
    if any(failed for (failed,) in distributed.exchange([0])):
        raise ElsewhereError
    return result


def choose_folder(
    settings: Settings,
    out: str | Path | None,
    resume: bool,
) -> Path:
    """Return `out`, or else the setting `out`, or runs/NAME; NAME-2, NAME-3, ... if that exists and is not resumed."""
    chosen = out or settings.out
    preferred = Path(chosen or Path("runs") / settings.name)
    if chosen or resume:
        return preferred

    def named(number: int) -> Path:
        return preferred if number == 1 else preferred.with_name(f"{preferred.name}-{number}")

    free = next(number for number in itertools.count(1) if not named(number).exists())
    return named(distributed.exchange([free])[0][0])  # the first process decides for all


# -- signals -----------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """A signal asked the command to stop; `status` is the exit status that a shell reports for it."""

    def __init__(self, number: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.status = 128 + number


class Signals:
    """Catch SIGINT and SIGTERM for the length of a `with` block: they raise `Interrupted`.

    Inside `steps()` a signal only sets a flag, which the training loop reads after each step, so that it can save.
    Anywhere else (checking samples, evaluation) it raises at once, since everything needed to resume is on disk. A
    second signal always raises.
    """

    def __init__(self) -> None:
        self.caught = 0
        self._in_steps = False

    def __enter__(self) -> "Signals":
        self._before = {}
        with contextlib.suppress(ValueError):  # signals can only be caught in the main thread
            self._before = {number: signal.signal(number, self._catch) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        again = self.caught
        self.caught = number
        if again or not self._in_steps:
            raise Interrupted(number)

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """Postpone signals to the end of the step."""
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = False

    def pending(self) -> int:
        """Return the signal that any process has caught, 0 if none. All processes must call this together."""
        return max(caught for (caught,) in distributed.exchange([self.caught]))
