"""Files at a URL (`s3://`, `gs://`, `https://`, `hf://`, ...), as local copies in a cache.

A file is downloaded whole before it is read. Training visits samples in random order, and every image is decoded once
before the first epoch, so each byte is needed at the start anyway; reading samples over the network would cost one
request per sample and epoch, and any of them could fail. With local copies, nothing but the start of a run depends on
the network, and samples, indexes and fingerprints are those of local files.

fsspec transfers the files. A copy is kept in a folder that is named by the URL and the version of the file (its ETag or
modification time), so a file that has changed is downloaded again, and the copy that another process reads is never
overwritten. The cache has no limit: delete the folder `remote` in `NUCLR_CACHE` to empty it.
"""

import contextlib
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from nuclr.errors import UserError, first_line, printable, require
from nuclr.files import user_cache

WAITS: tuple[float, ...] = (1, 2, 4, 8)  # seconds before the second, third, ... attempt
TRANSFERS = 4  # at the same time
LARGE = 10**8  # bytes; a larger download is announced

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_UNSAFE = re.compile(r"[^\w.@=+-]")
# Fields by which file systems report the version of a file, best first.
_VERSIONS = (
    "ETag",
    "etag",
    "generation",
    "blob_id",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)
# Errors that another attempt does not fix.
_FINAL = (FileNotFoundError, PermissionError, ImportError, ValueError, TypeError)
_urls: dict[str, str] = {}  # local path -> URL as messages show it, of the files that this process has used

T = TypeVar("T")


def is_url(name: object) -> bool:
    """Return whether a path is a URL, such as "s3://bucket/00000.tar"."""
    return isinstance(name, str) and _URL.match(name) is not None


def file_name(url: str) -> str:
    """Return the last part of the path of a URL, without characters that mean something in a path.

    Example:
        >>> file_name("https://host/data/train%20set.npz?download=true")
        'train_set.npz'

    """
    path = unquote(urlsplit(url).path) if _is_http(url) else url
    name = _UNSAFE.sub("_", path.rstrip("/").rpartition("/")[2])[-120:]
    return name if name.strip("._") else "file"


def shown(url: str) -> str:
    """Return a URL for messages, without a password and without the query, which may be a signature.

    Example:
        >>> shown("https://me:secret@host/train.npz?signature=abc")
        'https://host/train.npz'

    """
    parts = urlsplit(url)
    plain = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return plain if _is_http(url) else url


@contextlib.contextmanager
def show_urls() -> Iterator[None]:
    """Name the URLs instead of the local copies in a UserError of the block."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for path, url in sorted(_urls.items(), key=lambda item: -len(item[0])):  # files before their folders
            message = message.replace(path, url)
        raise UserError(message) from None


def local_copies(urls: Sequence[str]) -> list[Path]:
    """Return local copies of the files at URLs, in their order; files that are not in the cache are downloaded.

    Raises:
        UserError: as `local_copy`.

    """
    with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="nuclr-remote") as pool:
        return list(pool.map(local_copy, urls))  # after an error, the others are not begun


def local_copy(url: str) -> Path:
    """Return a local copy of the file at a URL.

    Args:
        url: such as "s3://bucket/train.npz".

    Returns:
        The path of the copy, which has the name of the file.

    Raises:
        UserError: if the file does not exist, cannot be downloaded, or does not fit on the disk.

    Example:
        >>> local_copy("s3://bucket/data/train.npz").name  # doctest: +SKIP
        'train.npz'

    """
    system, path = _connect(url)
    info: dict[str, Any] = _with_retries(url, lambda: system.info(path))
    if info.get("type") == "directory":
        raise UserError(f"{shown(url)}: a folder, not a file")
    size = info.get("size")
    version = next((f"{field}={info[field]}" for field in _VERSIONS if info.get(field)), "")
    key = sha256(f"{url}\n{size}\n{version}".encode()).hexdigest()[:32]
    folder = user_cache().absolute() / "remote" / key
    copy = folder / file_name(url)
    partial = folder / "partial"

    def download() -> None:
        system.get_file(path, str(partial))
        received = partial.stat().st_size
        if size not in (None, received):
            raise EOFError(f"{received:,} of {size:,} bytes were sent")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Of several processes, one downloads and the others wait. NFS cannot lock the folder itself (`files.locked`).
        with (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not copy.exists() or size not in (None, copy.stat().st_size):
                _announce(url, size or 0, folder)
                _with_retries(url, download)
                partial.replace(copy)
    except OSError as error:
        problem = f"the copy in {folder} cannot be written ({first_line(error)})"
        raise UserError(f"{shown(url)}: {problem}; set NUCLR_CACHE to another folder") from None
    _urls[str(copy)] = shown(url)
    _urls[str(folder)] = shown(url).rpartition("/")[0]
    return copy


def _announce(
    url: str,
    size: int,
    folder: Path,
) -> None:
    """Announce a large download, and refuse one that does not fit on the disk."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(f"{shown(url)}: {size:,} bytes, but {free:,} are free in {folder}; set NUCLR_CACHE")
    if size > LARGE and os.environ.get("RANK", "0") == "0":  # of torchrun
        sys.stderr.write(f"nuclr: downloading {shown(url)}, {size / 10**6:,.0f} MB, to {folder}\n")


def _is_http(url: str) -> bool:
    return urlsplit(url).scheme.lower() in ("http", "https")


def _connect(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, which has forgotten earlier answers, and the path in it."""
    fsspec = require("fsspec", purpose=shown(url))
    # Web servers get the credentials of ~/.netrc.
    options = {"client_kwargs": {"trust_env": True}} if _is_http(url) else {}
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except Exception as error:  # an unknown kind of URL, a package that is not installed, checks of the file system
        raise UserError(f"{shown(url)}: cannot be opened ({_reason(error)})") from None
    system.invalidate_cache()
    return system, str(path)


def _with_retries(url: str, action: Callable[[], T]) -> T:
    """Return the result of a request, which is repeated after errors that may not occur again.

    Raises:
        UserError: after the last attempt, or at once if another attempt would fail in the same way.

    """
    for wait in (*WAITS, None):
        try:
            return action()
        except Exception as error:
            # The file system of web servers reports every failure as a missing file, with the failure as its cause.
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            status: int = getattr(cause, "status", 0) or getattr(getattr(cause, "response", 0), "status_code", 0)
            final = isinstance(cause, _FINAL) or (400 <= status < 500 and status not in (408, 429))
            if final or wait is None:
                raise UserError(
                    f"{shown(url)}: cannot be read ({_reason(cause)}); check the name and the credentials "
                    "(FSSPEC_S3_ANON=true reads a public bucket without any)"
                ) from None
            time.sleep(wait)
    raise AssertionError


def _reason(error: BaseException) -> str:
    # The text of an error of aiohttp, and of a missing file, holds the whole URL, with what `shown` hides.
    if isinstance(error, FileNotFoundError):
        return "no such file"
    status = getattr(error, "status", None)
    return f"status {status}, {printable(str(getattr(error, 'message', '')))}" if status else first_line(error)
