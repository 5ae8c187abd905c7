"""Checkpoints that are either complete or absent.

A checkpoint is written to a temporary name, flushed to disk and renamed. It is a zip file with a checksum per member:
a truncated or damaged one is detected, and the checkpoint before it is used. The same holds for one whose content does
not fit the run: everything is checked before anything is loaded. Loading unpickles only tensors and plain values.
"""

import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from nuclr import files
from nuclr.errors import UserError, first_line

BEST = "best.pt"
KEPT = 2


class BadCheckpoint(UserError):  # noqa: N818 (the file is bad, not the program)
    """A file that is not a complete checkpoint of the run; the message names it and says why."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        version: of nuclr.
        position: the fields of `Position`.
        model: state of the model.
        objective: whole state of the objective, whatever the number of processes.
        optimizer: state of the optimizer.
        window: sums of the logged values since the last line, and the number of steps.
        best: the best value of the metric that chooses the best checkpoint.
        metrics_bytes: length of metrics.jsonl.
        data: hashes of the data, see `data_identity`.

    """

    __pydantic_config__ = {"arbitrary_types_allowed": True}  # noqa: RUF012

    version: str
    position: dict[str, NonNegativeInt]
    model: dict[str, Tensor]
    objective: dict[str, Tensor]
    optimizer: dict[str, Any]
    window: dict[str, Any]
    best: float
    metrics_bytes: NonNegativeInt
    data: dict[str, dict[str, str]]


def save(path: Path, content: Checkpoint) -> None:
    """Write a checkpoint; an OSError leaves the file that was at `path` before."""
    with files.write_atomically(path) as file:
        try:
            torch.save(vars(content), file)
        except RuntimeError as error:  # torch may replace the error of a full disk by "unexpected pos"
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load(path: Path, check: Callable[[Checkpoint], object] = lambda _: None) -> Checkpoint:
    """Return the content of a checkpoint, on the CPU.

    Args:
        path: the file, which is not trusted.
        check: raises any exception if the content does not fit the run; a UserError is passed on.

    Raises:
        BadCheckpoint: the file is missing, truncated, damaged or does not fit.

    """
    try:
        with files.open_regular(path) as file:
            with zipfile.ZipFile(file) as archive:
                expanded = sum(member.file_size for member in archive.infolist())
                if expanded > os.fstat(file.fileno()).st_size:
                    raise ValueError("it expands to more than its size")
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} does not match")
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
        saved = files.from_record(Checkpoint, content)
        for name, tensor in [*saved.model.items(), *saved.objective.items()]:
            check_tensor(name, tensor)
        check(saved)
    except UserError:
        raise
    except Exception as error:  # zipfile, torch and what checks the content raise many types
        raise BadCheckpoint(
            f"{path}: missing, damaged, or not a checkpoint of this run ({first_line(error)})"
        ) from None
    return saved


def check_tensor(name: str, tensor: Any, like: Tensor | None = None) -> None:
    """Raise a ValueError if a loaded object is not a plain tensor of numbers, or not like another one.

    Args:
        name: for the message.
        tensor: the loaded object.
        like: a tensor of the same shape and type. None: of any.

    """
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ValueError(f"{name} is not a tensor")
    if like is not None and (tensor.shape != like.shape or tensor.dtype != like.dtype or bool(tensor.isnan().any())):
        raise ValueError(f"{name} has another shape or type, or is not a number")
    # a forged view may repeat a number without end
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(f"{name} is larger than its storage")


def check_state(saved: Mapping[str, Any], now: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a loaded state does not have the names, shapes and types of the present one."""
    if saved.keys() != now.keys():
        raise ValueError(f"{min(saved.keys() ^ now.keys())} does not belong to it, or is missing")
    for name, tensor in saved.items():
        check_tensor(name, tensor, now[name])


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps of the run."""
    return folder / f"step_{step:09d}.pt"


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of steps, newest first, without the best one."""
    return sorted(folder.glob("step_*.pt"), reverse=True)


def load_last(
    folder: Path,
    say: Callable[[str], None],
    check: Callable[[Checkpoint], object] = lambda _: None,
) -> Checkpoint | None:
    """Return the newest good checkpoint; bad ones are reported through `say`. None if there is no checkpoint yet.

    Raises:
        BadCheckpoint: none of them is good.

    """
    paths = newest_first(folder)
    for path in paths:
        try:
            return load(path, check)
        except BadCheckpoint as bad:
            if path == paths[-1]:
                raise BadCheckpoint(f"{bad}; none is left: remove {folder} to start from the beginning") from None
            say(f"{bad}; using the checkpoint before it")
    return None


def save_step(
    folder: Path,
    step: int,
    content: Checkpoint,
) -> None:
    """Write the checkpoint of a step, and keep only the one before it."""
    save(step_path(folder, step), content)
    for path in newest_first(folder)[KEPT:]:
        path.unlink(missing_ok=True)


def mark_best(folder: Path, step: int) -> None:
    """Make `best.pt` the checkpoint of this step."""
    with step_path(folder, step).open("rb") as saved, files.write_atomically(folder / BEST) as best:
        shutil.copyfileobj(saved, best)
