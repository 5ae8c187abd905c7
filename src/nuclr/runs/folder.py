"""A run on disk: `config.yaml`, `metrics.jsonl`, `timing.jsonl`, `results.json`, `checkpoints/`, `model/`.

Besides: `environment.json` (command, versions), `bad_samples.jsonl`, `report.html` once it is finished, and what the
loggers keep (`tensorboard/`, `wandb/`, `wandb_id`).

metrics.jsonl holds what depends on the settings alone; on resuming it is cut back to where the checkpoint was, so that
in the end it is the file of a run that never stopped. What a clock says goes to timing.jsonl.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

import yaml

from nuclr.errors import UserError

CONFIG, METRICS, TIMING, RESULTS, BAD = (
    "config.yaml",
    "metrics.jsonl",
    "timing.jsonl",
    "results.json",
    "bad_samples.jsonl",
)
CHECKPOINTS, MODEL, LOCK = "checkpoints", "model", ".lock"
FREE_ON_RESUME = {
    "out",
    "device",
    "threads",
    "checkpoint_every",
    "report",
    "data.root",
    "data.workers",
    "data.memory",
    "log.tensorboard",
    "log.wandb",
}


def is_run(folder: Path) -> bool:
    """Whether a run was begun here."""
    return (folder / CONFIG).is_file()


def is_finished(folder: Path) -> bool:
    """Whether the run here came to its end."""
    return (folder / RESULTS).is_file()


class RunFolder:
    """The folder of a run, locked against a second one; only the first process writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / CHECKPOINTS
        self._lock: IO[str] | None = None
        self._files: dict[str, IO[bytes]] = {}

    def open(self, config: dict[str, Any], resume: bool) -> bool:
        """Lock it and see that it is new, or the run to go on with; returns whether it is the latter."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            before = is_run(self.folder)
            if before and not resume:
                state = "a finished run" if is_finished(self.folder) else "a run"
                hint = "" if is_finished(self.folder) else ", or add --resume to go on with it"
                raise UserError(f"{self.folder} holds {state} already; name another folder with out=...{hint}")
            if before:
                self._check_same(config)
            elif others := [p.name for p in self.folder.iterdir() if p.name not in (LOCK, f".{CONFIG}.tmp")]:
                raise UserError(f"{self.folder} is not empty ({others[0]}) and holds no run; name another with out=...")
            if not before:  # before all else: a run that is killed right here must be known as one
                text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
                self._replace(CONFIG, text)
            self.checkpoints.mkdir(exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"out={self.folder}: a file is in the way; name a folder") from None
        except OSError as error:
            raise UserError(f"out={self.folder}: cannot be written ({error.strerror}); name another folder") from None
        return before

    def _take_lock(self) -> None:
        self._lock = (self.folder / LOCK).open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip()
            raise UserError(
                f"{self.folder}: another run is using it{f' (process {holder})' if holder else ''}"
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()

    def _check_same(self, config: dict[str, Any]) -> None:
        before = dict(_flat(yaml.safe_load((self.folder / CONFIG).read_text(encoding="utf-8"))))
        now = dict(_flat(config))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key) and key not in FREE_ON_RESUME:
                raise UserError(
                    f"{key} is {now.get(key)!r}, but the run in {self.folder} was begun with {before.get(key)!r}; "
                    "resume it with its own settings, or begin another with out=..."
                )

    def start_logs(self, metrics_bytes: int) -> None:
        """Open the logs; metrics.jsonl is cut back to the position that the checkpoint knows."""
        with (self.folder / METRICS).open("ab") as file:
            file.truncate(metrics_bytes)
        self._files = {name: (self.folder / name).open("ab") for name in (METRICS, TIMING)}

    def log(self, name: str, values: dict[str, Any]) -> None:
        """Add a line."""
        self._files[name].write(json.dumps(values).encode() + b"\n")
        self._files[name].flush()

    def metrics_bytes(self) -> int:
        """Length of metrics.jsonl, which is on the disk by then."""
        file = self._files[METRICS]
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size

    def finish(self, results: dict[str, Any]) -> None:
        """Write results.json, which marks the run as done."""
        self._replace(RESULTS, json.dumps(results, indent=1) + "\n")

    def close(self) -> None:
        """Let go of files and lock."""
        for file in [*self._files.values(), self._lock]:
            if file is not None:
                file.close()
        self._files, self._lock = {}, None

    def _replace(self, name: str, text: str) -> None:
        temporary = self.folder / f".{name}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / name)


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        rows += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return rows


def read_results(folder: Path) -> dict[str, Any] | None:
    """What results.json holds; None where the run is not finished."""
    if not is_finished(folder):
        return None
    content: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    return content
