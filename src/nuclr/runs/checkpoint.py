"""Checkpoints that are either whole or not there.

Written to a temporary name, flushed to the disk, then renamed. A trailer holds the length and the SHA-256 of what was
written, so that a file which lost its end (a full disk, a machine that went down) is recognized, and the one before it
is used. Loading unpickles nothing but tensors and plain values.
"""

import hashlib
import io
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

MAGIC = b"nuclrCK1"
TRAILER = struct.Struct("<Q32s8s")  # length, digest, magic
BEST = "best.pt"
KEPT = 2


class BadCheckpoint(Exception):  # noqa: N818 (the file is bad; the program is not in error)
    """A file that is no whole checkpoint, and why."""


class _Hashing(io.RawIOBase):
    """A file to write to that counts and hashes on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.length, self.digest = file, 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        written = self.file.write(data)
        self.length += written
        return written


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint; an OSError leaves whatever was at `path` before."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            sink = _Hashing(file)
            torch.save(content, sink)  # type: ignore[arg-type]
            file.write(TRAILER.pack(sink.length, sink.digest.digest(), MAGIC))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except RuntimeError as error:  # torch's writer reports a full disk so
        raise OSError(f"{path}: {str(error).splitlines()[0]}") from None
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote, on the CPU."""
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
        raise BadCheckpoint("damaged: its checksum does not agree")
    loaded: dict[str, Any] = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    return loaded


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps of the run is."""
    return folder / f"step_{step:09d}.pt"


def newest_first(folder: Path) -> list[Path]:
    """Checkpoints by step, the newest first; not the best."""
    return sorted(folder.glob("step_*.pt"), reverse=True)


def load_last(folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest whole checkpoint; `say` is told of those that are not. None where there is none at all."""
    for path in newest_first(folder):
        try:
            return load(path)
        except BadCheckpoint as bad:
            say(f"{path}: {bad}; going back to the checkpoint before it")
    return None


def save_step(folder: Path, step: int, content: dict[str, Any]) -> None:
    """Write the checkpoint of a step and keep the one before it, no more."""
    save(step_path(folder, step), content)
    for path in newest_first(folder)[KEPT:]:
        path.unlink(missing_ok=True)


def mark_best(folder: Path, step: int) -> None:
    """Let `best.pt` be the checkpoint of this step."""
    temporary = folder / f".{BEST}.tmp"
    temporary.unlink(missing_ok=True)
    try:
        os.link(step_path(folder, step), temporary)
    except OSError:  # a file system without links
        save(temporary, load(step_path(folder, step)))
    temporary.replace(folder / BEST)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last; not every file system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
