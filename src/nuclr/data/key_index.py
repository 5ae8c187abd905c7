"""Stable numbers for samples that are read as a stream: a file that maps keys to numbers.

Objectives with state need the number of every pair, but webdataset and Hugging Face streams yield samples in any order
and know only a key, such as webdataset's `__key__`. `nuclr index` collects all keys once and writes a `KeyIndex`.

The file has a header of 64 bytes, then the hashes of all keys in ascending order (8 bytes each), then one entry of 8
bytes per key: 24 more bits of the hash and 40 bits of the number. It is memory-mapped, so that all workers and
processes of a machine share it: 16 MB per million keys. The keys themselves are not stored.

Numbers do not depend on the order in which keys are read: new keys are numbered in the order of their hashes. Extending
an index keeps all numbers that it has.
"""

import hashlib
import itertools
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nuclr.errors import UserError, printable
from nuclr.files import user_errors, write_atomically

VERSION = 1
MAGIC = b"nuclrkey"
_HEADER = struct.Struct("<8sIIQQ32x")  # magic, version, flags, number of keys, CRC-32 of everything else
_WITH_TAR = 1  # flag: a key is preceded by the name of its tar
_NUMBER_BITS = np.uint64(40)
_NUMBER = np.uint64(2**40 - 1)
_OTHER_SURROGATES = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # than those that stand for a byte
_CHUNK = 65_536  # keys that are hashed at once

Entries = Callable[[], Iterable[tuple[str, str]]]
"""Returns (key, where it was found) for all keys. It is called again to name keys that occur twice."""


class UnknownKeyError(UserError, KeyError):
    """A key that is not in the index."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class RepeatedKeyError(UserError):
    """A key that occurs more than once."""


class _Hashes(NamedTuple):
    high: np.ndarray  # (m,) uint64, the first 64 bits
    check: np.ndarray  # (m,) uint64, 24 further bits


class KeyIndex:
    """Numbers of keys, from a file that `nuclr index` or `KeyIndex.write` made.

    The numbers of an index with n keys are 0 to n - 1, so ``num_samples=len(index)`` fits any objective. The object can
    be sent to DataLoader workers, which map the same file.

    Attributes:
        path: The file.
        with_tar: Whether keys are preceded by the name of their tar, as in ``"00000.tar/000000012"``.

    Example:
        >>> index = KeyIndex.write("train.keys", ["cat", "dog", "emu"])
        >>> len(index), "dog" in index, "fox" in index
        (3, True, False)
        >>> sorted(index.numbers(["cat", "dog", "emu"]).tolist())
        [0, 1, 2]
        >>> index["dog"] == KeyIndex.open("train.keys")["dog"]
        True

    """

    def __init__(self, path: Path, high: np.ndarray, entries: np.ndarray, with_tar: bool) -> None:
        self.path, self.with_tar = path, with_tar
        self._high, self._entries = high, entries

    @classmethod
    def open(cls, path: str | Path, verify: bool = True) -> "KeyIndex":
        """Open an index.

        Args:
            path: The file.
            verify: Whether to compare its checksum, for which the file is read once (about 10 ms per million keys).

        Returns:
            The index, memory-mapped.

        Raises:
            UserError: If the file cannot be read, is damaged, or is not an index of this version.

        """
        path = Path(path).absolute()
        try:
            with path.open("rb") as file:
                size, header = os.fstat(file.fileno()).st_size, file.read(_HEADER.size)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        if not header.startswith(MAGIC):
            raise UserError(f"{path}: not an index of keys; `nuclr index` writes one")
        if len(header) < _HEADER.size:
            raise UserError(f"{path}: truncated; {_write_again(path)}")
        _, version, flags, count, checksum = _HEADER.unpack(header)
        if version != VERSION:
            raise UserError(
                f"{path}: version {version} of the format, but this version of nuclr reads version {VERSION}; "
                f"{_write_again(path)}"
            )
        if size != _HEADER.size + 16 * count or count == 0:
            raise UserError(f"{path}: damaged: {size:,} bytes do not hold {count:,} keys; {_write_again(path)}")
        columns = np.asarray(np.memmap(path, "<u8", "r", _HEADER.size, (2, count)))
        if verify and _checksum(flags, columns) != checksum:
            raise UserError(f"{path}: damaged: the checksum does not match; {_write_again(path)}")
        return cls(path, columns[0], columns[1], bool(flags & _WITH_TAR))

    @classmethod
    def write(cls, path: str | Path, keys: Iterable[str], extend: "KeyIndex | None" = None) -> "KeyIndex":
        """Write an index of keys. The file appears at `path` only after it is complete.

        Args:
            path: The file to create or replace.
            keys: All keys, in any order; each once.
            extend: An older index. Its keys keep their numbers, whether or not they are among `keys`; new keys get the
                numbers that follow. To extend in place, `path` may be the file of this index.

        Returns:
            The new index.

        Raises:
            UserError: If there are no keys, a key occurs twice, or the file cannot be written.

        Example:
            >>> first = KeyIndex.write("first.keys", ["cat", "dog"])
            >>> longer = KeyIndex.write("longer.keys", ["emu"], extend=first)
            >>> longer["cat"] == first["cat"], longer["emu"]
            (True, 2)

        """
        all_keys = keys if isinstance(keys, Sequence) else list(keys)

        def entries() -> Iterator[tuple[str, str]]:
            return ((key, f"position {number}") for number, key in enumerate(all_keys))

        return write_entries(Path(path), entries, extend, with_tar=extend is not None and extend.with_tar)

    def numbers(self, keys: Iterable[str], tars: Iterable[str] | None = None) -> np.ndarray:
        """Return the numbers of keys, for the argument `index` of an objective.

        Args:
            keys: Keys, such as the `__key__` of every sample of a webdataset batch.
            tars: If the index was made with ``--with-tar``: the tar of every key, such as the `__url__` of the samples.
                Only the part after the last slash counts.

        Returns:
            (m,) int64.

        Raises:
            UnknownKeyError: A UserError and KeyError that names the first key that is not in the index.
            UserError: If the file is damaged.

        """
        names = list(keys)
        if tars is not None:
            names = [name_in_tar(tar, key) for tar, key in zip(tars, names, strict=True)]
        numbers = self._find(_hash(names))
        unknown = np.flatnonzero(numbers < 0)
        if len(unknown):
            key = names[int(unknown[0])]
            others = f" ({len(unknown):,} of these {len(names):,} keys are not in the index)" if len(names) > 1 else ""
            raise UnknownKeyError(f"{self.path}: no key {_quoted(key)}{others}; {self._hint(key)}")
        return numbers

    def __getitem__(self, key: str) -> int:
        return int(self.numbers([key])[0])

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self._find(_hash([key]))[0] >= 0)

    def __len__(self) -> int:
        return len(self._high)

    def __repr__(self) -> str:
        return f"KeyIndex({str(self.path)!r}, {len(self):,} keys)"

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyIndex.open, (self.path, False)

    def _hint(self, key: str) -> str:
        if self.with_tar and "/" not in key:
            return "it was made with --with-tar; pass the tars of the samples, as in numbers(keys, tars=urls)"
        return f"add it with `nuclr index SOURCE --extend {self.path} --out FILE`"

    def _find(self, hashes: _Hashes) -> np.ndarray:
        """Return the numbers of hashed keys, (m,) int64; -1 for unknown keys."""
        numbers = np.full(len(hashes.high), -1, np.int64)
        position = np.searchsorted(self._high, hashes.high)
        left = np.arange(len(numbers))
        while len(left):  # a second round is needed only if two keys agree in 64 bits
            left = left[position[left] < len(self)]
            left = left[self._high[position[left]] == hashes.high[left]]
            entries = self._entries[position[left]]
            same = entries >> _NUMBER_BITS == hashes.check[left]
            numbers[left[same]] = (entries[same] & _NUMBER).astype(np.int64)
            left = left[~same]
            position[left] += 1
        if len(numbers) and numbers.max() >= len(self):
            raise UserError(f"{self.path}: damaged: number {numbers.max()} of {len(self):,} keys")
        return numbers


def name_in_tar(tar: str, key: str) -> str:
    """Return the key of a sample in an index made with ``--with-tar``: the tar's name, a slash, and the key."""
    return f"{tar.rpartition('/')[2]}/{key}"


def write_entries(path: Path, entries: Entries, extend: KeyIndex | None = None, with_tar: bool = False) -> KeyIndex:
    """Write an index of the keys that `entries` yields; see `KeyIndex.write`.

    Args:
        path: The file to create or replace.
        entries: Called without arguments, returns (key, where it was found) for all keys.
        extend: An older index whose numbers are kept.
        with_tar: Whether keys are preceded by the name of their tar; stored in the file for messages.

    Returns:
        The new index.

    Raises:
        RepeatedKeyError: A UserError, if a key occurs twice.
        UserError: If there are no keys, two keys have the same hash, or the file cannot be written.

    """
    new = _hash(key for key, _ in entries())
    if not len(new.high) and extend is None:
        raise UserError(f"{path}: there are no keys to index")
    order = np.lexsort((new.check, new.high))
    new = _Hashes(new.high[order], new.check[order])
    _refuse_repeated(new, entries)
    high, check, numbers = new.high, new.check, np.arange(len(new.high), dtype=np.uint64)
    if extend is not None:
        unknown = extend._find(new) < 0
        old = extend._entries
        numbers = np.arange(len(extend), len(extend) + unknown.sum(), dtype=np.uint64)
        high = np.concatenate([extend._high, high[unknown]])
        check = np.concatenate([old >> _NUMBER_BITS, check[unknown]])
        numbers = np.concatenate([old & _NUMBER, numbers])
        order = np.lexsort((check, high))
        high, check, numbers = high[order], check[order], numbers[order]
    columns = np.stack([high, check << _NUMBER_BITS | numbers]).astype("<u8", copy=False)
    flags = _WITH_TAR if with_tar else 0
    header = _HEADER.pack(MAGIC, VERSION, flags, len(high), _checksum(flags, columns))
    with user_errors(path), write_atomically(path) as file:
        file.write(header)
        file.write(columns.data)
    return KeyIndex.open(path, verify=False)


def _hash(keys: Iterable[str]) -> _Hashes:
    """Return 88 bits of the hash of every key."""
    parts = []
    iterator = iter(keys)
    while digests := b"".join(map(_digest, itertools.islice(iterator, _CHUNK))):
        parts.append(np.frombuffer(digests, "<u8").reshape(-1, 2))
    both = np.concatenate(parts) if parts else np.empty((0, 2), "<u8")
    return _Hashes(both[:, 0].copy(), both[:, 1] >> _NUMBER_BITS)


def _digest(key: str) -> bytes:
    if not isinstance(key, str):
        raise UserError(f"a key must be a text, but is {key!r} of type {type(key).__name__}; convert it with str()")
    try:
        data = key.encode()
    except UnicodeEncodeError:
        # Python's tarfile keeps bytes that are not UTF-8 as lone surrogates; our reader replaces them.
        from_bytes = _OTHER_SURROGATES.sub("\ufffd", key).encode("utf-8", "surrogateescape")
        data = from_bytes.decode("utf-8", "replace").encode()
    return hashlib.blake2b(data, digest_size=16).digest()


def _refuse_repeated(hashes: _Hashes, entries: Entries) -> None:
    """Raise a UserError that names two keys with the same hash, which are the same key in practice."""
    high, check = hashes
    again = np.flatnonzero((high[1:] == high[:-1]) & (check[1:] == check[:-1]))
    if not len(again):
        return
    repeated = {(int(high[row]), int(check[row])) for row in again.tolist()}
    first: dict[tuple[int, int], tuple[str, str]] = {}
    for key, place in entries():
        one = _hash([key])
        both = int(one.high[0]), int(one.check[0])
        if both not in repeated:
            continue
        if both not in first:
            first[both] = key, place
            continue
        other, other_place = first[both]
        more = f"; {len(again):,} keys occur more than once" if len(again) > 1 else ""
        if other != key:
            raise UserError(
                f"{place}: key {_quoted(key)} has the same hash as key {_quoted(other)} of {other_place}; rename one"
            )
        where = f"twice in {place}" if place == other_place else f"in {other_place} and in {place}"
        raise RepeatedKeyError(f"key {_quoted(key)} occurs {where}{more}; every sample needs a key of its own")
    raise UserError("the keys changed while they were indexed")


def _quoted(key: str) -> str:
    return printable(repr(key if len(key) <= 200 else f"{key[:199]}…"))


def _checksum(flags: int, columns: np.ndarray) -> int:
    return zlib.crc32(columns.data, zlib.crc32(struct.pack("<IIQ", VERSION, flags, columns.shape[1])))


def _write_again(path: Path) -> str:
    return f"write it again with `nuclr index SOURCES --out {path}`"
