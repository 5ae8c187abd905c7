"""SIGINT and SIGTERM: finish the step, write a checkpoint, stop.

Within `steps()` a signal only raises a flag, which the loop asks for after each step; anywhere else (checking samples,
evaluation) it raises `Interrupted` at once: what is needed to go on is on disk by then. A second signal always does.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from nuclr import distributed


class Interrupted(BaseException):
    """A signal asked the run to stop; `status` is what a shell reports for it."""

    def __init__(self, number: int, told: str = "interrupted") -> None:
        super().__init__(told)
        self.number, self.status = number, 128 + number


class Signals:
    """Catches both signals for the length of a `with` block."""

    def __init__(self) -> None:
        self.caught = 0
        self._in_steps = False

    def __enter__(self) -> "Signals":
        self._before = {}
        with contextlib.suppress(ValueError):  # not the main thread: then signals are not ours
            self._before = {number: signal.signal(number, self._catch) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        again, self.caught = self.caught, number
        if again or not self._in_steps:
            raise Interrupted(number)

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """A block in which a signal waits for the end of the step."""
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = False

    def wanted(self) -> int:
        """The signal that any of the processes caught, 0 for none; all of them have to ask together."""
        return max(caught for (caught,) in distributed.exchange([self.caught]))
