"""What stops a run, and why: signals, values that are not finite, data that changed since the run began."""

import contextlib
import hashlib
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from nuclr import distributed, files
from nuclr.errors import UserError
from nuclr.runs import folder
from nuclr.runs.components import Source


class TrainingFailed(RuntimeError):  # noqa: N818 (the name says that the run failed, not the program)
    """The run cannot continue, for a reason that its settings could not show beforehand."""


# -- signals -----------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """A signal asked the run to stop; `status` is the exit status that a shell reports for it."""

    def __init__(self, number: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.number, self.status = number, 128 + number


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
        again, self.caught = self.caught, number
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


class FiniteCheck:
    """Stop the run at the first gradient that is not finite: at once on a CPU, one step later on an accelerator.

    An accelerator then never waits for the host. A checkpoint is written only after its last step has been checked.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._pending: tuple[Tensor, torch.Event | None, Tensor] | None = None

    def check(self, finite: Tensor, numbers: Tensor) -> None:
        """Record whether this step is finite, and the numbers of its samples."""
        self.flush()
        if finite.device.type == "cpu":
            self._pending = (finite, None, numbers)
            self.flush()
            return
        # Reading the flag directly would wait for all work that is queued; the event is that of this step.
        copied, event = finite.to("cpu", non_blocking=True), torch.Event(finite.device)
        event.record()
        self._pending = (copied, event, numbers)

    def flush(self) -> None:
        """Raise if the last step was not finite."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        finite, copied, numbers = pending
        if copied is not None:
            copied.synchronize()
        if not finite:
            raise not_finite("the gradient is", numbers, None, self.run)


def not_finite(what: str, numbers: Tensor, flags: Tensor | None, run: Path) -> TrainingFailed:
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

_FIX = "restore the data, or start another run with out=..."


def data_identity(train: Source, held_out: Mapping[str, Source]) -> dict[str, dict[str, str]]:
    """Return hashes of the pairs and of the numbers in use, for the checkpoint; `held_out` by their settings."""
    sources = {"data.train": train, **held_out}
    return {
        key: {"pairs": source.pairs.fingerprint, "numbers": hashlib.sha256(source.numbers.tobytes()).hexdigest()}
        for key, source in sources.items()
    }


def check_same_data(saved: dict[str, Any], train: Source, held_out: Mapping[str, Source], run: Path) -> None:
    """Refuse to resume from the checkpoint `saved` with other data; the message names what changed."""
    now = data_identity(train, held_out)
    for key, before in saved.get("data", {}).items():
        if before["pairs"] != now[key]["pairs"]:
            raise UserError(f"{key}: these are not the pairs that the run in {run} began with; {_FIX}")
        if before["numbers"] != now[key]["numbers"]:
            changed = f"{key}: the bad samples are not the same as when the run in {run} began"
            raise UserError(f"{_changed(train, run) if key == 'data.train' else changed}; {_FIX}")


def _changed(train: Source, run: Path) -> str:
    lines = (run / folder.BAD).read_text(encoding="utf-8").splitlines() if (run / folder.BAD).is_file() else []
    before = {int(line["number"]): line["reason"] for line in map(files.parse_json, lines)}
    changed = sorted(before.keys() ^ train.bad.keys())
    if not changed:
        return f"data.keep does not list the same pairs as when the run in {run} began"
    number, more = changed[0], f", and {len(changed) - 1} more like it" if len(changed) > 1 else ""
    sample, began = f"data.train: sample {number} ({train.pairs.name(number)})", f"when the run in {run} began"
    if number in before:
        return f"{sample} was bad {began} ({before[number]}) and is good now{more}"
    return f"{sample} was good {began} and is bad now: {train.bad[number]}{more}"
