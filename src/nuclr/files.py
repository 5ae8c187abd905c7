"""Read text, JSON and arrays from untrusted files, write files atomically, find cache folders, check output folders.

A result is a frozen dataclass; `to_record` and `read_record` write it to a JSON file and read it back.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import glob
import io
import json
import math
import os
import re
import secrets
import shlex
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

import numpy as np

from nuclr.errors import UserError, first_line

# Content of more than _LARGE bytes in memory is refused if it is over _MOST_COMPRESSION times its size in the file.
_LARGE = 2**28
_MOST_COMPRESSION = 100
_WIDEST = 2**20  # columns of an array without rows
_PAGE = "report.html"  # of every command
LOCK = ".lock"
ARRAYS = "numeric arrays"
_NUMBER = re.compile(r"[+-](inf|\d*\.?\d+(e[+-]?\d+)?)", re.IGNORECASE)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")

T = TypeVar("T")


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file, without a byte-order mark.

    Args:
        path: the file to read.

    Returns:
        The whole text.

    Raises:
        UserError: if the file cannot be read, or is not UTF-8.

    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise not_utf8(path) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file, as `read_text` reads it.

    A line ends with a line feed, with or without a carriage return. `str.splitlines` would also split a text at
    characters such as U+2028, which JSON lines and captions may contain.

    Args:
        path: the file to read.

    Raises:
        UserError: if the file cannot be read, or is not UTF-8.

    """
    lines = read_text(path).split("\n")
    return lines if lines[-1] else lines[:-1]


def not_utf8(path: Path) -> UserError:
    """Return the error for a text file that is not UTF-8.

    Args:
        path: the file.

    Returns:
        An error to raise. Its message shows a command that converts the file.

    """
    converted = shlex.quote(str(path.with_name(f"{path.stem}-utf8{path.suffix}")))
    return UserError(
        f"{path}: not UTF-8 text; convert it, such as from Windows-1252: "
        f"iconv -f WINDOWS-1252 -t UTF-8 {shlex.quote(str(path))} > {converted}"
    )


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from an untrusted file: whatever is wrong with it is a JSONDecodeError.

    `json.loads` raises a RecursionError for brackets nested thousands deep, a ValueError for numbers of more than 4,300
    digits and a UnicodeDecodeError for bytes that are not UTF-8.

    Args:
        text: the whole document.

    Returns:
        Its content.

    Raises:
        json.JSONDecodeError: if it cannot be parsed. It is a ValueError with `msg`, `lineno` and `colno`.

    Example:
        >>> parse_json('{"a": [1, 2]}')
        {'a': [1, 2]}
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
        json.decoder.JSONDecodeError: not UTF-8, nested too deep, or a number too long: line 1 column 1 (char 0)

    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError):
        raise json.JSONDecodeError("not UTF-8, nested too deep, or a number too long", "", 0) from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON document.

    Raises:
        UserError: if the file cannot be read, or is not JSON.

    """
    try:
        return parse_json(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from None


def open_regular(path: Path) -> BinaryIO:
    """Open an untrusted file for reading. A pipe would wait forever and a device has no end, so both are refused.

    Raises:
        OSError: if it cannot be opened, or is not a regular file.

    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_bytes(path: Path, most: float = math.inf) -> bytes:
    """Return the content of an untrusted file, which must be a regular one.

    Args:
        path: the file.
        most: its largest size in bytes.

    Raises:
        OSError: if it cannot be read, is not a regular file, or is larger.

    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"more than {most / 2**20:,.0f} MiB", str(path))
        return file.read()


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in an untrusted JSON file; an empty one if the file is missing, damaged or holds no object."""
    with contextlib.suppress(OSError, ValueError):
        content = parse_json(read_bytes(path))
        if isinstance(content, dict):
            return content
    return {}


def read_npz(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Read numeric arrays from an untrusted `.npz` file. Nothing is unpickled.

    The size of an array in its header is compared with the size of the file before memory is allocated.

    Args:
        path: the file.
        names: the arrays to read, if they exist. Others may hold text or objects and are not read.

    Returns:
        All arrays by name; those that were not asked for are empty.

    Raises:
        UserError: if the file cannot be read, or one of `names` is damaged or does not hold numbers.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(Path(folder, "a.npz"), x=np.arange(3), note="text")
        ...     read_npz(Path(folder, "a.npz"), ["x"])
        {'x': array([0, 1, 2]), 'note': array([], dtype=float64)}

    """
    arrays = {}
    with readable(path, ARRAYS), open_regular(path) as opened, zipfile.ZipFile(opened) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            arrays[name] = np.empty(0)
            if name in names:
                refuse_expansion(
                    path,
                    member.filename,
                    member.compress_size,
                    member.file_size,
                    "save it without compression (numpy.savez)",
                )
                with archive.open(member) as file:
                    arrays[name] = _read_npy(file, member.file_size)
    return arrays


def npz_sizes(path: Path) -> dict[str, int]:
    """Return the name of each array of an `.npz` file and its bytes when unpacked, without reading the arrays.

    Args:
        path: the file.

    Raises:
        UserError: if the file cannot be read.

    """
    with readable(path, ARRAYS), open_regular(path) as opened, zipfile.ZipFile(opened) as archive:
        return {member.filename.removesuffix(".npy"): member.file_size for member in archive.infolist()}


@contextlib.contextmanager
def readable(where: Path | str, kind: str) -> Iterator[None]:
    """Turn every error of the block into a UserError: what reads a damaged file may raise a dozen types of errors.

    Args:
        where: the file, for the message.
        kind: what it is read as, for the message.

    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where}: cannot be read as {kind} ({first_line(error)})") from None


def refuse_expansion(
    path: Path,
    what: str,
    stored: int,
    expanded: int,
    fix: str,
) -> None:
    """Refuse content that is large and compressed more than features or texts can be.

    Args:
        path: the file.
        what: what expands, such as "x.npy".
        stored: its bytes in the file.
        expanded: its bytes in memory.
        fix: how to store it, if it is right.

    Raises:
        UserError: if it expands too much.

    """
    if expanded > _LARGE and expanded > _MOST_COMPRESSION * max(stored, 1):
        raise UserError(
            f"{path}: {what} expands from {stored / 2**20:.1f} MiB to {expanded / 2**20:,.0f} MiB; "
            f"if that is right, {fix}"
        )


def read_npy(path: Path) -> np.ndarray:
    """Read a numeric array from an untrusted `.npy` file, with the same checks as `read_npz`.

    Raises:
        UserError: if the file cannot be read, is damaged, or does not hold numbers.

    """
    with readable(path, ARRAYS), open_regular(path) as file:
        return _read_npy(file, path.stat().st_size)


def _read_npy(file: IO[bytes], size: int) -> np.ndarray:
    """Read an array after its header has been compared with the size of the file."""
    read_npy_header(file, size)
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def read_npy_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array in the `.npy` format from an untrusted file, which is then at the first number.

    Args:
        file: the open file, or member of an archive.
        size: its bytes, header included.

    Returns:
        The shape, whether the array is stored column by column, and the type of its numbers.

    Raises:
        ValueError: if it is damaged, does not hold numbers, or promises more than the file has.

    """
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, column_major, dtype = read_header(file)
    if dtype.kind not in "biufc":
        raise ValueError(f"holds {dtype}, not numbers")
    # With a width of 0, any number of rows would fit into no bytes; without rows, a width may be larger than the file.
    is_possible = min(shape, default=0) >= 0 and max(shape, default=0) <= max(size, _WIDEST * (0 in shape[:1]))
    if not is_possible or math.prod(shape) * dtype.itemsize > size - file.tell():
        raise ValueError(f"truncated: shape {shape} of {dtype} does not fit into {size} bytes")
    return shape, column_major, dtype


def csv_cell(text: str) -> str:
    """Return a cell of a CSV file that no spreadsheet program runs as a formula.

    Args:
        text: the content. If it starts with =, +, -, @, a tab or a carriage return and is not a number, it gets an
            apostrophe in front.

    Returns:
        The cell.

    Example:
        >>> csv_cell("=1+1"), csv_cell("-0.5"), csv_cell("a cat")
        ("'=1+1", '-0.5', 'a cat')

    """
    is_formula = text.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text


@contextlib.contextmanager
def write_atomically(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` only after it has been written completely.

    The block writes to a temporary file in the same folder, `.NAME.RANDOM.tmp`, which is renamed to `path` when the
    block ends. If the block or the rename fails, the temporary file is removed and whatever was at `path` stays as it
    was. Threads, processes and machines may write the same file at the same time; one of them wins.

    Args:
        path: the file to create or replace. Its folder must exist. A symbolic link stays, and its target is replaced;
            the new file has the permissions of the old one.
        sync: flush the content and the rename to disk, so that they survive a power failure. Use False only for caches
            that can be computed again.

    Yields:
        The open temporary file.

    Raises:
        OSError: if the file cannot be written. The error names `path`, not the temporary file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with write_atomically(Path(folder, "data.bin")) as file:
        ...         _ = file.write(b"abc")
        ...     Path(folder, "data.bin").read_bytes()
        b'abc'

    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            if target.is_file():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # after the rename it does not exist
    if sync:
        _sync_folder(target.parent)


def write_npy(path: Path, array: np.ndarray) -> None:
    """Write an array as `.npy`, atomically (see `write_atomically`).

    numpy.save writes past Python's file object, and does not notice if the disk is full at the last few bytes.

    Raises:
        UserError: if the file cannot be written.

    """
    content = io.BytesIO()
    np.save(content, array)
    with user_errors(path), write_atomically(path) as file:
        file.write(content.getbuffer())


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically (see `write_atomically`).

    Args:
        path: the file to create or replace.
        text: its content. Lone surrogates, which UTF-8 cannot represent, are written as "?".

    Raises:
        OSError: if the file cannot be written.

    """
    with write_atomically(path) as file:
        file.write(text.encode("utf-8", "replace"))


def write_json(path: Path, content: Any) -> None:
    """Write `content` to `path` as indented JSON, atomically (see `write_atomically`).

    Args:
        path: the file to create or replace.
        content: dicts, lists, strings, numbers, booleans and None.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if `content` has a NaN or an infinity, which JSON does not allow. Nothing is written then.

    """
    write_text(
        path,
        json.dumps(
            content,
            indent=1,
            ensure_ascii=False,
            allow_nan=False,
        )
        + "\n",
    )


def to_record(value: Any) -> Any:
    """Return a dataclass as JSON. Fields that are not compared, such as arrays, are left out."""
    if dataclasses.is_dataclass(value):
        kept = [entry.name for entry in dataclasses.fields(value) if entry.compare]
        return {name: to_record(getattr(value, name)) for name in kept}
    if isinstance(value, list | tuple):
        return [to_record(entry) for entry in value]
    if isinstance(value, dict):
        return {key: to_record(entry) for key, entry in value.items()}
    return value


def from_record(kind: Any, value: Any) -> Any:
    """Return the dataclass that `to_record` has written; keys that it does not have are ignored.

    Args:
        kind: a dataclass. If it has fields of other types than JSON's, its `__pydantic_config__` allows them.
        value: the parsed JSON.

    Raises:
        ValueError: if the content does not fit.

    Example:
        >>> Point = dataclasses.make_dataclass("Point", [("x", int), ("label", str | None, None)])
        >>> from_record(Point, {"x": 3, "written_by": "nuclr"})
        Point(x=3, label=None)

    """
    return _reader(kind).validate_python(value)


@functools.cache
def _reader(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def read_record(kind: type[T], path: Path, **more: Any) -> T:
    """Return the dataclass whose record is in a JSON file.

    Args:
        kind: the dataclass.
        path: the file.
        more: fields that are not in the file.

    Raises:
        UserError: if the file is damaged, or was written by another version.

    """
    try:
        return from_record(kind, parse_json(read_bytes(path)) | more)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: damaged, or of another version; run its command again ({first_line(error)})"
        ) from None


def is_temporary(path: Path) -> bool:
    """Return whether `path` has the name of a temporary file of `write_atomically`.

    Such a file remains if its process was killed while writing. It can be ignored, and removed if no process writes to
    the folder.
    """
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_temporaries(folder: Path) -> None:
    """Remove what processes left that were killed while writing; the caller has locked the folder.

    Pages are left out, because a page may be written without the lock.
    """
    for path in folder.iterdir():
        if is_temporary(path) and not path.name.startswith(f".{Path(_PAGE).stem}."):
            path.unlink(missing_ok=True)


def file_stamp(path: Path) -> list[int]:
    """Return the size and modification time of a file, to detect changes. JSON stores both exactly."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def find_cache_folder(data_folder: Path) -> Path | None:
    """Return a writable folder for caches of the files in `data_folder`, and create it if necessary.

    The first of these that can be written: `$NUCLR_CACHE`, by default `.nuclr` in `data_folder`; `user_cache()`.

    Args:
        data_folder: the folder that holds the data.

    Returns:
        The folder, or None if none of them can be written.

    """
    for folder in (Path(os.environ.get("NUCLR_CACHE") or data_folder / ".nuclr"), user_cache()):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_dir() and os.access(folder, os.W_OK):
            return folder
    return None


def user_cache() -> Path:
    """Return the user's folder for caches: `$NUCLR_CACHE`, or `$XDG_CACHE_HOME/nuclr` (`~/.cache/nuclr`)."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nuclr"
    return Path(os.environ.get("NUCLR_CACHE") or own)


def _sync_folder(folder: Path) -> None:
    """Flush the rename itself to disk. Some file systems cannot do this; the error is ignored."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- output folders of commands ----------------------------------------------------------------------------------------


def is_run(folder: str | Path) -> bool:
    """Return whether a path is the folder of a training run."""
    return Path(folder, "config.yaml").is_file()


def command_line() -> str:
    """Return the command as it was called."""
    program = Path(sys.argv[0]).name
    return shlex.join(["nuclr" if program == "__main__.py" else program, *sys.argv[1:]])


def check_folder(
    folder: Path,
    command: str,
    summary: str,
    names: Sequence[str],
    create: bool = True,
) -> None:
    """Check that the files to write in a folder are not somebody else's, and that it can be written.

    An earlier run of the same command is recognized by the key "written_by" in its `summary`; its files may be
    replaced. The page of another command, and the folder of a training run, are refused.

    Args:
        folder: the folder of `--out`.
        command: the command that writes, such as "nuclr toy".
        summary: name of the JSON file that the command writes last.
        names: the files that will be written.
        create: create the folder, and check that it can be written; False for a command that may write nothing.

    Raises:
        UserError: the folder cannot be written, or it belongs to another command.

    """
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({error.strerror}); name another folder") from None
    if is_run(folder):
        other = folder / command.rpartition(" ")[2]
        raise UserError(f"--out {folder}: the folder of a training run; name another folder, such as {other}")
    present = [name for name in (*names, _PAGE) if (folder / name).exists()]
    if present and read_object(folder / summary).get("written_by") != command:
        raise UserError(f"--out {folder}: {present[0]} exists and was not written by `{command}`; name another folder")


@contextlib.contextmanager
def publish_folder(
    folder: Path,
    summary: str,
    command: str,
    has_page: bool = True,
) -> Iterator[Path]:
    """Give an empty folder whose files replace those of an earlier result in `folder` when the block ends.

    The summary is replaced first, by one that only says which command writes, and last, by the new one. So whatever
    happens, `folder` holds either a whole result, or a summary that no command reads as one and that lets `command`
    write again. If the block fails, the earlier result stays. Of several processes, one publishes after the other.

    Args:
        folder: the folder of the result. It is created, and may hold other files.
        summary: the name of a JSON file of the result.
        command: the command that writes, see `check_folder`.
        has_page: whether the folder may have the page of the earlier result, which is removed.

    Yields:
        The folder to write to.

    Raises:
        UserError: if a file cannot be written.

    """
    temporary = folder / f".{summary}.tmp"
    with user_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, summary):
            temporary.mkdir()
            try:
                yield temporary
                new = sorted(path for path in temporary.rglob("*") if path.is_file())
                for path in new:
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                write_json(folder / summary, {"written_by": command})
                if has_page:
                    (folder / _PAGE).unlink(missing_ok=True)
                new.sort(key=lambda path: path.name == summary and path.parent == temporary)
                for path in new:
                    target = folder / path.relative_to(temporary)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.replace(target)
                _sync_folder(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Wait until no other process publishes to `folder`, and remove what killed ones left of the file `name`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock a folder
            fcntl.flock(handle, fcntl.LOCK_EX)
        for dead in folder.glob(f".{glob.escape(name)}.*tmp"):
            if dead.is_dir():
                shutil.rmtree(dead, ignore_errors=True)
            else:
                dead.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)


def take_lock(folder: Path, what: str, option: str = "") -> IO[str]:
    """Lock a folder that is in use for long, until the returned file is closed.

    Raises:
        UserError: if another process has locked it.

    """
    lock = (folder / LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(f"{option}{folder}: another {what} is using it; wait for it, or name another folder") from None
    return lock


@contextlib.contextmanager
def user_errors(path: Path) -> Iterator[None]:
    """Turn an OSError in the block, such as a full disk, into a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be written ({error.strerror or error})") from error
