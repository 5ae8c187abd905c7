"""What the run took, and how to repeat it: the sections "time" and "repeat"."""

from dataclasses import dataclass
from typing import Any

from nuclr.report import numbers
from nuclr.report.render import LeaveOut
from nuclr.report.training_run import TrainingRun
from nuclr.runs import folder
from nuclr.runs.folder import machine, versions

PARTS = (
    ("data", "reading data", 3),
    ("encoders", "encoders", 1),
    ("objective", "objective, state, logging", 2),
    ("other", "checkpoints, evaluation, other", 8),
)


@dataclass(frozen=True)
class TimeShare:
    """A part of the training loop, its share of the time, and its color slot."""

    name: str
    share: float
    color: int


@dataclass(frozen=True)
class Time:
    """Content of the section "time"; `total` is empty if the run is not finished."""

    shares: list[TimeShare]
    total: str


@dataclass(frozen=True)
class Repeat:
    """Content of the section "repeat". `recorded` is False if versions and machine are those of this computer."""

    command: str
    again: str
    settings: str
    versions: dict[str, str]
    machine: dict[str, Any]
    recorded: bool


def where_time_went(context: TrainingRun) -> Time:
    """Return the shares of the time, from results.json or, for an unfinished run, from timing.jsonl."""
    log = context.log
    if log.results:
        shares = {key: float(log.results["timing"].get(f"share_{key}", 0.0)) for key, _, _ in PARTS}
    else:
        total = log.seconds()
        if not total:
            raise LeaveOut("No timing was logged yet.")
        shares = {
            key: sum(float(line.get(key, 0)) * float(line.get("seconds", 0)) for line in log.timing) / total
            for key, _, _ in PARTS
        }
    total_time = numbers.duration(log.seconds()) if log.results else ""
    return Time([TimeShare(name, shares[key], color) for key, name, color in PARTS], total_time)


def how_to_repeat(context: TrainingRun) -> Repeat:
    """Return the command, the settings, and the versions and machine of the run."""
    path, environment = context.log.folder, context.log.environment
    return Repeat(
        command=str(environment.get("command", "")),
        again=f"nuclr train {path / folder.CONFIG} out={path}-again",
        settings=(path / folder.CONFIG).read_text(encoding="utf-8"),
        versions=environment.get("versions") or versions(),
        machine=environment.get("machine") or machine(),
        recorded="versions" in environment,
    )
