"""Pairs in tars that are not images with captions: two texts, texts and vectors, images and vectors, images alone.

`data.x.key` and `data.y.key` say which parts of a sample form the pair (see `tar_index` for what a sample is):

- the suffix of a member: `question.txt` is the member `000012.question.txt`. A `.txt` is a text, a `.npy` a vector or
  several (a matrix), and another member an image, or what `data.x.modality` says;
- an entry of the sample's `.json`, if samples do not have a member with this suffix: a text, a list of numbers, or a
  list of these. `json:question` is always an entry.

Keys may be left out if samples have exactly two members that are texts, vectors or images.

Texts and vectors are read into memory when the tars are opened. Of images, the positions are kept. After a damaged tar,
the samples of later tars have other numbers than before; a resumed run then does not recognize its data.
"""

import contextlib
import dataclasses
import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nuclr.data.formats.choose import Choice, SideChoice, choose_columns
from nuclr.data.formats.columns import Column, make_column, read_cell
from nuclr.data.formats.listed import ColumnMaker, ListedPairs, Row, open_listed
from nuclr.data.formats.tar_index import (
    MAX_CAPTIONS,
    MAX_TEXT,
    TarFiles,
    TruncatedTar,
    iter_members,
    read_at,
    split_name,
)
from nuclr.data.modalities import Folder
from nuclr.data.modalities.base import boundary
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.modalities.vector import is_list_of_numbers
from nuclr.data.pairs import BadSample
from nuclr.data.texts import number_distinct
from nuclr.errors import UserError
from nuclr.files import file_stamp, parse_json, parse_npy
from nuclr.image_files import MAX_BYTES

_PROBED = 1000  # members of the first tar by which keys are understood
_IMAGES = tuple(suffix.removeprefix(".") for suffix in SUFFIXES)

Parts = dict[str, tuple[int, int]]  # suffix -> position in blocks, size


class Member(NamedTuple):
    """Which part of a sample is one side.

    Attributes:
        suffix: the suffix of the member; "" for that of any image.
        entry: the entry of the `.json`, or None for the whole member.
        kind: the modality; None to recognize it from the entry's values.

    """

    suffix: str
    entry: str | None
    kind: str | None

    def find(self, parts: Parts) -> tuple[int, int] | None:
        """Return the position and size of the member in a sample."""
        if self.suffix:
            return parts.get(self.suffix)
        return next((extent for suffix, extent in parts.items() if suffix.endswith(_IMAGES)), None)


_ANY_IMAGE = Member("", None, "image")


def find_members(tars: Sequence[Path], choice: Choice) -> tuple[Member, Member] | None:
    """Return the parts of a sample that the settings name, or None if they are an image and its caption.

    Raises:
        UserError: if the settings name no part for one of the sides.

    """
    suffixes = _suffixes(tars[0])
    if not choice.views:
        choice = _choose_two(suffixes, choice, tars[0])
    x = _member(choice.x, suffixes)
    if choice.views:
        if x is None and suffixes and not _images(suffixes):
            raise UserError(
                f"{tars[0]}: data.contrast=views needs images, but found only {_list(suffixes)}; leave it out"
            )
        return x or _ANY_IMAGE, x or _ANY_IMAGE
    y = _member(choice.y, suffixes)
    if (x or _ANY_IMAGE).kind == "image" and (y is None or _is_caption(y)):
        return None
    if y is not None and x is None and y.kind != "image" and (_images(suffixes) or not suffixes):
        x = _ANY_IMAGE
    if x is None or y is None:
        side = "x" if x is None else "y"
        fix = f"name the member or the entry of side {side} with data.{side}.key"
        raise UserError(f"{tars[0]}: {fix} (found: {_list(suffixes)})")
    return x, y


def _list(suffixes: Sequence[str]) -> str:
    return ", ".join(f".{suffix}" for suffix in sorted(suffixes)[:10]) or "nothing"


def _images(suffixes: Sequence[str]) -> list[str]:
    return [suffix for suffix in suffixes if suffix.endswith(_IMAGES)]


def _choose_two(suffixes: Sequence[str], choice: Choice, tar: Path) -> Choice:
    """Return the settings with the keys that they leave out, if samples have exactly two members that can be a pair."""
    images = _images(suffixes)
    members = images + [suffix for suffix in suffixes if suffix.endswith(("txt", "npy"))]
    x, y = (None if side.key is None else side.key.lower() for side in (choice.x, choice.y))
    captioned = x in (None, *images) and y is None and images and {"txt", "json"} & set(suffixes)
    if captioned or len(members) != 2:
        return choice
    if x is None and y is None:
        by_name = {_side_name(suffix): suffix for suffix in members}
        x, y = (by_name[name] for name in choose_columns(list(by_name), Choice(), tar))
    elif y is None and x in members:
        y = members[members[0] == x]
    elif x is None and y in members:
        x = members[members[0] == y]
    else:
        return choice
    return Choice(dataclasses.replace(choice.x, key=x), dataclasses.replace(choice.y, key=y))


def _side_name(suffix: str) -> str:
    """Return the name of a side: "question" for `question.txt`, "image" for `jpg` or any image ("")."""
    stem, _, last = suffix.rpartition(".")
    if last in (*_IMAGES, ""):
        return stem or "image"
    return (stem or {"txt": "text", "npy": "vector"}[last]) if last in ("txt", "npy") else suffix


def _is_caption(member: Member) -> bool:
    """Return whether the index of images and captions can read the member."""
    return member.suffix in ("txt", "json") and member.kind in (None, "text") and member.entry != ""


def _member(side: SideChoice, suffixes: Sequence[str]) -> Member | None:
    if side.key is None:
        if side.kind not in (None, "image", "text"):
            raise UserError(f"data.{side.side}.modality={side.kind}: name its member with data.{side.side}.key")
        return None
    suffix = side.key.lower()
    if side.key.startswith("json:") or suffix == "json" or suffix not in suffixes:
        return Member("json", side.key.removeprefix("json:"), side.kind)
    known = {"txt": "text", "npy": "vector"}.get(suffix.rpartition(".")[2], "image")
    return Member(suffix, None, side.kind or known)


def _suffixes(tar: Path) -> list[str]:
    """Return the suffixes of the first members, in the order of their first occurrence."""
    suffixes = dict[str, None]()
    with tar.open("rb") as file, contextlib.suppress(TruncatedTar):
        for name, _, _ in islice(iter_members(file.fileno(), tar), _PROBED):
            suffixes[split_name(name)[1].lower()] = None
    return [suffix for suffix in suffixes if suffix]


def open_tar_columns(tars: Sequence[Path], choice: Choice, members: tuple[Member, Member]) -> ListedPairs:
    """Open tars as two columns.

    Args:
        tars: the files, in the order of their samples' numbers.
        choice: the settings of both sides.
        members: the parts of a sample, from `find_members`.

    Raises:
        UserError: if a file is not a tar, or no sample has both parts.

    """
    files, folder = TarFiles(tars), tars[0].parent
    readers = [_Reader(member, files, folder) for member in members]
    names = [member.entry or _side_name(member.suffix) for member in members]
    rows = _rows(tars, readers)
    kinds, makers = (readers[0].kind, readers[1].kind), (readers[0].maker, readers[1].maker)
    pairs = open_listed(rows, tars[0], None, False, choice, (names[0], names[1]), "sample", kinds, makers)
    pairs.label = tars[0].name if len(tars) == 1 else f"{tars[0].name} to {tars[-1].name}"
    pairs.x_key, pairs.y_key = choice.x.key or members[0].suffix or None, choice.y.key or members[1].suffix or None
    if len(pairs.known_bad) == len(pairs):
        raise UserError(f"{tars[0]}: no sample can be used; the first: {pairs.known_bad[0]}")
    return pairs


class _Reader:
    """How one side of a sample is read: a text or vector into memory, or only the position of the member."""

    def __init__(self, member: Member, files: TarFiles, folder: Path) -> None:
        self._member, self.kind = member, member.kind
        self.maker: ColumnMaker = make_column
        self._in_memory = member.entry is not None or member.kind in ("text", "vector")
        if not self._in_memory:
            kind = str(member.kind)
            self.maker = lambda *_: TarColumn(kind, files, folder)

    def value(self, descriptor: int, tar: int, parts: Parts) -> Any:
        """Return the value of this side of a sample, None if it is missing.

        Raises:
            BadSample: if it cannot be read.

        """
        extent = self._member.find(parts)
        if extent is None:
            return None
        if not self._in_memory:
            return (tar, *extent)
        if extent[1] > MAX_TEXT:
            raise BadSample(f".{self._member.suffix} too large; at most {MAX_TEXT // 2**20} MiB are allowed")
        data = read_at(descriptor, *extent)
        if self._member.entry is not None:
            return _entry(data, self._member.entry)
        return _vectors(data, self._member.suffix) if self._member.suffix.endswith("npy") else data


def _vectors(data: bytes, suffix: str) -> Any:
    try:
        array = parse_npy(data)
    except ValueError as error:
        raise BadSample(f".{suffix} cannot be read: {error}") from None
    if array.ndim not in (1, 2):
        raise BadSample(f".{suffix} has shape {array.shape}; needs a vector, or a matrix of vectors")
    if array.ndim == 1:
        return array
    if len(array) > MAX_CAPTIONS:
        raise BadSample(f".{suffix} holds {len(array):,} vectors; at most {MAX_CAPTIONS:,} are allowed")
    return list(array)


def _entry(data: bytes, name: str) -> Any:
    try:
        content = parse_json(data)
    except json.JSONDecodeError as error:
        raise BadSample(f"its .json cannot be read ({error.msg})") from None
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, str | list | None):
        raise BadSample(f"{name!r} in its .json is neither a text nor a list")
    if isinstance(value, list) and len(value) > MAX_CAPTIONS and not is_list_of_numbers(value):
        raise BadSample(f"{name!r} in its .json holds {len(value):,} items; at most {MAX_CAPTIONS:,} are allowed")
    return value


def _rows(tars: Sequence[Path], readers: list[_Reader]) -> Iterator[Row]:
    number = -1
    for tar, path in enumerate(tars):
        with path.open("rb") as file:
            for parts, problem in _samples(file.fileno(), path):
                values: list[Any] = [None, None]
                try:
                    values = [reader.value(file.fileno(), tar, parts) for reader in readers]
                except BadSample as bad:
                    problem = problem or bad.reason
                if problem is None and all(value is None for value in values):
                    continue  # neither side: not a sample
                number += 1
                yield values[0], values[1], problem, number


def _samples(descriptor: int, path: Path) -> Iterator[tuple[Parts, str | None]]:
    """Yield the members of every sample, and what is wrong with it or None."""
    key, parts, problem = "", Parts(), None
    try:
        for name, extent, problem_of_member in iter_members(descriptor, path):
            sample, suffix = split_name(name)
            if not suffix:
                continue
            if sample != key:
                if parts:
                    yield parts, problem
                key, parts, problem = sample, {}, None
            problem = problem or problem_of_member
            parts.setdefault(suffix.lower(), extent)
    except TruncatedTar:
        yield {}, "truncated tar"
        return
    if parts:
        yield parts, problem


class TarColumn(Column):
    """Members of tars, of which the positions are kept. A cell is (tar, block, size) or None.

    Args:
        kind: the modality.
        files: the tars.
        folder: the folder of the tars.

    """

    def __init__(self, kind: str, files: TarFiles, folder: Path) -> None:
        self.kind, self._files = kind, files
        self.folder = Folder(folder, boundary(folder, allow_outside=False))
        self._positions = array("q")  # three numbers per cell

    def append(self, cell: Any) -> str | None:
        """Add the position of a member."""
        tar, block, size = cell or (0, 0, 0)
        too_large = size > MAX_BYTES
        self._positions.extend((tar, block, 0 if too_large else size))
        if too_large:
            return f"{self.kind} file too large; at most {MAX_BYTES // 2**20} MiB are allowed"
        return None if cell is not None else f"no {self.kind}"

    def repeat(self, number: int) -> None:
        """Add the position of pair `number` again."""
        self._positions.extend(self._positions[3 * number : 3 * number + 3])

    def __len__(self) -> int:
        return len(self._positions) // 3

    def __getitem__(self, number: int) -> Any:
        tar, block, size = self._positions[3 * number : 3 * number + 3]
        if not size:
            raise BadSample(f"no {self.kind}" if not block else f"empty {self.kind}")
        return read_cell(self.kind, self._files.read(tar, block, size), self.folder)

    def ids(self) -> np.ndarray:
        """Return the number of each distinct member."""
        tar, block, _ = np.frombuffer(self._positions, np.int64).reshape(-1, 3).T
        return number_distinct((tar << 33) + block)

    def fingerprint(self) -> bytes:
        """Return a hash of all positions."""
        return hashlib.sha256(self._positions).hexdigest().encode()

    def name(self, number: int) -> str | None:
        """Return the tar and the member."""
        tar, block, _ = self._positions[3 * number : 3 * number + 3]
        member = self._files.member_name(tar, block)
        return f"{self._files.tars[tar].name}/{member}" if member else None

    def stamp(self, ids: np.ndarray) -> str:  # noqa: ARG002
        """Return a hash that changes when the size or modification time of a tar does."""
        return hashlib.sha256(json.dumps([file_stamp(tar) for tar in self._files.tars]).encode()).hexdigest()
