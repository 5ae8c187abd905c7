"""What stops a run, and why: signals, values that are not finite, data that changed since the run began."""

import contextlib
import hashlib
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from nuclr import distributed, files
from nuclr.data.selection import Source
from nuclr.errors import UserError
from nuclr.runs import folder


class TrainingFailed(RuntimeError):  # noqa: N818 (the name says that the run failed, not the program)
    """The run cannot continue, for a reason that its settings could not show beforehand."""


# -- signals -----------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """A signal asked the run to stop; `status` is the exit status that a shell reports for it."""

    def __init__(self, number: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.number = number
        self.status = 128 + number


class Signals:
    """Catch SIGINT and SIGTERM for the length of a `with` block, so that a run can finish its step and save.

    Inside `steps()` a signal only sets a flag, which the loop reads after each step. Anywhere else (checking samples,
    evaluation) it raises `Interrupted` at once, since everything needed to resume is on disk by then. A second signal
    always raises.
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


# -- values that are not finite ----------------------------------------------------------------------------------------


def not_finite(
    what: str,
    numbers: Tensor,
    flags: Tensor | None,
    run: Path,
) -> TrainingFailed:
    """Return the error for a NaN or an infinity; the numbers of all samples concerned are written to a file."""
    everyone = distributed.all_gather(numbers)
    samples = (everyone if flags is None else everyone[flags]).tolist()
    if distributed.rank() == 0:
        files.write_json(run / "not_finite.json", {"what": what, "samples": samples})
    shown = ", ".join(map(str, samples[:8]))
    more = f" and {len(samples) - 8} more, see not_finite.json" if len(samples) > 8 else ""
    return TrainingFailed(
        f"{what} not finite in the batch with the samples {shown}{more}.\n"
        f"The last good checkpoint is in {run / folder.CHECKPOINTS}; a lower optimizer.lr or optimizer.clip=1 may help."
    )


# -- data that changed -------------------------------------------------------------------------------------------------
#
# The order of an epoch depends on which pairs are in use. If a file became unreadable, or was repaired, while a run was
# stopped, the order would change in the middle of it, and a sample could be seen twice in an epoch or not at all.


def data_identity(train: Source, held_out: Mapping[str, Source]) -> dict[str, dict[str, str]]:
    """Return hashes of the pairs and of the numbers in use, for the checkpoint; `held_out` by their settings."""
    sources = {"data.train": train, **held_out}
    return {
        key: {"pairs": source.pairs.fingerprint, "numbers": hashlib.sha256(source.numbers.tobytes()).hexdigest()}
        for key, source in sources.items()
    }


def check_same_data(
    saved: dict[str, Any],
    train: Source,
    held_out: Mapping[str, Source],
    run: Path,
) -> None:
    """Refuse to resume from the checkpoint `saved` with other data."""
    now = data_identity(train, held_out)
    for key, before in saved.get("data", {}).items():
        if before != now[key]:
            what = "other pairs" if before["pairs"] != now[key]["pairs"] else "other bad samples, or another data.keep,"
            raise UserError(
                f"{key} has {what} than when the run in {run} began (see its {folder.BAD}); restore the data, or start "
                "another run with out=..."
            )
