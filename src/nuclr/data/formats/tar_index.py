"""Index one tar: find the positions of its samples' images and captions in one pass over the headers.

A sample consists of consecutive members with the same key, which is the path up to the first dot of the file name, as
webdataset and img2dataset write them: `000012.jpg`, `000012.txt`, `000012.json`. The caption is the `.txt`; without
one, the entry "caption" or "captions" (a text or a list) of the `.json`. `x_key` selects the image with that suffix,
`y_key` that entry of the `.json`. Captions are read; images are skipped.

Tars are untrusted. Sizes are compared with limits before anything is read, and a header is used only if its checksum is
right. A sample that cannot be used is a bad sample with a reason. After a damaged header the next member cannot be
found, so the tar counts as truncated there.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.formats.choose import CAPTION_COLUMNS
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.pairs import BadSample
from nuclr.data.texts import clean, digest, text_problem
from nuclr.errors import UserError
from nuclr.files import parse_json
from nuclr.image_files import MAX_BYTES

BLOCK = 512  # bytes; every header and member of a tar starts at a multiple of it
TXT = -1  # `which` of a caption in a .txt member
MAX_CAPTIONS = 32_767  # of one sample, because `which` has 16 bits
MAX_TEXT = 16 * 2**20  # bytes of one .txt or .json
_OPEN_FILES = 512  # tars kept open, below the usual limit of 1024; the others are opened for each read
_MAX_NAME = 2**20  # bytes of a long name or a PAX header
_MAX_BLOCK = 2**32 - 1  # at 2 TiB
_KINDS_OF_HEADERS = (b"L", b"K", b"x", b"g")  # these describe the next member
_OCTAL = re.compile(rb"[0-7]+")
_PAX_RECORD = re.compile(rb"([0-9]{1,9}) ([^=\n]+)=")

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


class TruncatedTar(Exception):  # noqa: N818 (the tar is truncated; the program is not in error)
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

        def close(parts: dict[str, tuple[int, int]], problem: str | None = None) -> None:
            image = _image(parts, x_key)
            if image[1] > MAX_BYTES:
                problem = problem or f"image file too large; at most {MAX_BYTES // 2**20} MiB are allowed"
                image = (image[0], 0)
            captions = _captions(descriptor, parts, y_key)
            for row, (text, which, caption, reason) in enumerate(captions):
                if image == (0, 0) and text == (0, 0):
                    return  # neither image nor caption: not a sample
                reason = problem or reason or ("no image" if image == (0, 0) else text_problem(caption, "caption"))
                if reason:
                    bad[len(rows)] = reason
                rows.append((*image, *text, which, row == 0, digest(caption.encode()), 0))

        key, parts, problem = "", dict[str, tuple[int, int]](), None
        try:
            for name, extent, problem_of_member in iter_members(descriptor, path):
                sample, suffix = split_name(name)
                if not suffix:
                    continue
                if sample != key:
                    close(parts, problem)
                    key, parts, problem = sample, {}, None
                problem = problem or problem_of_member
                suffixes.add(suffix.lower())
                parts.setdefault(suffix.lower(), extent)
            close(parts, problem)
        except TruncatedTar as cut:
            truncated = True
            if cut.args and split_name(cut.args[0])[0] != key:  # the next sample is truncated; this one is complete
                close(parts, problem)
                parts = {}
            before = len(rows)
            close(parts)
            if len(rows) == before:
                rows.append((0, 0, 0, 0, TXT, True, digest(b""), 0))
            bad.update(dict.fromkeys(range(before, len(rows)), "truncated tar"))
    return Scan(np.array(rows, ROW), bad, suffixes, truncated)


def split_name(name: str) -> tuple[str, str]:
    """Return a sample's key and the suffix, which is empty if the file does not belong to a sample."""
    folder, _, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return f"{folder}/{stem}", suffix if stem else ""


class TarFiles:
    """Read members of tars by their positions; most tars stay open.

    Args:
        tars: the files.

    """

    def __init__(self, tars: Sequence[Path]) -> None:
        self.tars, self._descriptors = tars, dict[int, int]()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptors": {}}  # open files cannot be sent to another process

    def read(self, tar: int, block: int, size: int) -> bytes:
        """Return a member of a tar.

        Raises:
            BadSample: if it cannot be read, or its size is wrong.

        """
        if size > MAX_BYTES:
            raise BadSample("wrong size in the index of the tar")
        try:
            data = self._read(tar, block, size)
        except OSError as error:
            raise BadSample(f"cannot be read ({error.strerror})") from None
        if len(data) < size:
            raise BadSample("truncated tar")
        return data

    def member_name(self, tar: int, block: int) -> str:
        """Return the name of the member that begins at a block; "" if it cannot be read."""
        try:
            return member_name(self._read(tar, block - 1, BLOCK)) if block else ""
        except OSError:
            return ""

    def _read(self, tar: int, block: int, size: int) -> bytes:
        if tar >= _OPEN_FILES:
            with self.tars[tar].open("rb") as file:
                return read_at(file.fileno(), block, size)
        # Two threads may open the same tar at once. One of the two descriptors then stays open until the process ends.
        if tar not in self._descriptors:
            self._descriptors[tar] = os.open(self.tars[tar], os.O_RDONLY)
        return read_at(self._descriptors[tar], block, size)


def read_at(descriptor: int, block: int, size: int) -> bytes:
    """Return the bytes of one member; fewer if the file ends before."""
    return os.pread(descriptor, size, block * BLOCK)


def caption_of(data: bytes, which: int, y_key: str | None) -> str:
    """Return the caption in a `.txt` (which = TXT), or caption number `which` of a `.json`.

    Raises:
        ValueError: if there is no such caption.

    """
    if which == TXT:
        return clean(data.decode("utf-8"))
    captions = _from_json(data, y_key)
    if not 0 <= which < len(captions):
        raise ValueError(f"no caption {which}")
    return captions[which][0]


def verify_rows(path: Path, rows: np.ndarray, y_key: str | None) -> np.ndarray:
    """Compare rows of an older index with a tar that may have been damaged or replaced since.

    Args:
        path: the tar.
        rows: (n,) of dtype ROW.
        y_key: the entry of the `.json` files that holds the captions.

    Returns:
        (n,) bool: True if the image is preceded by its header and the caption has the digest of the index.

    """
    same = np.zeros(len(rows), bool)
    captions: list[tuple[str, str | None]] = []
    last = -1  # captions of one .json have consecutive rows; it is parsed once
    with path.open("rb") as file:
        descriptor, length = file.fileno(), os.fstat(file.fileno()).st_size
        for number, row in enumerate(rows):
            ends = [int(row[part]) * BLOCK + int(row[f"{part}_size"]) for part in ("image", "text")]
            if not (row["image"] and row["text"]) or max(ends) > length or row["text_size"] > MAX_TEXT:
                continue
            try:
                header = read_at(descriptor, int(row["image"]) - 1, BLOCK)
                if not _is_header(header) or _size(header) != row["image_size"]:
                    continue
                if int(row["text"]) != last:
                    last, data = int(row["text"]), read_at(descriptor, int(row["text"]), int(row["text_size"]))
                    captions = [(caption_of(data, TXT, None), None)] if row["which"] == TXT else _from_json(data, y_key)
                caption = captions[max(int(row["which"]), 0)][0]
            except (ValueError, LookupError, TruncatedTar):
                last = -1
                continue
            same[number] = digest(caption.encode()) == int(row["digest"])
    return same


def iter_members(descriptor: int, path: Path) -> Iterator[tuple[str, tuple[int, int], str | None]]:
    """Yield (name, (block, size), problem) of the files.

    Raises:
        TruncatedTar: at an invalid header or an early end of file.

    """
    size, position = os.fstat(descriptor).st_size, 0
    long_name: str | None = None
    long_size: int | None = None
    problem: str | None = None
    while True:
        header = os.pread(descriptor, BLOCK, position)
        if position == 0 and any(header) and header[257:262] != b"ustar" and not _is_header(header):
            gzip = header[:2] == b"\x1f\x8b"
            raise UserError(f"{path}: {'compressed; unpack it first (gunzip)' if gzip else 'not a tar file'}")
        if len(header) < BLOCK:
            raise TruncatedTar
        if not any(header):
            return
        if not _is_header(header):
            raise TruncatedTar
        kind, begin = header[156:157], position + BLOCK
        name = [long_name or member_name(header)] if kind in (b"0", b"\0") else []
        length = _size(header, *name)
        if long_size is not None and kind not in _KINDS_OF_HEADERS:
            length = long_size
        position = begin + -(-length // BLOCK) * BLOCK
        if begin + length > size or begin // BLOCK > _MAX_BLOCK or (kind in (b"L", b"x") and length > _MAX_NAME):
            raise TruncatedTar(*name)
        if kind == b"L":
            long_name = os.pread(descriptor, length, begin).rstrip(b"\0").decode("utf-8", "replace")
        elif kind == b"x":
            records = _pax_records(os.pread(descriptor, length, begin))
            if records is None:
                problem = "damaged PAX header in the tar"
            else:
                long_name = records.get("path", long_name)
                long_size = int(records["size"]) if "size" in records else long_size
        elif kind not in _KINDS_OF_HEADERS:
            if name:
                yield name[0], (begin // BLOCK, length), problem
            long_name, long_size, problem = None, None, None


def _is_header(header: bytes) -> bool:
    """Return whether the checksum of a header is right. It is computed with blanks in its own field."""
    field = header[148:156].split(b"\0", 1)[0].strip()
    if len(header) < BLOCK or not _OCTAL.fullmatch(field):
        return False
    expected = sum(header) - sum(header[148:156]) + 8 * 32
    if int(field, 8) == expected:
        return True
    # Some old programs add the bytes as signed numbers.
    return int(field, 8) == expected - 256 * sum(byte > 127 for byte in header[:148] + header[156:])


def _size(header: bytes, *name: str) -> int:
    """Return the size of a member, which is octal text, or binary after a byte 0x80; `name` is for TruncatedTar."""
    field = header[124:136]
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.split(b"\0", 1)[0].strip()
    if digits and not _OCTAL.fullmatch(digits):  # a negative size, for example
        raise TruncatedTar(*name)
    return int(digits or b"0", 8)


def member_name(header: bytes) -> str:
    """Return the name in a header, the block before a member; "" if the header is empty."""
    name, prefix = header[:100].split(b"\0", 1)[0], header[345:500].split(b"\0", 1)[0]
    ustar = header[257:263] == b"ustar\0"
    return (prefix + b"/" + name if ustar and prefix else name).decode("utf-8", "replace")


def _pax_records(content: bytes) -> dict[str, str] | None:
    """Return `path` and `size` of a PAX header, if it has them; None if the header is damaged.

    It consists of records "LENGTH key=value" that end with a line feed. LENGTH counts the whole record.
    """
    records: dict[str, str] = {}
    position = 0
    while position < len(content) and content[position]:  # some programs add zeros at the end
        match = _PAX_RECORD.match(content, position)
        end = position + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(content) or content[end - 1] != ord("\n"):
            return None
        if match[2] in (b"path", b"size"):
            records[match[2].decode()] = content[match.end() : end - 1].decode("utf-8", "replace")
        position = end
    return None if not re.fullmatch("[0-9]{1,18}", records.get("size", "0")) else records


def _image(parts: dict[str, tuple[int, int]], x_key: str | None) -> tuple[int, int]:
    if x_key is not None:
        return parts.get(x_key.lower(), (0, 0))
    return next((extent for suffix, extent in parts.items() if f".{suffix}".endswith(SUFFIXES)), (0, 0))


def _captions(
    descriptor: int, parts: dict[str, tuple[int, int]], y_key: str | None
) -> list[tuple[tuple[int, int], int, str, str | None]]:
    """Return (extent, which, caption, reason) per caption of a sample; a sample without captions has one reason."""
    suffix = "txt" if "txt" in parts and y_key in (None, "txt") else "json"
    if suffix in parts and parts[suffix][1] > MAX_TEXT:
        reason = f"caption file too large; at most {MAX_TEXT // 2**20} MiB are allowed"
        return [((parts[suffix][0], 0), TXT, "", reason)]
    if suffix == "txt":
        try:
            return [(parts["txt"], TXT, caption_of(read_at(descriptor, *parts["txt"]), TXT, None), None)]
        except UnicodeDecodeError:
            return [(parts["txt"], TXT, "", "caption is not UTF-8 text")]
    if "json" not in parts:
        return [((0, 0), TXT, "", "no caption")]
    try:
        captions = _from_json(read_at(descriptor, *parts["json"]), y_key)
    except json.JSONDecodeError as error:
        return [((0, 0), TXT, "", f"its .json cannot be read ({error.msg})")]
    if not captions:
        return [((0, 0), TXT, "", "no caption in its .json")]
    if len(captions) > MAX_CAPTIONS:
        reason = f"{len(captions):,} captions in its .json; at most {MAX_CAPTIONS:,} are allowed"
        return [((0, 0), TXT, "", reason)]
    return [(parts["json"], which, caption, reason) for which, (caption, reason) in enumerate(captions)]


def _from_json(data: bytes, y_key: str | None) -> list[tuple[str, str | None]]:
    """Return (caption, reason) per caption of a `.json`; the reason is None unless the caption is not a text.

    Raises:
        json.JSONDecodeError: if it is not JSON.

    """
    content = parse_json(data)
    keys = (y_key,) if y_key else CAPTION_COLUMNS
    key = next((name for name in keys if name in content), None) if isinstance(content, dict) else None
    if key is None:
        return []
    captions = content[key] if isinstance(content[key], list) else [content[key]]
    return [
        (clean(caption or ""), None) if isinstance(caption, str | None) else ("", "caption is not a text")
        for caption in captions
    ]
