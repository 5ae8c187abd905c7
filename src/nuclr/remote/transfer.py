"""Ask a server about a file, and read it, through fsspec; a broken connection is tried again, then named.

What can be wrong with a URL, its server or the access to it gives a UserError of one line. An error that another
attempt cannot fix (no such file, no access, no credentials) is reported at once. All others are tried again after
growing waits, and a download continues at the byte where it stopped, if the server can do that.
"""

import contextlib
import importlib.util
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from nuclr.errors import EXTRAS, UserError, missing_extra, printable, require

CHUNK = 8 * 2**20  # bytes per read
WAITS: tuple[float, ...] = (1, 2, 4, 8)  # seconds before the second, third, ... attempt
CONNECT_SECONDS, READ_SECONDS = 30, 60  # without an answer, after which an attempt has failed

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_UNSAFE = re.compile(r"[^\w.@=+-]")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
_PACKAGES |= {"http": "aiohttp", "https": "aiohttp"}
# How servers say which version of a file they have, best first.
_VERSIONS = (
    *("ETag", "etag", "generation", "blob_id", "Content-MD5", "md5Hash"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created"),
)
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError")
_TRY_AGAIN = (408, 425, 429)  # the only statuses from 400 to 499 that may differ the next time

_forbidden = threading.local()  # requests, in the block of `copies_only` of a thread

T = TypeVar("T")


class Cancelled(Exception):  # noqa: N818 (another transfer has failed, or the user has stopped the program)
    """The transfer is not needed any more."""


@dataclass(frozen=True)
class RemoteFile:
    """One version of a file at a URL.

    Attributes:
        url: the URL.
        size: bytes.
        version: what the server says about the version, usually its ETag; "" if it says nothing.

    """

    url: str
    size: int
    version: str

    @property
    def key(self) -> str:
        """The name of this version in the cache."""
        return sha256(f"{self.url}\n{self.size}\n{self.version}".encode()).hexdigest()[:32]

    @property
    def name(self) -> str:
        """The name of the copy."""
        return file_name(self.url)


def is_url(name: object) -> bool:
    """Return whether a path is a URL, such as "s3://bucket/00000.tar"."""
    return isinstance(name, str) and _URL.match(name) is not None


def join_url(folder: str, name: str) -> str:
    """Return the URL of a file below the URL of a folder."""
    return f"{folder.rstrip('/')}/{name.removeprefix('./')}"


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
    if not _is_http(url):
        return url
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


@contextlib.contextmanager
def copies_only() -> Iterator[None]:
    """Allow no requests in the block: only files that this process has got before can be opened.

    For URLs that come from a file, such as the summary of an earlier command, and not from the user.
    """
    before, _forbidden.value = requests_forbidden(), True
    try:
        yield
    finally:
        _forbidden.value = before


def requests_forbidden() -> bool:
    """Return whether this is a block of `copies_only`."""
    return getattr(_forbidden, "value", False)


def refuse_forbidden(url: str) -> None:
    """Refuse a request in a block of `copies_only`."""
    if requests_forbidden():
        raise UserError(f"{shown(url)}: not downloaded, because a file names it and not the command")


def stat_file(url: str, stop: threading.Event) -> RemoteFile:
    """Ask the server for the size and the version of a file.

    Args:
        url: the URL.
        stop: ends the waits between attempts.

    Raises:
        UserError: if there is no such file, or the server cannot be reached.

    """
    filesystem, path = _connect(url)

    def ask() -> dict[str, Any]:
        filesystem.invalidate_cache()
        info: dict[str, Any] = filesystem.info(path)
        return info

    info = _with_retries(ask, url, stop)
    if info.get("type") == "directory":
        raise UserError(f"{shown(url)}: a folder, not a file")
    size = info.get("size")
    if not isinstance(size, int) or size < 0:
        raise UserError(f"{shown(url)}: the server does not say how large the file is; download it and name the copy")
    version = next((f"{field}={info[field]}" for field in _VERSIONS if info.get(field)), "")
    return RemoteFile(url, size, version)


def list_folder(url: str, suffix: str) -> list[str]:
    """Return the URLs of the files directly in a folder whose names end with `suffix`, sorted by name.

    Args:
        url: the URL of the folder. Web servers (`https://`) cannot list folders.
        suffix: such as ".tar".

    Raises:
        UserError: if there is no such folder, or it has no such file.

    """
    if _is_http(url):
        fix = f"name the files, such as {{00000..00009}}{suffix}"
        raise UserError(f"{shown(url)}: not a file of a known format, and a web server does not list folders; {fix}")
    refuse_forbidden(url)
    filesystem, path = _connect(url)

    def ask() -> list[dict[str, Any]]:
        filesystem.invalidate_cache()
        rows: list[dict[str, Any]] = filesystem.ls(path, detail=True)
        return rows

    rows = _with_retries(ask, url, threading.Event())
    names = sorted(str(row["name"]).rpartition("/")[2] for row in rows if row.get("type") == "file")
    urls = [join_url(url, name) for name in names if name.endswith(suffix)]
    if not urls:
        raise UserError(f"{url}: has no {suffix} file")
    return urls


def read_chunks(file: RemoteFile, stop: threading.Event) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) until the whole file has been read.

    After a broken connection it continues where it stopped. If the server cannot do that, the positions begin again
    at 0.

    Args:
        file: what to read.
        stop: ends the transfer.

    Raises:
        UserError: if the server fails again and again, or sends another number of bytes than it announced.
        Cancelled: after `stop`.

    """
    attempts, position = _Attempts(file.url, stop), 0
    received = 0  # since the last failure
    source: Any = None
    try:
        while position < file.size:
            if stop.is_set():
                raise Cancelled
            try:
                if source is None:
                    source, position = _open_at(file, position)
                data = source.read(min(CHUNK, file.size - position))
                if not data:
                    raise EOFError(f"the connection ended after {position:,} of {file.size:,} bytes")
            except Exception as error:
                _close(source)
                source = None
                attempts.failed(error)
                received = 0
                continue
            yield position, data
            position += len(data)
            received += len(data)
            if received >= CHUNK:  # progress; a server that sends a few bytes per connection does not count
                attempts.count = 0
    finally:
        _close(source)


# -- attempts ----------------------------------------------------------------------------------------------------------


class _Attempts:
    """Count the failures of one transfer, wait between them, and give up with one line."""

    def __init__(self, url: str, stop: threading.Event) -> None:
        self.url, self.stop, self.count = url, stop, 0

    def failed(self, error: Exception) -> None:
        """Wait before the next attempt, or raise if there is none."""
        self.count += 1
        if isinstance(error, UserError):
            raise error
        if _is_final(error):
            raise _explain(self.url, error) from None
        if self.count > len(WAITS):
            waited = f"{self.count} attempts within {sum(WAITS):g} s"
            raise UserError(f"{shown(self.url)}: cannot be read, {waited}; the last error: {_reason(error)}") from None
        if self.stop.wait(WAITS[self.count - 1]):
            raise Cancelled


def _with_retries(action: Callable[[], T], url: str, stop: threading.Event) -> T:
    attempts = _Attempts(url, stop)
    while True:
        try:
            return action()
        except Exception as error:
            attempts.failed(error)


def _origin(error: BaseException) -> BaseException:
    """Return the cause of an error. fsspec reports whatever goes wrong with a web server as a missing file."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return _origin(error.__cause__)
    return error


def _status(error: BaseException) -> int | None:
    """Return the status of an HTTP response that failed (aiohttp, requests, httpx, botocore)."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def _is_final(error: BaseException) -> bool:
    """Return whether another attempt would fail in the same way."""
    error = _origin(error)
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in _TRY_AGAIN
    final = (FileNotFoundError, IsADirectoryError, PermissionError, ImportError, ValueError, TypeError)
    return isinstance(error, final) or type(error).__name__ in (*_NO_CREDENTIALS, "OfflineModeIsEnabled")


def _explain(url: str, error: Exception) -> UserError:
    """Return the line for an error that another attempt cannot fix."""
    origin = _origin(error)
    status = _status(origin)
    if type(origin).__name__ in _NO_CREDENTIALS:
        fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket"
        return UserError(f"{shown(url)}: no credentials ({_reason(origin)}); {fix}")
    if isinstance(origin, FileNotFoundError) or status in (404, 410):
        bucket = "bucket does not exist" in str(origin)  # botocore's words
        return UserError(f"{shown(url)}: no such {f'bucket as {urlsplit(url).netloc!r}' if bucket else 'file'}")
    if isinstance(origin, PermissionError) or status in (401, 403, 407):
        return UserError(f"{shown(url)}: access denied ({_reason(origin)}); check the credentials and the name")
    return UserError(f"{shown(url)}: cannot be read ({_reason(origin)})")


def _reason(error: BaseException) -> str:
    error = _origin(error)
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if (status := getattr(error, "status", None)) and getattr(error, "message", None):  # aiohttp: hides the whole URL
        text = f"status {status}, {error.message}"  # type: ignore[attr-defined]
    return printable(text[:200])


# -- file systems ------------------------------------------------------------------------------------------------------


def _is_http(url: str) -> bool:
    return urlsplit(url).scheme.lower() in ("http", "https")


def _connect(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it."""
    fsspec = require("fsspec", purpose=shown(url))
    scheme = urlsplit(url).scheme.lower()
    if scheme not in fsspec.available_protocols():
        known = "s3://, gs://, https://, hf:// and others of fsspec"
        raise UserError(f"{shown(url)}: unknown kind of URL; allowed: {known}")
    package = _PACKAGES.get(scheme)
    if package is not None and importlib.util.find_spec(package) is None:
        fix = str(missing_extra(package)) if package in EXTRAS else f"{package} is not installed; pip install {package}"
        raise UserError(f"{shown(url)}: {fix}")
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **_options(scheme, fsspec))
    except ImportError as error:
        raise UserError(f"{shown(url)}: {_reason(error)}") from None
    except Exception as error:  # each file system has its own checks of URLs
        raise UserError(f"{shown(url)}: not a valid URL ({_reason(error)})") from None
    if scheme in ("s3", "s3a"):
        filesystem.retries = 1
    return filesystem, str(path)


def _options(scheme: str, fsspec: Any) -> dict[str, Any]:
    """Return options such that a lost server is noticed, and retries are left to this module."""
    if scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        return {"client_kwargs": {"timeout": timeout, "trust_env": True}}
    if scheme in ("s3", "s3a"):
        chosen = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        own = {"retries": {"max_attempts": 0}, "connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
        return {"config_kwargs": own | chosen}
    return {}


def _open_at(file: RemoteFile, position: int) -> tuple[Any, int]:
    """Open a file at a position; the second value is the position at which it really is."""
    filesystem, path = _connect(file.url)
    if not _is_http(file.url):
        source = filesystem.open(path, "rb", block_size=CHUNK, cache_type="none")
        source.seek(position)
        return source, position
    # One request for the whole file: not every web server can send parts. Compressed answers have another size.
    headers = {"Accept-Encoding": "identity"}
    if position:
        headers["Range"] = f"bytes={position}-"
    source = filesystem.open(path, "rb", block_size=0, size=file.size, headers=headers)
    answer = source.r
    begins = str(answer.headers.get("Content-Range", "")).startswith(f"bytes {position}-")
    return source, position if answer.status == 206 and begins else 0


def _close(source: Any) -> None:
    if source is not None:
        source.close()
