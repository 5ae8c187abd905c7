"""Local copies of remote files: a folder of limited size that several processes share.

The folder is `$NUCLR_CACHE/remote`, by default `$XDG_CACHE_HOME/nuclr/remote` (`~/.cache/nuclr/remote`), and holds at
most `NUCLR_CACHE_SIZE` bytes of files (50 GB by default). Every version of a file has a folder, named by a hash of the
URL, the size and the ETag or modification time, so a file that changed at the server is downloaded again:

    lock                    held while space is counted and made
    leases/PID-RANDOM       the files that a process uses; it holds a lock on it until it ends, in whatever way
    KEY/lock                held while the file is downloaded; other processes wait for it
    KEY/data/NAME           the file
    KEY/entry.json          its name and size; the time of entry.json is that of the last use

A process first writes what it needs into its lease, which reserves the space, and removes files that no lease names,
those that were not used for the longest time first. Then it downloads what is missing. What a killed process left is
removed when space is counted the next time.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from nuclr.errors import UserError
from nuclr.files import parse_json, write_atomically, write_json
from nuclr.remote.transfer import (
    Cancelled,
    RemoteFile,
    read_chunks,
    refuse_forbidden,
    requests_forbidden,
    shown,
    stat_file,
)

DEFAULT_SIZE = 50 * 10**9
TRANSFERS = 4  # at the same time
QUESTIONS = 16  # to servers, at the same time
LARGE = 10**8  # bytes; a larger download is announced
POLL_SECONDS = 0.05

_ENTRY, _DATA = "entry.json", "data"
_KEY = re.compile("[0-9a-f]{32}")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

T = TypeVar("T")
R = TypeVar("R")

# Files that this process has got: local path -> URL as messages show it, and URL -> local path.
_urls: dict[str, str] = {}
_copies: dict[str, Path] = {}


def local_copy(url: str) -> Path:
    """Return a local copy of the file at a URL.

    Args:
        url: such as "s3://bucket/train.npz".

    Returns:
        The path of the copy. It has the name of the file, and stays until this process ends.

    Raises:
        UserError: as `local_copies`.

    Example:
        >>> local_copy("s3://bucket/data/train.npz").name  # doctest: +SKIP
        'train.npz'

    """
    return local_copies([url])[0]


def local_copies(urls: Sequence[str]) -> list[Path]:
    """Return local copies of the files at URLs; what is not in the cache yet is downloaded.

    Args:
        urls: the URLs. All files must fit into the cache together.

    Returns:
        The paths of the copies, in the order of the URLs.

    Raises:
        UserError: if a file does not exist, cannot be downloaded, or the files do not fit into the cache or on the
            disk.

    """
    different = list(dict.fromkeys(urls))
    if requests_forbidden() and all(url in _copies for url in different):
        return [_copies[url] for url in urls]
    for url in different:
        refuse_forbidden(url)
    files = dict(zip(different, _in_threads(stat_file, different, QUESTIONS), strict=True))
    cache = Cache(_folder(), _limit())
    cache.provide(list(files.values()))
    for url, file in files.items():
        _copies[url] = cache.path(file)
        _urls[str(_copies[url])] = shown(url)
        _urls[str(_copies[url].parent)] = shown(url).rpartition("/")[0]
    return [_copies[url] for url in urls]


@contextlib.contextmanager
def show_urls() -> Iterator[None]:
    """Name the URLs instead of the local copies in a UserError of the block."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for path, url in sorted(_urls.items(), key=lambda item: -len(item[0])):  # files before their folders
            message = message.replace(path, url)
        if message == str(error):
            raise
        raise UserError(message) from None


class Cache:
    """The folder of copies.

    Args:
        folder: the folder; it is created.
        limit: most bytes of all files together.

    Raises:
        UserError: if the folder cannot be written.

    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        try:
            (folder / "leases").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror}); set NUCLR_CACHE to a folder") from None

    def path(self, file: RemoteFile) -> Path:
        """Return the path of a file's copy."""
        return self.folder / file.key / _DATA / file.name

    def provide(self, files: Sequence[RemoteFile]) -> None:
        """Download the files that are missing, and keep all of them until this process ends.

        Raises:
            UserError: if a file cannot be downloaded, or they do not fit.

        """
        needed = {file.key: file.size for file in files}
        try:
            with _locked(self.folder / "lock"):
                lease = _Lease.of_process(self.folder / "leases")
                before = dict(lease.files)
                self._make_room(needed, before | lease.others())
                lease.write(before | needed)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be used as a cache ({error.strerror}); set NUCLR_CACHE") from None
        missing = [file for file in files if not self._has(file)]
        self._announce(missing)
        try:
            _in_threads(self._get, files, TRANSFERS)
        except BaseException:
            with contextlib.suppress(OSError), _locked(self.folder / "lock"):
                lease.write({key: size for key, size in lease.files.items() if key in before or key not in needed})
            raise

    # -- space ---------------------------------------------------------------------------------------------------------

    def _make_room(self, needed: Mapping[str, int], in_use: Mapping[str, int]) -> None:
        """Remove copies until the needed files fit. The caller holds the lock."""
        entries = self._entries()
        kept = {**in_use, **needed}
        for folder in self.folder.iterdir():  # what killed processes left
            if _KEY.fullmatch(folder.name) and folder.name not in entries and folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        total = sum(kept.values())
        if total > self.limit:
            used = total - sum(needed.values())
            others = f", of which {_bytes(used)} are in use" if used else ""
            raise UserError(
                f"{_count(len(needed))} of {_bytes(sum(needed.values()))} in total must fit into the cache, which has "
                f"{_bytes(self.limit)}{others}; raise NUCLR_CACHE_SIZE, or copy the data to a local folder"
            )
        missing = sum(size - self._received(key) for key, size in kept.items() if key not in entries)
        excess = total - self.limit
        old = sorted((entry for key, entry in entries.items() if key not in kept), key=lambda entry: entry.last_use)
        excess += sum(entry.size for entry in old)
        for entry in old:
            free = shutil.disk_usage(self.folder).free
            if excess <= 0 and missing <= free:
                break
            shutil.rmtree(entry.folder, ignore_errors=True)
            excess -= entry.size
        free = shutil.disk_usage(self.folder).free
        if missing > free:
            raise UserError(
                f"{self.folder}: {_bytes(missing)} are to be downloaded, but only {_bytes(free)} are free on the disk; "
                "make room, or set NUCLR_CACHE to a folder on another disk"
            )

    def _entries(self) -> dict[str, "_Entry"]:
        entries = {}
        for folder in self.folder.iterdir():
            entry = _read_entry(folder) if _KEY.fullmatch(folder.name) else None
            if entry is not None:
                entries[folder.name] = entry
        return entries

    def _received(self, key: str) -> int:
        """Return how much of a file has been downloaded so far."""
        total = 0
        with contextlib.suppress(OSError):
            for path in (self.folder / key / _DATA).glob(".*.tmp"):
                total += path.stat().st_size
        return total

    def _announce(self, missing: Sequence[RemoteFile]) -> None:
        total = sum(file.size for file in missing)
        if total > LARGE and os.environ.get("RANK", "0") == "0":  # of torchrun
            sys.stderr.write(f"nuclr: downloading {_count(len(missing))}, {_bytes(total)}, to {self.folder}\n")
            sys.stderr.flush()

    # -- files ---------------------------------------------------------------------------------------------------------

    def _has(self, file: RemoteFile) -> bool:
        entry = _read_entry(self.folder / file.key)
        return entry is not None and entry.size == file.size and entry.name == file.name

    def _get(self, file: RemoteFile, stop: threading.Event) -> None:
        """Make sure that a file is there: by another process, or by a download."""
        folder = self.folder / file.key
        try:
            (folder / _DATA).mkdir(parents=True, exist_ok=True)
            with _locked(folder / "lock", stop):
                if not self._has(file):
                    for path in (folder / _DATA).glob(".*.tmp"):  # of a process that was killed
                        path.unlink(missing_ok=True)
                    self._download(file, stop)
            os.utime(folder / _ENTRY)
        except OSError as error:
            problem = f"{shown(file.url)}: the copy in {folder} cannot be written ({error.strerror})"
            raise UserError(f"{problem}; make room, or set NUCLR_CACHE to another folder") from None

    def _download(self, file: RemoteFile, stop: threading.Event) -> None:
        with write_atomically(self.path(file)) as target:
            end = 0
            for position, data in read_chunks(file, stop):
                if position != end:  # the server began again
                    target.seek(position)
                    target.truncate()
                target.write(data)
                end = position + len(data)
        if stat_file(file.url, stop) != file:
            raise UserError(f"{shown(file.url)}: changed while it was being downloaded; start again")
        write_json(self.folder / file.key / _ENTRY, {"url": shown(file.url), "name": file.name, "size": file.size})


@dataclass(frozen=True)
class _Entry:
    """A complete copy."""

    folder: Path
    name: str
    size: int
    last_use: float


def _read_entry(folder: Path) -> _Entry | None:
    """Return the copy in a folder, or None if it is not there or not complete."""
    path = folder / _ENTRY
    try:
        content = parse_json(path.read_bytes())
        name, size = content["name"], content["size"]
        if Path(name).name != name or (folder / _DATA / name).stat().st_size != size:
            return None
        return _Entry(folder, name, size, path.stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return None


class _Lease:
    """The files that this process uses, in a file that is locked as long as the process lives."""

    _mine: dict[Path, "_Lease"] = {}  # noqa: RUF012 (one per folder and process)

    def __init__(self, folder: Path) -> None:
        self.folder, self.pid, self.files = folder, os.getpid(), dict[str, int]()
        self.path = folder / f"{self.pid}-{secrets.token_hex(4)}"
        self._file: IO[str] = self.path.open("w", encoding="utf-8")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def of_process(cls, folder: Path) -> "_Lease":
        """Return the lease of this process. The caller holds the lock of the cache, as for all methods."""
        lease = cls._mine.get(folder)
        # A forked process needs one of its own. The folder may have been deleted meanwhile.
        if lease is None or lease.pid != os.getpid() or not lease.path.exists():
            lease = cls._mine[folder] = cls(folder)
        return lease

    def write(self, files: dict[str, int]) -> None:
        """Replace the files of the lease: key -> size."""
        self.files = files
        self._file.seek(0)
        self._file.truncate()
        json.dump(files, self._file)
        self._file.flush()

    def others(self) -> dict[str, int]:
        """Return the files that other processes use, and remove the leases of processes that have ended."""
        files: dict[str, int] = {}
        for path in self.folder.iterdir():
            if path == self.path:
                continue
            try:
                with path.open(encoding="utf-8") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        content = parse_json(file.read() or "{}")
                        files |= {key: size for key, size in content.items() if isinstance(size, int)}
                        continue
                path.unlink(missing_ok=True)
            except (FileNotFoundError, ValueError, AttributeError):
                continue
        return files


@contextlib.contextmanager
def _locked(path: Path, stop: threading.Event | None = None) -> Iterator[None]:
    """Hold a lock on a file during the block.

    Raises:
        Cancelled: if `stop` is set while waiting.

    """
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop is not None and stop.wait(POLL_SECONDS):
                    raise Cancelled from None
                if stop is None:
                    time.sleep(POLL_SECONDS)
        yield


def _in_threads(function: Callable[[T, threading.Event], R], items: Sequence[T], threads: int) -> list[R]:
    """Return `function(item, stop)` of all items, in their order; the first error stops the others."""
    stop = threading.Event()
    with ThreadPoolExecutor(max(1, min(threads, len(items))), thread_name_prefix="nuclr-remote") as pool:
        tasks = [pool.submit(function, item, stop) for item in items]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:  # also after Ctrl-C
            unfinished = [task for task in tasks if not task.done() or task.exception() is not None]
            if unfinished:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Cancelled)):
        raise error
    return [task.result() for task in tasks]


# -- settings ----------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nuclr"
    return Path(os.environ.get("NUCLR_CACHE") or user).absolute() / "remote"


def _limit() -> int:
    text = os.environ.get("NUCLR_CACHE_SIZE", "").strip()
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]?i?)b?", text.lower())
    if text and (match is None or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 1):
        raise UserError(f"NUCLR_CACHE_SIZE is {text!r}; it needs a number of bytes, such as 200GB or 50GiB")
    return int(float(match[1]) * _UNITS[match[2]]) if match else DEFAULT_SIZE


def _bytes(number: int) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000  # type: ignore[assignment]
    return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"


def _count(files: int) -> str:
    return f"{files:,} files" if files != 1 else "1 file"
