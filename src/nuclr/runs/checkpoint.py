"""Checkpoints that are either complete or absent.

A checkpoint is written to a temporary name, flushed to disk and renamed. It is a zip file with a checksum per member:
a truncated or damaged one is detected, and the checkpoint before it is used. Loading unpickles only tensors and plain
values.
"""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nuclr import files
from nuclr.errors import UserError

BEST = "best.pt"
KEPT = 2


class BadCheckpoint(UserError):  # noqa: N818 (the file is bad, not the program)
    """A file that is not a complete checkpoint; the message names it and says why."""


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint; an OSError leaves the file that was at `path` before."""
    with files.write_atomically(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch may replace the error of a full disk by "unexpected pos"
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, on the CPU.

    Raises:
        BadCheckpoint: the file is missing, truncated or damaged.

    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile raises several types for damaged files
        raise BadCheckpoint(f"{path}: missing, truncated or damaged ({error})") from None
    if damaged is not None:
        raise BadCheckpoint(f"{path}: damaged: the checksum of {damaged} does not match")
    loaded: dict[str, Any] = torch.load(
        path,
        map_location="cpu",
        weights_only=True,
    )
    return loaded


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps of the run."""
    return folder / f"step_{step:09d}.pt"


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of steps, newest first, without the best one."""
    return sorted(folder.glob("step_*.pt"), reverse=True)


def load_last(folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the newest complete checkpoint, or None; incomplete ones are reported through `say`."""
    for path in newest_first(folder):
        try:
            return load(path)
        except BadCheckpoint as bad:
            say(f"{bad}; using the checkpoint before it")
    return None


def save_step(
    folder: Path,
    step: int,
    content: dict[str, Any],
) -> None:
    """Write the checkpoint of a step, and keep only the one before it."""
    save(step_path(folder, step), content)
    for path in newest_first(folder)[KEPT:]:
        path.unlink(missing_ok=True)


def mark_best(folder: Path, step: int) -> None:
    """Make `best.pt` the checkpoint of this step."""
    with step_path(folder, step).open("rb") as saved, files.write_atomically(folder / BEST) as best:
        shutil.copyfileobj(saved, best)
