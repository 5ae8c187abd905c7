"""Parts of a computation in threads of Python, each with one thread of torch.

torch divides every single operation among its threads, and those that are done early wait for the others by spinning.
On a machine with other busy processes, most of the processor time then goes into waiting. Here a thread takes a whole
part and waits for nobody.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

PART = 2**20  # entries of a matrix for which it pays to ask another thread
WAITING = 1024  # parts that are handed to the threads at a time; each takes more than a kilobyte until it is done

_available: ContextVar[int] = ContextVar("available")
_before: list[int] = []  # torch's number of threads outside of the blocks that run now, in any thread


def count(device: torch.device) -> int:
    """Return the number of parts that are computed at a time."""
    return _available.get(torch.get_num_threads()) if device.type == "cpu" else 1


@contextmanager
def one_per_operation() -> Iterator[None]:
    """Let operations of torch use one thread, and only `in_order` several."""
    if _available.get(None) is not None:
        yield
        return
    before = next(iter(_before), None) or torch.get_num_threads()  # torch's number is 1 while another thread is here
    _before.append(before)
    token = _available.set(before)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _before.remove(before)
        _available.reset(token)


def in_order(function: Callable[[T], R], parts: Sequence[T], device: torch.device, use: Callable[[R], Any]) -> None:
    """Call use(function(part)) for each part, `use` in their order, so that sums do not depend on the threads."""
    threads = min(count(device), len(parts))
    if threads <= 1:
        for part in parts:
            use(function(part))
        return
    inference = torch.is_inference_mode_enabled()  # which a new thread would not know

    def compute(part: T) -> R:
        with torch.inference_mode(inference):
            return function(part)

    with one_per_operation(), ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for start in range(0, len(parts), WAITING):
            for result in pool.map(compute, parts[start : start + WAITING]):
                use(result)
