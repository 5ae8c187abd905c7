"""Checkpoints that are either complete or absent.

A checkpoint is written to a temporary name, flushed to disk and renamed. A trailer holds its length and SHA-256, so
that a truncated or damaged file is detected and the checkpoint before it is used. Loading unpickles only tensors and
plain values.
"""

import hashlib
import io
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nuclr import files

MAGIC = b"nuclrCK1"
TRAILER = struct.Struct("<Q32s8s")  # length, digest, magic
BEST = "best.pt"
KEPT = 2


class BadCheckpoint(Exception):  # noqa: N818 (the file is bad, not the program)
    """A file that is not a complete checkpoint; the message says why."""


class _Hashing(io.RawIOBase):
    """A file object that counts and hashes what is written through it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.length, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            written = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.length += written
        return written


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint; an OSError leaves the file that was at `path` before."""
    with files.write_atomically(path) as file:
        sink = _Hashing(file)
        try:
            torch.save(content, sink)  # type: ignore[arg-type]
        except RuntimeError:
            if sink.error is None:
                raise
            # torch replaces the error of a full disk by "unexpected pos".
            raise OSError(sink.error.errno, sink.error.strerror, str(path)) from None
        file.write(TRAILER.pack(sink.length, sink.digest.digest(), MAGIC))


def load(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, on the CPU.

    Raises:
        BadCheckpoint: the file is missing, truncated or damaged.

    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadCheckpoint(error.strerror or "cannot be read") from None
    if len(content) < TRAILER.size:
        raise BadCheckpoint("truncated")
    length, digest, magic = TRAILER.unpack_from(content, len(content) - TRAILER.size)
    body = memoryview(content)[: -TRAILER.size]
    if magic != MAGIC or length != len(body):
        raise BadCheckpoint("truncated")
    if hashlib.sha256(body).digest() != digest:
        raise BadCheckpoint("damaged: the checksum does not match")
    loaded: dict[str, Any] = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
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
            say(f"{path}: {bad}; using the checkpoint before it")
    return None


def save_step(folder: Path, step: int, content: dict[str, Any]) -> None:
    """Write the checkpoint of a step, and keep only the one before it."""
    save(step_path(folder, step), content)
    for path in newest_first(folder)[KEPT:]:
        path.unlink(missing_ok=True)


def mark_best(folder: Path, step: int) -> None:
    """Make `best.pt` the checkpoint of this step."""
    temporary = folder / f".{BEST}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    try:
        os.link(step_path(folder, step), temporary)
    except OSError:  # a file system without hard links
        with files.write_atomically(folder / BEST) as file:
            file.write(step_path(folder, step).read_bytes())
    else:
        temporary.replace(folder / BEST)
