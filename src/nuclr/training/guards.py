"""What stops a run, and why: values that are not finite, data that changed since the run began."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nuclr import distributed, files
from nuclr.data.selection import Source
from nuclr.errors import UserError
from nuclr.runs import folder


class TrainingFailed(RuntimeError):  # noqa: N818 (the name says that the run failed, not the program)
    """The run cannot continue, for a reason that its settings could not show beforehand."""


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
