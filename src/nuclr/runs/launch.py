"""Processes and devices: a single process, or as many as torchrun started."""

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nuclr import distributed
from nuclr.errors import UserError


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
        raise UserError(f"device: {name!r} cannot be used here ({str(error).splitlines()[0][:80]})") from None
    return device


@contextlib.contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Join the other processes of torchrun for the length of the block; does nothing for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or (dist.is_available() and dist.is_initialized()):
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        # A group that is still referenced keeps its threads alive until the interpreter exits, which can then abort.
        gc.collect()
        dist.destroy_process_group()


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
