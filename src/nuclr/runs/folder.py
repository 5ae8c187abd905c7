"""A run on disk: `config.yaml`, `metrics.jsonl`, `timing.jsonl`, `results.json`, `checkpoints/`, `model/`.

Also `environment.json` (command, versions, machine), `bad_samples.jsonl`, `report.html` after the end, and files of the
loggers (`tensorboard/`, `wandb/`, `wandb_id`). The demo's folder also has `seeds/`, with further runs.

metrics.jsonl depends only on the settings. When a run resumes, it is truncated to the position of the checkpoint, so
that in the end it equals the file of a run that never stopped. Measured times are written to timing.jsonl.
"""

import contextlib
import difflib
import fcntl
import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch
import yaml

from nuclr import files
from nuclr.errors import UserError
from nuclr.runs.launch import cpu_cores
from nuclr.runs.settings import flatten

CONFIG, METRICS, TIMING, RESULTS = "config.yaml", "metrics.jsonl", "timing.jsonl", "results.json"
BAD, ENVIRONMENT, CHECKPOINTS, MODEL, LOCK = "bad_samples.jsonl", "environment.json", "checkpoints", "model", ".lock"
SEEDS = "seeds"  # runs of other seeds and methods, which the demo trains at the same time
PACKAGES = ("nuclr", "torch", "transformers", "tokenizers", "kornia", "numpy", "pillow")
# Names and settings of the machine, which a resumed run may change.
FREE_ON_RESUME = {
    "name",
    "out",
    "device",
    "threads",
    "checkpoint_every",
    "report",
    "plugins",
    "data.root",
    "data.allow_outside",
    "data.workers",
    "data.memory",
    "log.tensorboard",
    "log.wandb",
}


def is_run(folder: Path) -> bool:
    """Return whether a run was started in this folder."""
    return (folder / CONFIG).is_file()


def is_finished(folder: Path) -> bool:
    """Return whether the run in this folder came to its end."""
    return (folder / RESULTS).is_file()


def suggest_runs(parent: Path, name: str = "") -> list[Path]:
    """Return up to three runs in a folder, to name in messages.

    Args:
        parent: the folder that holds the runs.
        name: the name of a run that does not exist. Runs with similar names come first, then unfinished ones, then the
            newest.

    """
    runs = [path for path in parent.iterdir() if is_run(path)] if parent.is_dir() else []
    near = difflib.get_close_matches(name, [run.name for run in runs], n=3)

    def order(run: Path) -> tuple[int, bool, float]:
        place = near.index(run.name) if run.name in near else len(near)
        return place, is_finished(run), -(run / CONFIG).stat().st_mtime

    return sorted(runs, key=order)[:3]


def read_results(folder: Path) -> dict[str, Any] | None:
    """Return the content of results.json; None if the run is not finished."""
    if not is_finished(folder):
        return None
    path = folder / RESULTS
    try:
        content = files.parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it, or train again with out=...") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: does not hold the results of a run; restore it, or train again with out=...")
    return content


class RunFolder:
    """The folder of a run in training, locked against a second run; only the first process writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / CHECKPOINTS
        self._lock: IO[str] | None = None
        self._files: dict[str, IO[bytes]] = {}

    def open(self, config: dict[str, Any], resume: bool) -> bool:
        """Lock the folder and check that it is new, or holds the run to resume; return whether it is the latter."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            exists, own = is_run(self.folder), (LOCK, SEEDS)
            if exists and not resume:
                state = "a finished run" if is_finished(self.folder) else "a run"
                hint = "" if is_finished(self.folder) else ", or add --resume to continue it"
                raise UserError(f"{self.folder} already holds {state}; name another folder with out=...{hint}")
            if exists:
                self._check_same(config)
            elif others := [p.name for p in self.folder.iterdir() if p.name not in own and not files.is_temporary(p)]:
                raise UserError(
                    f"{self.folder} is not empty ({others[0]}) and is not a run folder; name another with out=..."
                )
            if not exists:  # first of all, so that a run killed right after this is recognized as one
                files.write_text(self.folder / CONFIG, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
            self.checkpoints.mkdir(exist_ok=True)
            self._remove_temporary()
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"out={self.folder}: there is a file with this name; name a folder") from None
        except OSError as error:
            raise UserError(f"out={self.folder}: cannot be written ({error.strerror}); name another folder") from None
        return exists

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

    def _remove_temporary(self) -> None:
        """Remove what killed processes left while writing. A process that is alive may be writing a report."""
        for path in [*self.folder.iterdir(), *self.checkpoints.iterdir()]:
            if files.is_temporary(path) and not _is_other_process(int(path.name.split(".")[-2])):
                path.unlink(missing_ok=True)

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        files.refuse_large_config(path)
        try:
            content = yaml.safe_load(files.read_text(path))
        except (yaml.YAMLError, ValueError, TypeError, LookupError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: cannot be read; restore it, or start another run with out=...") from None
        if not isinstance(content, dict):
            raise UserError(f"{path}: does not hold the settings of a run; restore it, or start another with out=...")
        return content

    def _check_same(self, config: dict[str, Any]) -> None:
        before = dict(flatten(self._read_config()))
        now = dict(flatten(config))
        for key in sorted(before.keys() | now.keys()):
            is_root = key.startswith("data.val.") and key.endswith(".root")
            if before.get(key) != now.get(key) and key not in FREE_ON_RESUME and not is_root:
                raise UserError(
                    f"{key} is {now.get(key)!r}, but the run in {self.folder} began with {before.get(key)!r}; "
                    "resume it with its own settings, or start another run with out=..."
                )

    def start_logs(self, metrics_bytes: int) -> None:
        """Open the logs; metrics.jsonl is truncated to the length stored in the checkpoint."""
        with (self.folder / METRICS).open("ab") as file:
            file.truncate(metrics_bytes)
        self._files = {name: (self.folder / name).open("ab") for name in (METRICS, TIMING)}

    def log(self, name: str, values: dict[str, Any]) -> None:
        """Append a line to a log."""
        self._files[name].write(json.dumps(values).encode() + b"\n")
        self._files[name].flush()

    def metrics_bytes(self) -> int:
        """Flush metrics.jsonl to disk and return its length."""
        file = self._files[METRICS]
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size

    def finish(self, results: dict[str, Any]) -> None:
        """Write results.json, which marks the run as finished."""
        files.write_text(self.folder / RESULTS, json.dumps(results, indent=1) + "\n")

    def close(self) -> None:
        """Close the logs and release the lock."""
        for file in [*self._files.values(), self._lock]:
            # Every line was flushed when it was written. If that failed, closing fails again, for the same reason.
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()
        self._files, self._lock = {}, None


def _is_other_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


# -- environment -------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Return the command line, the versions that results depend on, and the machine."""
    return {"command": _command(sys.argv), "versions": versions(), "machine": machine()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    numbers = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            numbers[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return numbers


def machine() -> dict[str, Any]:
    """Return system, number of processors and threads, and the accelerator."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": cpu_cores(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def write_environment(folder: Path) -> None:
    """Write environment.json, unless the run that is resumed has one."""
    path = folder / ENVIRONMENT
    if not path.exists():
        files.write_json(path, environment())


def _command(arguments: list[str]) -> str:
    program = Path(arguments[0]).name
    return shlex.join(["nuclr" if program in ("nuclr", "__main__.py") else program, *arguments[1:]])
