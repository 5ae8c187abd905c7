"""A run on disk: `config.yaml`, `metrics.jsonl`, `timing.jsonl`, `results.json`, `checkpoints/`, `model/`.

Also `environment.json` (command, versions, machine), `bad_samples.jsonl`, `report.html` after the end, and files of the
loggers (`tensorboard/`, `wandb/`, `wandb_id`). The demo's folder also has `seeds/`, with further runs.

metrics.jsonl depends only on the settings. When a run resumes, it is truncated to the position of the checkpoint, so
that in the end it equals the file of a run that never stopped. Measured times are written to timing.jsonl.
"""

import contextlib
import json
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any

import pydantic
import torch

from nuclr import files
from nuclr.errors import UserError
from nuclr.runs.config import parse, read, to_yaml
from nuclr.runs.launch import cpu_cores
from nuclr.runs.settings import FREE_ON_RESUME, Settings, flatten, to_dict

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
RESULTS = "results.json"
BAD = "bad_samples.jsonl"
ENVIRONMENT = "environment.json"
CHECKPOINTS = "checkpoints"
MODEL = "model"
SEEDS = "seeds"  # runs of other seeds and methods, which the demo trains at the same time
PACKAGES = ("nuclr", "torch", "transformers", "tokenizers", "kornia", "numpy", "PIL")


def is_finished(folder: Path) -> bool:
    """Return whether the run in this folder came to its end."""
    return (folder / RESULTS).is_file()


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A finished run: the content of its results.json.

    Attributes:
        folder: the folder of the run; `nuclr.runs.run.Run.open` reads the model and the data from it.
        name: the setting `name`.
        objective: name of the objective.
        temperature: the temperature at the end.
        steps: number of steps.
        epochs: number of epochs.
        batch_size: pairs per step, over all processes.
        processes: number of processes.
        pairs: number of training pairs, with bad ones.
        sides: the names of both sides.
        samples_per_epoch: pairs, or groups of pairs, that an epoch visits.
        left_over_per_epoch: how many of them do not fill a batch.
        bad_samples: number of training pairs that were left out.
        parameters: number of parameters trained.
        val: metrics at the end on the held-out pairs and classes; fractions.
        best: the best value of the metric that chooses the best checkpoint; None if nothing was measured.
        protocol: how the metrics are defined.
        timing: seconds, samples per second and the share of each part; of the last start, if the run was resumed.

    """

    folder: Path = field(compare=False)
    name: str
    objective: str
    temperature: Annotated[float, pydantic.Field(ge=1e-6, le=1e6)]
    steps: int
    epochs: int
    batch_size: int
    processes: int
    pairs: int
    sides: tuple[str, str]
    samples_per_epoch: int
    left_over_per_epoch: int
    bad_samples: int
    parameters: int
    val: dict[str, float]
    best: float | None = None
    protocol: str
    timing: dict[str, float]


def read_results(folder: Path) -> TrainedRun | None:
    """Return the content of results.json; None if the run is not finished."""
    return files.read_record(TrainedRun, folder / RESULTS, folder=folder) if is_finished(folder) else None


def read_lines(
    path: Path,
    required: set[str],
    notes: list[str],
) -> list[dict[str, float]]:
    """Read the numbers in the lines of a log. Broken lines, as a killed process may leave, become a note.

    Args:
        path: the file; if it does not exist, there are no lines.
        required: names that each line has.
        notes: where the note is added.

    """
    records = []
    broken = 0
    content = path.read_bytes() if path.is_file() else b""
    for line in content.splitlines():
        try:
            record: dict[str, float] = files.from_record(dict[str, float], files.parse_json(line))
        except ValueError:
            record = {}
        if required <= record.keys():
            records.append(record)
        else:
            broken += 1
    if broken:
        notes.append(f"{path.name}: {broken} lines could not be read and were left out.")
    return records


class RunFolder:
    """The folder of a run in training, locked against a second run; only the first process writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / CHECKPOINTS
        self._lock: IO[str] | None = None
        self._files: dict[str, IO[bytes]] = {}

    def open(self, settings: Settings, resume: bool) -> bool:
        """Lock the folder and check that it is new, or holds the run to resume; return whether it is the latter."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = files.take_lock(self.folder, "run")
            exists = files.is_run(self.folder)
            if not exists:  # first of all, so that a run killed right after this is recognized as one
                self._write_config(settings)
            elif resume:
                self._check_same(settings)
            else:
                hint = "" if is_finished(self.folder) else ", or add --resume to continue it"
                raise UserError(f"{self.folder} already holds a run; name another folder with out=...{hint}")
            self.checkpoints.mkdir(exist_ok=True)
            files.remove_temporaries(self.folder)
            files.remove_temporaries(self.checkpoints)
        except OSError as error:
            raise UserError(f"out={self.folder}: cannot be written ({error.strerror}); name another folder") from None
        return exists

    def _write_config(self, settings: Settings) -> None:
        for path in self.folder.iterdir():
            if path.name not in (files.LOCK, SEEDS) and not files.is_temporary(path):
                raise UserError(
                    f"{self.folder} is not empty ({path.name}) and is not a run folder; name another with out=..."
                )
        files.write_text(self.folder / CONFIG, to_yaml(settings))

    def _check_same(self, settings: Settings) -> None:
        path = self.folder / CONFIG
        # Settings that an earlier version did not have get their defaults.
        before = dict(flatten(to_dict(parse(read(path), f"{path}: "))))
        now = dict(flatten(to_dict(settings)))
        for key in sorted(before.keys() | now.keys()):
            is_root = key.startswith("data.val.") and key.endswith(".root")
            if before.get(key) != now.get(key) and key not in FREE_ON_RESUME and not is_root:
                raise UserError(
                    f"{key} is {now.get(key)!r}, but the run in {self.folder} began with {before.get(key)!r}; "
                    "resume it with its own settings, or start another run with out=..."
                )

    def start_logs(self, metrics_bytes: int) -> None:
        """Open the logs; metrics.jsonl is truncated to the length stored in the checkpoint, if it is longer."""
        self._files = {name: (self.folder / name).open("ab") for name in (METRICS, TIMING)}
        self._files[METRICS].truncate(min(metrics_bytes, self._files[METRICS].tell()))

    def log(self, name: str, values: dict[str, Any]) -> None:
        """Append a line to a log."""
        self._files[name].write(json.dumps(values).encode() + b"\n")
        self._files[name].flush()

    def metrics_bytes(self) -> int:
        """Flush metrics.jsonl, whose lines are written at once, to disk and return its length."""
        file = self._files[METRICS].fileno()
        os.fsync(file)
        return os.fstat(file).st_size

    def finish(self, results: TrainedRun) -> None:
        """Write results.json, which marks the run as finished."""
        files.write_text(self.folder / RESULTS, json.dumps(files.to_record(results), indent=1) + "\n")

    def close(self) -> None:
        """Close the logs and release the lock."""
        for file in [*self._files.values(), self._lock]:
            # Every line was flushed when it was written. If that failed, closing fails again, for the same reason.
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()
        self._files = {}
        self._lock = None


def environment() -> dict[str, Any]:
    """Return the command line, the versions that results depend on, and the machine."""
    versions = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": cpu_cores(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {
        "command": files.command_line(),
        "versions": {"python": platform.python_version(), **versions},
        "machine": machine,
    }


def write_environment(folder: Path) -> None:
    """Write environment.json, unless the run that is resumed has one."""
    path = folder / ENVIRONMENT
    if not path.exists():
        files.write_json(path, environment())
