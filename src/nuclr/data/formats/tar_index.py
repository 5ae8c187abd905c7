"""Index one tar: find the positions of its samples' images and captions in one pass over the headers.

A sample consists of consecutive members with the same key, which is the path up to the first dot of the file name, as
webdataset and img2dataset write them: `000012.jpg`, `000012.txt`, `000012.json`. The caption is the `.txt`; without
one, the entry "caption" or "captions" (a text or a list) of the `.json`. `x_key` selects the image with that suffix,
`y_key` that entry of the `.json`. Captions are read; images are skipped.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nuclr.data.formats.listed import Y_COLUMNS
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.texts import clean, digest
from nuclr.errors import UserError

BLOCK = 512  # bytes; every header and member of a tar starts at a multiple of it
TXT = -1  # `which` of a caption in a .txt member

# One row per pair. `image` and `text` are positions in blocks, 0 if missing. `which` is TXT, or the position of the
# caption in the JSON's list. `first` marks the first pair of an image. Equal captions have equal `digest` and `y_id`.
ROW = np.dtype(
    {
        "names": ["image", "image_size", "text", "text_size", "which", "first", "digest", "y_id"],
        "formats": ["<u4", "<u4", "<u4", "<u4", "<i2", "?", "<u8", "<u4"],
    }
)


@dataclass(frozen=True)
class Scan:
    """The index of one tar.

    Attributes:
        rows: (pairs of this tar,), of dtype ROW.
        bad: row -> reason, for bad samples.
        suffixes: all suffixes of members.
        truncated: whether the tar has lost its end.

    """

    rows: np.ndarray
    bad: dict[int, str]
    suffixes: set[str]
    truncated: bool


class _Truncated(Exception):  # noqa: N818 (the tar is truncated; the program is not in error)
    """The tar ends too early. Its argument is the name of the truncated member, if known."""


def scan_tar(path: Path, x_key: str | None, y_key: str | None) -> Scan:
    """Find all samples of a tar.

    A sample that lacks an image or a caption is a bad sample, and so is the last one of a truncated tar.

    Args:
        path: the tar.
        x_key: the suffix of the image, by default that of any image.
        y_key: the entry of the `.json` that holds the caption, or "txt".

    Raises:
        UserError: if the file is not a tar.

    """
    rows: list[tuple[int, ...]] = []
    bad: dict[int, str] = {}
    suffixes: set[str] = set()
    truncated = False
    with path.open("rb") as file:
        descriptor = file.fileno()

        def close(parts: dict[str, tuple[int, int]]) -> None:
            image = _image(parts, x_key)
            captions = _captions(descriptor, parts, y_key)
            for row, (text, which, caption, reason) in enumerate(captions):
                reason = reason or ("no image" if image == (0, 0) else None if caption else "empty caption")
                if image == (0, 0) and text == (0, 0):
                    return  # neither image nor caption: not a sample
                if reason:
                    bad[len(rows)] = reason
                rows.append((*image, *text, which, row == 0, digest(caption.encode("utf-8", "replace")), 0))

        key, parts = "", dict[str, tuple[int, int]]()
        try:
            for name, extent in _members(descriptor, path):
                sample, suffix = _split(name)
                if not suffix:
                    continue
                if sample != key:
                    close(parts)
                    key, parts = sample, {}
                suffixes.add(suffix.lower())
                parts.setdefault(suffix.lower(), extent)
            close(parts)
        except _Truncated as cut:
            truncated = True
            if cut.args and _split(cut.args[0])[0] != key:  # the next sample is truncated; this one is complete
                close(parts)
                parts = {}
            before = len(rows)
            close(parts)
            if len(rows) == before:
                rows.append((0, 0, 0, 0, TXT, True, digest(b""), 0))
            bad.update(dict.fromkeys(range(before, len(rows)), "truncated tar"))
    return Scan(np.array(rows, ROW), bad, suffixes, truncated)


def _split(name: str) -> tuple[str, str]:
    """Return a sample's key and the suffix, which is empty if the file does not belong to a sample."""
    folder, _, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return f"{folder}/{stem}", suffix if stem else ""


def read_at(descriptor: int, block: int, size: int) -> bytes:
    """Return the bytes of one member; fewer if the file ends before."""
    return os.pread(descriptor, size, block * BLOCK)


def caption_of(data: bytes, which: int, y_key: str | None) -> str:
    """Return the caption in a `.txt` (which = TXT), or caption number `which` of a `.json`."""
    return clean(data.decode("utf-8")) if which == TXT else _from_json(data, y_key)[which]


def _members(descriptor: int, path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name, (block, size)) of the files; raise _Truncated at an invalid header or an early end of file."""
    size, position, long_name = os.fstat(descriptor).st_size, 0, None
    while True:
        header = os.pread(descriptor, BLOCK, position)
        if position == 0 and any(header) and not _is_header(header):
            gzip = header[:2] == b"\x1f\x8b"
            raise UserError(f"{path}: {'compressed; unpack it first (gunzip)' if gzip else 'not a tar file'}")
        if len(header) < BLOCK:
            raise _Truncated
        if not any(header):
            return
        if not _is_header(header):
            raise _Truncated
        length, kind, begin = _size(header), header[156:157], position + BLOCK
        position = begin + -(-length // BLOCK) * BLOCK
        if begin + length > size:
            raise _Truncated(*([long_name or member_name(header)] if kind in (b"0", b"\0") else []))
        if kind == b"L":
            long_name = os.pread(descriptor, length, begin).rstrip(b"\0").decode("utf-8", "replace")
        elif kind == b"x":
            long_name = _pax_path(os.pread(descriptor, length, begin)) or long_name
        elif kind in (b"0", b"\0"):
            yield long_name or member_name(header), (begin // BLOCK, length)
            long_name = None
        else:
            long_name = long_name if kind in (b"g", b"K") else None


def _is_header(header: bytes) -> bool:
    if header[257:262] == b"ustar":
        return True
    try:  # tars from before 1988 have no magic, only a checksum, computed with blanks in its field
        return int(header[148:156].rstrip(b" \0") or b"x", 8) == sum(header) - sum(header[148:156]) + 8 * 32
    except ValueError:
        return False


def _size(header: bytes) -> int:
    field = header[124:136]
    if field[0] & 0x80:
        return int.from_bytes(field[1:])
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise _Truncated from None


def member_name(header: bytes) -> str:
    """Return the name in a header, the block before a member; "" if the header is empty."""
    name, prefix = header[:100].split(b"\0", 1)[0], header[345:500].split(b"\0", 1)[0]
    ustar = header[257:263] == b"ustar\0"
    return (prefix + b"/" + name if ustar and prefix else name).decode("utf-8", "replace")


def _pax_path(records: bytes) -> str | None:
    """Return the `path` of a PAX header, which consists of records "LENGTH key=value" with a line feed."""
    while records:
        length = int(records.split(b" ", 1)[0] or b"0")
        key, _, value = records[:length].partition(b" ")[2].partition(b"=")
        if key == b"path":
            return value.rstrip(b"\n").decode("utf-8", "replace")
        records = records[length:] if length else b""
    return None


def _image(parts: dict[str, tuple[int, int]], x_key: str | None) -> tuple[int, int]:
    if x_key is not None:
        return parts.get(x_key.lower(), (0, 0))
    return next((extent for suffix, extent in parts.items() if f".{suffix}".endswith(SUFFIXES)), (0, 0))


def _captions(
    descriptor: int, parts: dict[str, tuple[int, int]], y_key: str | None
) -> list[tuple[tuple[int, int], int, str, str | None]]:
    """Return (extent, which, caption, reason) per caption of a sample; a sample without captions has one reason."""
    if "txt" in parts and y_key in (None, "txt"):
        try:
            return [(parts["txt"], TXT, caption_of(read_at(descriptor, *parts["txt"]), TXT, None), None)]
        except UnicodeDecodeError:
            return [(parts["txt"], TXT, "", "caption is not UTF-8 text")]
    if "json" not in parts:
        return [((0, 0), TXT, "", "no caption")]
    try:
        captions = _from_json(read_at(descriptor, *parts["json"]), y_key)
    except (ValueError, KeyError, TypeError):
        return [((0, 0), TXT, "", "no caption in its .json")]
    return [(parts["json"], which, caption, None) for which, caption in enumerate(captions)]


def _from_json(data: bytes, y_key: str | None) -> list[str]:
    content = json.loads(data)
    key = y_key or next(name for name in Y_COLUMNS if name in content)
    value = content[key]
    return [clean(caption or "") for caption in (value if isinstance(value, list) else [value])]
