"""Processes and devices: one process, or as many as torchrun started."""

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


def pick_device(wanted: str) -> torch.device:
    """For "auto" the accelerator if there is one, else the CPU; each process of torchrun has its own."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device: {wanted!r} cannot be used here ({str(error).splitlines()[0][:80]})") from None
    return device


@contextlib.contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Join the other processes of torchrun for the length of the block; nothing to do for a single one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or (dist.is_available() and dist.is_initialized()):
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        # Whoever still holds the group keeps its threads running into the interpreter's end, which aborts now and then.
        gc.collect()
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this is the first process, also before and after the processes have joined."""
    return int(os.environ.get("RANK", "0")) == 0


class ElsewhereError(Exception):
    """The first process could not go on, and has said why."""


def on_first(function: Callable[[], Any]) -> Any:
    """Call a function on the first process only, while the others wait; if it fails, all of them end."""
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


def free_folder(wanted: Path) -> Path:
    """`wanted`, or where that is taken wanted-2, wanted-3, ...; the first process looks, and all agree."""

    def named(number: int) -> Path:
        return wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")

    free = next(number for number in itertools.count(1) if not named(number).exists())
    return named(distributed.exchange([free])[0][0])
