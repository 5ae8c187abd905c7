"""A line on stderr that tells the residual and the time left."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

RECENT = 10


def passes_left(history: Sequence[float], tolerance: float) -> float:
    """How many passes the recent rate of decrease needs from here to the tolerance; inf if there is none."""
    recent = [math.log(max(residual, 1e-300)) for residual in history[-RECENT - 1 :]]
    fall = recent[0] - recent[-1]
    left = recent[-1] - math.log(tolerance)
    return max(left, 0.0) * (len(recent) - 1) / fall if fall > 0 else math.inf


@contextmanager
def progress_bar(shown: bool, tolerance: float, max_iterations: int) -> Iterator[Callable[[Sequence[float]], None]]:
    """Gives a function to call with the history of residuals after each pass."""
    if not shown:
        yield lambda history: None  # noqa: ARG005
        return
    columns = (
        TextColumn("popularity"),
        BarColumn(),
        TextColumn("pass {task.completed}  residual {task.fields[residual]}  left {task.fields[left]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, residual="?", left="?")
        start = time.monotonic()

        def update(history: Sequence[float]) -> None:
            done = len(history)
            passes = min(passes_left(history, tolerance), max_iterations - done)
            seconds = passes * (time.monotonic() - start) / done
            left = f"{seconds / 60:.0f} min" if seconds > 100 else f"{seconds:.0f} s"
            bar.update(task, total=done + passes, completed=done, residual=f"{history[-1]:.1e}", left=left)

        yield update
