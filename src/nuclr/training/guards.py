"""A NaN or an infinity ends the run, with the numbers of the samples that it came from."""

import json
from pathlib import Path

from torch import Tensor

from nuclr import distributed
from nuclr.runs import folder


class TrainingFailed(RuntimeError):  # noqa: N818 (the run failed; it says why)
    """The run cannot go on, through no fault in its settings that could have been seen before."""


class FiniteCheck:
    """Ends the run at the first gradient that is not finite: at once on a CPU, elsewhere one step later.

    An accelerator so never waits for the host; no checkpoint is written before the check of its last step.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._pending: tuple[Tensor, Tensor] | None = None

    def check(self, finite: Tensor, numbers: Tensor) -> None:
        """The flag of this step, and the numbers of its samples."""
        self.flush()
        self._pending = (finite, numbers)
        if finite.device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Look at the last step's flag."""
        pending, self._pending = self._pending, None
        if pending is not None and not bool(pending[0]):
            raise not_finite("the gradient is", pending[1], None, self.run)


def not_finite(what: str, numbers: Tensor, flags: Tensor | None, run: Path) -> TrainingFailed:
    """The error for a NaN or an infinity; the numbers of all samples concerned go to a file."""
    everyone = distributed.all_gather(numbers)
    found = (everyone if flags is None else everyone[flags]).tolist()
    if distributed.rank() == 0:
        (run / "not_finite.json").write_text(json.dumps({"what": what, "samples": found}) + "\n", encoding="utf-8")
    shown = ", ".join(map(str, found[:8])) + (
        f" and {len(found) - 8} more, see not_finite.json" if len(found) > 8 else ""
    )
    return TrainingFailed(
        f"{what} not finite in the batch with the samples {shown}.\n"
        f"The last good checkpoint is in {run / folder.CHECKPOINTS}; a lower optimizer.lr or optimizer.clip=1 may help."
    )
