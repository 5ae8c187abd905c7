"""Processes and devices: a single process, or as many as torchrun started.

A process that waits for another one gives up after a while. `NUCLR_TIMEOUT` sets the number of seconds; the default is
300 for processes that have not joined yet, and 1800 for an answer during the run, because another process may be busy
for minutes. The end of another process is noticed in the next exchange with it, or by `PeerWatch` within seconds.
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
from typing import Any

import torch
import torch.distributed as dist

from nuclr import distributed
from nuclr.errors import UserError
from nuclr.runs.peers import PeerWatch

JOIN_SECONDS, ANSWER_SECONDS = 300.0, 1800.0
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container on Linux: "QUOTA PERIOD", or "max PERIOD"
NOTE_SECONDS = 5.0  # a process that waits longer than this for the others to join says so


def pick_device(name: str) -> torch.device:
    """Return the device; "auto" is an accelerator if there is one, else the CPU. Each torchrun process has its own."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device: {name!r} cannot be used here ({str(error).splitlines()[0][:80]}); use cpu or auto"
        ) from None
    return device


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
    watch = _join("nccl" if device.type == "cuda" else "gloo")
    handler = None
    try:
        yield
        watch.stop(goodbye=True)
    except BaseException as error:
        watch.stop(goodbye=False)
        lost = _lost(error)
        if lost is not None and threading.current_thread() is threading.main_thread():
            # torchrun sends SIGTERM when a process dies; it must not end this one before the reason is reported.
            handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _clear_frames(error)
        if lost is not None:
            raise lost from None
        raise
    finally:
        # A group that is still referenced keeps its threads alive until the interpreter exits, which can then abort.
        gc.collect()
        dist.destroy_process_group()
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _join(backend: str) -> PeerWatch:
    world, timeout = int(os.environ["WORLD_SIZE"]), _timeout()
    join_seconds = timeout or JOIN_SECONDS
    note = threading.Timer(NOTE_SECONDS, _say_waiting, (world, join_seconds))
    note.daemon = True
    note.start()
    try:
        # In two steps, because joining has a shorter timeout than an exchange.
        rendezvous = dist.rendezvous("env://", timeout=datetime.timedelta(seconds=join_seconds))
        store, own_rank, world = next(rendezvous)
        dist.init_process_group(
            backend,
            store=store,
            rank=own_rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout or ANSWER_SECONDS),
        )
        return PeerWatch(store, own_rank, world, lambda lost: _describe_loss(own_rank, f"process {lost}"))
    except ValueError as error:  # a variable of torchrun is missing
        raise UserError(f"WORLD_SIZE is {world}, but the processes cannot join ({error}); use torchrun") from None
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        late = "timed out" in reason.lower() or "timeout" in reason.lower()
        within = f" within {join_seconds:g} s (NUCLR_TIMEOUT)" if late else ""
        raise LostProcess(f"the {world} processes of this run did not all join{within}: {reason[:200]}") from None
    finally:
        note.cancel()


def _say_waiting(world: int, seconds: float) -> None:
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"nuclr: process {rank} waits for all {world} processes to join, for at most {seconds:g} s\n")
    sys.stderr.flush()


def _timeout() -> float | None:
    text = os.environ.get("NUCLR_TIMEOUT", "")
    try:
        seconds = float(text) if text else None
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 1 <= seconds <= 1e6:
        raise UserError(f"NUCLR_TIMEOUT is {text!r}; it needs a number of seconds from 1 to 1000000")
    return seconds


def _lost(error: BaseException) -> LostProcess | None:
    """Return the error to report if `error` says that communication with another process failed, otherwise None."""
    message = str(error)
    if not isinstance(error, RuntimeError) or not (isinstance(error, dist.DistError) or "/gloo/" in message):
        return None
    world, rank = dist.get_world_size(), dist.get_rank()
    other = f"process {1 - rank}" if world == 2 else "another process"
    if "timed out" in message.lower():
        seconds = _timeout() or ANSWER_SECONDS
        return LostProcess(f"process {rank}: {other} did not answer within {seconds:g} s (NUCLR_TIMEOUT)")
    return LostProcess(_describe_loss(rank, other))


def _describe_loss(rank: int, other: str) -> str:
    return f"process {rank} lost {other}, which has ended; the run can be continued with --resume"


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
    problem: BaseException | None = None
    result = None
    if distributed.rank() == 0:
        try:
            result = function()
        except Exception as error:
            problem = error
    failed = any(flag for (flag,) in distributed.exchange([int(problem is not None)]))
    if problem is not None:
        raise problem
    if failed:
        raise ElsewhereError
    return result


def free_folder(preferred: Path) -> Path:
    """Return `preferred`, or NAME-2, NAME-3, ... if it exists; the first process decides for all."""

    def named(number: int) -> Path:
        return preferred if number == 1 else preferred.with_name(f"{preferred.name}-{number}")

    free = next(number for number in itertools.count(1) if not named(number).exists())
    return named(distributed.exchange([free])[0][0])
