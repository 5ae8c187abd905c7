"""What a person sees of a run, on stderr: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nuclr import distributed

SECTIONS = ("data", "encoders", "objective")


class Clock:
    """Seconds spent in each section since the last `reset`, as this process sees it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.seconds = dict.fromkeys((*SECTIONS, "other"), 0.0)
        self.begin = self._last = time.perf_counter()

    def lap(self, section: str) -> None:
        """What went by since the last lap belongs to this section."""
        now = time.perf_counter()
        self.seconds[section] += now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds in all sections."""
        return sum(self.seconds.values())

    def shares(self) -> dict[str, float]:
        """Of the time in all sections."""
        total = self.total() or 1.0
        return {name: seconds / total for name, seconds in self.seconds.items()}


class Progress:
    """A bar with loss, chance level, speed, shares of time and time left; silent on all but the first process."""

    def __init__(self, name: str, steps: int, done: int, chance: float, batch: int) -> None:
        self.name, self.steps, self.chance, self.batch = name, steps, chance, batch
        self.done = self.begin_step = done
        self.begin = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Show it for the length of the block."""
        if distributed.rank() == 0 and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[told]}"))
            with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as self._bar:
                self._task = self._bar.add_task(self.name, total=self.steps, completed=self.done, told="")
                yield self
            self._bar = None
            return
        yield self

    def say(self, text: str) -> None:
        """A line that stays."""
        if distributed.rank() != 0:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def step(self, done: int) -> None:
        """So many steps of the run are done."""
        self.done = done
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def told(self, epoch: int, loss: float, clock: Clock) -> None:
        """Tell of the last steps."""
        if distributed.rank() != 0:
            return
        rate = (self.done - self.begin_step) * self.batch / max(1e-9, time.perf_counter() - self.begin)
        shares = ", ".join(f"{name} {clock.shares()[name]:.0%}" for name in SECTIONS)
        text = f"loss {loss:.4f} (chance {self.chance:.4f})  {rate:,.0f} samples/s  {shares}"
        if self._bar is not None:
            self._bar.update(self._task, told=text)
            return
        left = (self.steps - self.done) * self.batch / max(rate, 1e-9)
        self.say(f"{self.name}: step {self.done}/{self.steps}, epoch {epoch + 1}  {text}, {_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
