"""How long the missing runs take: by finished runs of the same row, a trial of two steps, or a time from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nuclr.errors import UserError
from nuclr.runs import folder
from nuclr.studies.table.plan import PlannedRun
from nuclr.training.dry_run import dry_run


@dataclass(frozen=True)
class Estimate:
    """Seconds of one whole training, None if unknown, and where the number is from."""

    seconds: float | None
    source: str


def row_key(run: PlannedRun) -> tuple[str, str]:
    """Return what the runs of one row have in common."""
    return run.block, run.label


def estimate_rows(runs: Sequence[PlannedRun], trial: bool = True) -> dict[tuple[str, str], Estimate]:
    """Return the time of one training for every row.

    Args:
        runs: All planned runs.
        trial: Build the model and take two steps for rows without a finished run. Otherwise their time is unknown.

    """
    estimates = {}
    for run in runs:
        if row_key(run) not in estimates:
            row = [other for other in runs if row_key(other) == row_key(run)]
            estimates[row_key(run)] = _from_finished(row) or (_from_trial(run) if trial else Estimate(None, "unknown"))
    return estimates


def left(run: PlannedRun, estimate: Estimate) -> float | None:
    """Return the seconds of training that a run still needs; None if unknown."""
    if run.trained:
        return 0.0
    return estimate.seconds * (1 - run.progress()) if estimate.seconds is not None else None


def _from_finished(row: Sequence[PlannedRun]) -> Estimate | None:
    times = [training_seconds(folder.read_results(run.folder) or {}) for run in row if run.trained]
    known = [seconds for seconds in times if seconds is not None]
    if not known:
        return None
    return Estimate(sum(known) / len(known), f"mean of {len(known)} finished run{'s' if len(known) > 1 else ''}")


def training_seconds(results: dict[str, Any]) -> float | None:
    """Return the time of a whole training from its results.json.

    The stored time of a resumed run counts from the resumption, so the time at the measured speed is used if it is
    larger.
    """
    try:
        timing = results["timing"]
        at_speed = results["steps"] * results["batch_size"] / timing["samples_per_second"]
        return max(float(timing["seconds"]), float(at_speed))
    except (LookupError, TypeError, ZeroDivisionError):
        return None


def _from_trial(run: PlannedRun) -> Estimate:
    try:
        return Estimate(
            float(dry_run(run.settings)["seconds"]), "trial of two steps on one process, without evaluation"
        )
    except (UserError, OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        if run.hours is None:
            return Estimate(None, f"unknown: {reason}")
        hours, source = run.hours
        return Estimate(3600 * hours, f"{source}; no trial here: {reason}")
