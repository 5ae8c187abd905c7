"""Find the members of a tar, and the samples that they form, in one pass over the headers.

A sample consists of consecutive members with the same key, which is the path up to the first dot of the file name, as
webdataset and img2dataset write them: `000012.jpg`, `000012.txt`, `000012.json`.

Tars are untrusted. Sizes are compared with limits before anything is read, and a header is used only if its checksum is
right. After a damaged header the next member cannot be found, so the tar counts as truncated there.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nuclr.errors import UserError

BLOCK = 512  # bytes; every header and member of a tar starts at a multiple of it
_MAX_NAME = 2**20  # bytes of a long name or a PAX header
_MAX_BLOCK = 2**32 - 1  # at 2 TiB
_KINDS_OF_HEADERS = (b"L", b"K", b"x", b"g")  # these describe the next member
_OCTAL = re.compile(rb"[0-7]+")
_PAX_RECORD = re.compile(rb"([0-9]{1,9}) ([^=\n]+)=")


class TruncatedTar(Exception):  # noqa: N818 (the tar is truncated; the program is not in error)
    """The tar ends too early. Its argument is the name of the truncated member, if known."""


class TarSample(NamedTuple):
    """The members of one sample.

    Attributes:
        members: suffix of a member -> its position in blocks, and its size.
        truncated: whether the tar ends within this sample.

    """

    members: dict[str, tuple[int, int]]
    truncated: bool = False


def iter_samples(descriptor: int, path: Path) -> Iterator[TarSample]:
    """Yield the samples of a tar; the last one of a truncated tar has the members that are left, perhaps none.

    Raises:
        UserError: if the file is not a tar.

    """
    key = ""
    members: dict[str, tuple[int, int]] = {}
    try:
        for name, extent in _iter_members(descriptor, path):
            sample, suffix = _split_name(name)
            if not suffix:
                continue
            if sample != key:
                if members:
                    yield TarSample(members)
                key = sample
                members = {}
            members.setdefault(suffix.lower(), extent)
        if members:
            yield TarSample(members)
    except TruncatedTar as cut:
        if members and cut.args and _split_name(cut.args[0])[0] != key:  # the next sample is truncated
            yield TarSample(members)
            members = {}
        yield TarSample(members, truncated=True)


def _split_name(name: str) -> tuple[str, str]:
    """Return a sample's key and the suffix, which is empty if the file does not belong to a sample."""
    folder, _, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return f"{folder}/{stem}", suffix if stem else ""


def _iter_members(descriptor: int, path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name, (block, size)) of the files.

    Raises:
        TruncatedTar: at an invalid header or an early end of file.

    """
    size = os.fstat(descriptor).st_size
    position = 0
    long_name: str | None = None
    long_size: int | None = None
    while True:
        header = os.pread(descriptor, BLOCK, position)
        if position == 0 and any(header) and header[257:262] != b"ustar" and not _is_header(header):
            gzip = header[:2] == b"\x1f\x8b"
            raise UserError(f"{path}: {'compressed; unpack it first (gunzip)' if gzip else 'not a tar file'}")
        if len(header) == BLOCK and not any(header):
            return
        if not _is_header(header):
            raise TruncatedTar
        kind = header[156:157]
        begin = position + BLOCK
        name = [long_name or member_name(header)] if kind in (b"0", b"\0") else []
        length = _size(header)
        if long_size is not None and kind not in _KINDS_OF_HEADERS:
            length = long_size
        if length is None or begin + length > size or begin // BLOCK > _MAX_BLOCK:
            raise TruncatedTar(*name)
        position = begin + -(-length // BLOCK) * BLOCK
        if kind in (b"L", b"x"):
            if length > _MAX_NAME:
                raise TruncatedTar
            content = os.pread(descriptor, length, begin)
            records = {"path": content.rstrip(b"\0").decode("utf-8", "replace")} if kind == b"L" else _pax(content)
            long_name = records.get("path", long_name)
            long_size = int(records["size"]) if "size" in records else long_size
        elif kind not in _KINDS_OF_HEADERS:
            if name:
                yield name[0], (begin // BLOCK, length)
            long_name = None
            long_size = None


def _is_header(header: bytes) -> bool:
    """Return whether the checksum of a header is right. It is computed with blanks in its own field."""
    field = header[148:156].split(b"\0", 1)[0].strip()
    if len(header) < BLOCK or not _OCTAL.fullmatch(field):
        return False
    return int(field, 8) == sum(header) - sum(header[148:156]) + 8 * ord(" ")


def _size(header: bytes) -> int | None:
    """Return the size of a member, which is octal text, or binary after a byte 0x80; None if it is wrong."""
    field = header[124:136]
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.split(b"\0", 1)[0].strip() or b"0"
    return int(digits, 8) if _OCTAL.fullmatch(digits) else None


def member_name(header: bytes) -> str:
    """Return the name in a header, the block before a member; "" if the header is empty."""
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0]
    ustar = header[257:263] == b"ustar\0"
    return (prefix + b"/" + name if ustar and prefix else name).decode("utf-8", "replace")


def _pax(content: bytes) -> dict[str, str]:
    """Return `path` and `size` of a PAX header, if it has them.

    It consists of records "LENGTH key=value" that end with a line feed. LENGTH counts the whole record.

    Raises:
        TruncatedTar: if the header is damaged.

    """
    records: dict[str, str] = {}
    position = 0
    while position < len(content) and content[position]:  # some programs add zeros at the end
        match = _PAX_RECORD.match(content, position)
        end = position + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(content) or content[end - 1] != ord("\n"):
            raise TruncatedTar
        if match[2] in (b"path", b"size"):
            records[match[2].decode()] = content[match.end() : end - 1].decode("utf-8", "replace")
        position = end
    if not re.fullmatch("[0-9]{1,18}", records.get("size", "0")):
        raise TruncatedTar
    return records
