"""The files of a run -> plain data. Nothing here needs a model, and a missing or broken file is only a note."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nuclr.errors import UserError
from nuclr.runs import checkpoint, folder
from nuclr.runs.folder import ENVIRONMENT

BASELINE_FOLDERS = ("sogclr",)


@dataclass(frozen=True)
class RunLog:
    """A training run as its folder tells it; `results` is None for one that did not come to its end.

    `baseline` is the run that it was trained beside (the demo has one), `demo` what demo.json holds.
    """

    folder: Path
    config: dict[str, Any]
    results: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    bad: list[dict[str, Any]]
    environment: dict[str, Any]
    demo: dict[str, Any] | None = None
    baseline: "RunLog | None" = None
    notes: list[str] = field(default_factory=list)

    @property
    def method(self) -> str:
        """Its objective by the name people use."""
        return METHODS.get(self.config["objective"]["name"], self.config["objective"]["name"])

    def step(self) -> int:
        """How many steps are done, as far as the folder tells."""
        logged = max((int(line["step"]) for line in self.metrics), default=0)
        saved = checkpoint.newest_first(self.folder / folder.CHECKPOINTS)
        return max([logged, *(int(path.stem.removeprefix("step_")) for path in saved)])

    def last(self, prefix: str = "val/") -> dict[str, float]:
        """The numbers of the last evaluation."""
        for line in reversed(self.metrics):
            found = {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}
            if found:
                return found
        return {}


METHODS = {
    "clip": "CLIP",
    "siglip": "SigLIP",
    "dcl": "DCL",
    "cyclip": "CyCLIP",
    "sogclr": "SogCLR",
    "isogclr": "iSogCLR",
    "nuclr": "NUCLR",
}


def read_run(path: Path, alone: bool = False) -> RunLog:
    """Read the folder; with its baseline unless `alone`."""
    try:
        config = yaml.safe_load((path / folder.CONFIG).read_text(encoding="utf-8"))
        if not all(isinstance(config[part], dict) for part in ("objective", "data", "schedule", "model")):
            raise TypeError("parts are missing")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"{path / folder.CONFIG}: cannot be read as the settings of a run ({error})") from None
    notes: list[str] = []
    demo = None if alone else _read_json(path / "demo.json", notes)
    baseline = None
    for name in () if alone else BASELINE_FOLDERS:
        if folder.is_run(path / name):
            baseline = read_run(path / name, alone=True)
    return RunLog(
        folder=path,
        config=config,
        results=_read_json(path / folder.RESULTS, notes),
        metrics=[line for line in read_lines(path / folder.METRICS, notes) if "step" in line],
        timing=read_lines(path / folder.TIMING, notes),
        bad=read_lines(path / folder.BAD, notes),
        environment=_read_json(path / ENVIRONMENT, notes) or {},
        demo=demo,
        baseline=baseline,
        notes=notes,
    )


def read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The objects of a .jsonl; lines that are none, as a kill may leave one, are left out and noted."""
    found, broken = [], 0
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in content.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            broken += bool(line.strip())
    if broken:
        notes.append(f"Lines of {path.name} that could not be read, and are left out: {broken}.")
    return found


def _read_json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        notes.append(f"{path.name} could not be read.")
        return None
    return content if isinstance(content, dict) else None


def curve(lines: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Epochs and values of all lines that have this key."""
    rows = [line for line in lines if isinstance(line.get(key), int | float) and "epoch" in line]
    return [float(line["epoch"]) for line in rows], [float(line[key]) for line in rows]
