"""Pairs in img2dataset or webdataset tars, with random access through an index of the samples' positions.

Samples are numbered through all tars, in the order of the tars: a path, a folder (its tars by name), a pattern such as
`cc3m/{00000..00331}.tar` or `cc3m/*.tar`, or several of these joined by `::`.

Without `data.x.key` and `data.y.key`, a pair is an image and its caption: the `.txt`, or else the entry "caption" or
"captions" of the `.json`; or the two members that samples have, if these are texts or images. A key is

- the suffix of a member: `question.txt` is the member `000012.question.txt`. A `.txt` is a text, and another member an
  image, or what `data.x.modality` says;
- an entry of the sample's `.json`, if samples do not have a member with this suffix: a text, a list of numbers, or a
  list of these. `json:question` is always an entry.

Texts and vectors are read and checked once, when the index is made, and again whenever they are needed. The index has
about thirty bytes per pair in one memory-mapped file and no Python objects, so ten million samples fit into memory. It
is stored in the cache folder. If the size or modification time of a tar changes, the tars are indexed again.

Samples lost from a truncated tar keep their numbers (marked bad), so later tars are not renumbered. How many were lost
is taken from img2dataset's `00000_stats.json`, or else from the largest of the other tars.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nuclr.data.formats.choose import CAPTION_COLUMNS, Request, choose_columns
from nuclr.data.formats.columns import Heading, head_columns, read_item, split_cell
from nuclr.data.formats.tar_members import BLOCK, TarSample, iter_samples, member_name
from nuclr.data.modalities import Folder
from nuclr.data.modalities.base import boundary
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.modalities.text import check_text, digest, number_distinct
from nuclr.data.modalities.vector import check_vector, is_list_of_numbers
from nuclr.data.pairs import SIDES, BadSample, Pairs, Side, SideName
from nuclr.errors import UserError
from nuclr.files import file_stamp, find_cache_folder, parse_json, read_object, write_atomically
from nuclr.image_files import MAX_BYTES
from nuclr.remote import is_url, local_copies

_VERSION = 5
_PROBED = 1000  # samples of the first tar by which keys are understood
_MOST_SAMPLES = 1_000_000  # that img2dataset's statistics may promise for one tar
_MOST_CELLS = 32_767  # of one sample, because `which` has 16 bits
_MAX_TEXT = 16 * 2**20  # bytes of one .txt or .json
_OPEN_FILES = 512  # tars kept open, below the usual limit of 1024; the others are opened for each read
_TXT = -1  # `which` of a whole member
_IMAGES = tuple(suffix.removeprefix(".") for suffix in SUFFIXES)
_MODALITIES = {"txt": "text"}  # of members with these suffixes

# One row per pair. Blocks are positions in the tar, 0 if the member is missing. `which` is the position of the cell in
# the list of a .json. Equal cells have equal ids. `begins` marks the first pair of a sample.
ROW = np.dtype(
    {
        "names": ["x_block", "y_block", "x_size", "y_size", "x_id", "y_id", "x_which", "y_which", "begins"],
        "formats": ["<u4", "<u4", "<u4", "<u4", "<u4", "<u4", "<i2", "<i2", "?"],
    }
)

_SCANNED = np.dtype([(name, "<u8" if name.endswith("_id") else ROW[name]) for name in ROW.names or ()])


class Part(NamedTuple):
    """The part of a sample that is one side.

    Attributes:
        suffixes: those of its member, in order of preference; empty for the first image.
        entries: names of entries of a `.json`, in order of preference.

    """

    suffixes: tuple[str, ...]
    entries: tuple[str, ...] = ()

    def find(self, sample: TarSample) -> str | None:
        """Return the suffix of the member of a sample."""
        if self.suffixes:
            return next((suffix for suffix in self.suffixes if suffix in sample.members), None)
        return next((suffix for suffix in sample.members if suffix.endswith(_IMAGES)), None)

    def cells(self, data: bytes, suffix: str) -> Sequence[Any]:
        """Return the texts or vectors in a member.

        Raises:
            BadSample: if the member is damaged, or holds something else.

        """
        value: Any = data
        if suffix == "json" and self.entries:
            try:
                content = parse_json(data)
            except json.JSONDecodeError as error:
                raise BadSample(f"its .json cannot be read ({error.msg})") from None
            entries = content if isinstance(content, dict) else {}
            value = next((entries[name] for name in self.entries if name in entries), None)
        cells = split_cell(value)
        if len(cells) > _MOST_CELLS:
            raise BadSample(f".{suffix} holds more than {_MOST_CELLS:,} items")
        return cells


class Cell(NamedTuple):
    """One side of one pair: its position, its place in the member, a key that equal cells share, and why it is bad."""

    block: int
    size: int
    which: int
    key: int
    problem: str | None = None


class TarScanner:
    """Find the cells of one side in the samples of all tars.

    Args:
        part: the part of a sample.
        heading: what the side is called and holds.

    """

    def __init__(self, part: Part, heading: Heading) -> None:
        self.part = part
        self.heading = heading
        self._width = 0  # of the first vector
        self._missing = 2**62  # keys of missing members, which are all different

    def scan(
        self,
        descriptor: int,
        tar: int,
        sample: TarSample,
    ) -> list[Cell]:
        """Return the cells of a sample, or one with the reason if it has none."""
        what = self.heading.what
        suffix = self.part.find(sample)
        if suffix is None:
            self._missing += 1
            return [Cell(0, 0, _TXT, self._missing, f"no {what}")]
        block, size = sample.members[suffix]
        in_file = not (self.heading.modality.in_memory or self.part.entries)
        limit = MAX_BYTES if in_file else _MAX_TEXT
        if size > limit:
            too_large = f"{what} file too large; at most {limit // 2**20} MiB are allowed"
            return [Cell(block, 0, _TXT, tar << 32 | block, too_large)]
        if in_file:
            return [Cell(block, size, _TXT, tar << 32 | block, None if size else f"empty {what}")]
        try:
            values = self.part.cells(os.pread(descriptor, size, block * BLOCK), suffix)
        except BadSample as bad:
            return [Cell(block, 0, _TXT, digest(b""), bad.reason)]
        cells = []
        for position, value in enumerate(values):
            key, problem = self._check(value)
            cells.append(Cell(block, size, _TXT if isinstance(value, bytes) else position, key, problem))
        return cells

    def _check(self, value: Any) -> tuple[int, str | None]:
        """Return the key of a text or vector, and why it is bad."""
        try:
            if self.heading.modality.name != "vector":
                text, problem = check_text(value, self.heading.what)
                return digest(text.encode()), problem
            vector = check_vector(value, self.heading.what, self._width)
        except BadSample as bad:
            return digest(b""), bad.reason
        self._width = len(vector)
        return digest(vector.data), None


@dataclass
class TarScan:
    """The content of one tar.

    Attributes:
        rows: one per pair, with keys of the cells instead of ids.
        bad: row -> reason, for bad samples.
        truncated: whether the tar has lost its end.
        grouped: whether a sample has several x and several y.

    """

    rows: np.ndarray = field(default_factory=lambda: np.empty(0, _SCANNED))
    bad: dict[int, str] = field(default_factory=dict)
    truncated: bool = False
    grouped: bool = False


class TarPairs(Pairs):
    """Pairs in tars, with random access.

    Args:
        tars: the files, in the order of their samples' numbers.
        scanners: the two sides.
        rows: the index, (n,) of dtype ROW.
        meta: counts, bad samples and fingerprint, as `_index` stores them.

    """

    def __init__(
        self,
        tars: Sequence[Path],
        scanners: Sequence[TarScanner],
        rows: np.ndarray,
        meta: dict[str, Any],
    ) -> None:
        self._tars = tars
        self._parts = {side: scanner.part for side, scanner in zip(SIDES, scanners, strict=True)}
        self._rows = rows
        self._starts = np.cumsum([0, *meta["counts"]])
        self._descriptors: dict[int, int] = {}
        self.known_bad = meta["bad"]
        self.fingerprint: str = meta["fingerprint"]
        self.folder = tars[0].parent
        self._inside = Folder(self.folder, boundary(self.folder, allow_outside=False))
        self.label = tars[0].name if len(tars) == 1 else f"{tars[0].name} to {tars[-1].name}"
        self.sides = {}
        for side, scanner in zip(SIDES, scanners, strict=True):
            heading = scanner.heading
            self.sides[side] = Side(
                heading.name,
                heading.key,
                heading.modality,
                rows[f"{side}_id"].astype(np.int64),
            )
        if meta["grouped"]:
            self.group = np.cumsum(rows["begins"], dtype=np.int64) - 1

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptors": {}}  # open files cannot be sent to another process

    def __len__(self) -> int:
        return len(self._rows)

    def item(self, side: SideName, number: int) -> Any:
        """Return one item of a pair; an image is not decoded yet."""
        row = self._rows[number]
        modality = self.sides[side].modality
        part = self._parts[side]
        size = int(row[f"{side}_size"])
        if number in self.known_bad and (modality.in_memory or not size):
            raise BadSample(self.known_bad[number])
        if size > MAX_BYTES:
            raise BadSample("wrong size in the index of the tar")
        try:
            data = self._pread(self._tar(number), int(row[f"{side}_block"]), size)
        except OSError as error:
            raise BadSample(f"cannot be read ({error.strerror})") from None
        if len(data) < size:
            raise BadSample("truncated tar")
        cell: Any = data
        which = int(row[f"{side}_which"])
        if which != _TXT:
            cells = part.cells(data, part.suffixes[-1])
            cell = cells[which] if which < len(cells) else None
        return read_item(modality, cell, self._inside)

    def name(self, number: int) -> str:
        """Return the tar and the member, or the row within the tar if the member is lost."""
        tar = self._tar(number)
        row = self._rows[number]
        block = int(row["x_block"] or row["y_block"])
        try:
            member = member_name(self._pread(tar, block - 1, BLOCK)) if block else ""
        except OSError:
            member = ""
        name = self._tars[tar].name
        return f"{name}/{member}" if member else f"{name}, row {number - self._starts[tar]}"

    def stamp(self) -> str:
        """Return a hash that changes when the size or modification time of a tar does."""
        return _hash([file_stamp(tar) for tar in self._tars])

    def _tar(self, number: int) -> int:
        return int(np.searchsorted(self._starts, number, side="right")) - 1

    def _pread(
        self,
        tar: int,
        block: int,
        size: int,
    ) -> bytes:
        if tar >= _OPEN_FILES:
            with self._tars[tar].open("rb") as file:
                return os.pread(file.fileno(), size, block * BLOCK)
        # Two threads may open the same tar at once. One of the two descriptors then stays open until the process ends.
        if tar not in self._descriptors:
            self._descriptors[tar] = os.open(self._tars[tar], os.O_RDONLY)
        return os.pread(self._descriptors[tar], size, block * BLOCK)


def open_tars(tars: Sequence[Path], request: Request) -> TarPairs:
    """Open tars through their index, which is read from the cache or made.

    Args:
        tars: the files, in the order of their samples' numbers.
        request: what is known about both sides.

    Raises:
        UserError: if a file is not a tar, or no sample can be used.

    """
    with tars[0].open("rb") as file:
        samples = list(islice(iter_samples(file.fileno(), tars[0]), _PROBED))
        suffixes = list(dict.fromkeys(suffix for sample in samples for suffix in sample.members))
        request = replace(request, path=tars[0])
        keys, parts = _choose_parts(request, suffixes)
        known = {side: _modality(file.fileno(), samples, part) for side, part in parts.items()}
    known |= {side: choice.modality for side, choice in request.sides.items() if choice.modality is not None}
    names = {side: part.entries[0] if part.suffixes == ("json",) else _side_name(part) for side, part in parts.items()}
    headings = head_columns(request, names, {}, known)
    scanners = [TarScanner(parts[side], replace(headings[side], key=keys[side])) for side in SIDES]
    folder = find_cache_folder(tars[0].parent)
    key = _hash([_VERSION, [[str(tar.absolute()), *file_stamp(tar)] for tar in tars], parts, known])
    target = None if folder is None else folder / f"tars-{key}.json"
    rows, meta = _load(target, len(tars)) or _index(tars, scanners, target)
    if len(meta["bad"]) == len(rows):
        found = ", ".join(f".{suffix}" for suffix in sorted(suffixes)[:10]) or "nothing"
        first = f"; the first: {meta['bad'][min(meta['bad'])]}" if len(rows) else ""
        raise UserError(
            f"{tars[0]}: no sample can be used{first}; name members or entries of the .json with data.x.key and "
            f"data.y.key (found: {found})"
        )
    return TarPairs(tars, scanners, rows, meta)


def _choose_parts(
    request: Request,
    suffixes: Sequence[str],
) -> tuple[dict[SideName, str | None], dict[SideName, Part]]:
    """Return the keys and the parts of a sample that are the two sides."""
    keys: dict[SideName, str | None] = {side: request.sides[side].key for side in SIDES}
    images = [suffix for suffix in suffixes if suffix.endswith(_IMAGES)]
    members = images + [suffix for suffix in suffixes if suffix.endswith(tuple(_MODALITIES))]
    if request.views:
        keys["y"] = keys["x"]
    elif len(members) == 2 and None in keys.values():
        named = [key.lower() for key in keys.values() if key is not None]
        rest = [member for member in members if member not in named]
        if not named and not (images and {"txt", "json"} & set(suffixes)):  # not images with captions
            by_name = {_side_name(Part((member,))): member for member in members}
            columns = choose_columns(list(by_name), Request(request.path))
            keys = {side: by_name[column] for side, column in columns.items()}
        elif len(rest) == 1 and (keys["x"] is None or "txt" not in rest):
            keys = {side: key or rest[0] for side, key in keys.items()}
    parts: dict[SideName, Part] = {}
    for side, key in keys.items():
        if key is not None and key.lower() in suffixes and key.lower() != "json":
            parts[side] = Part((key.lower(),))
        elif key is not None:
            parts[side] = Part(("json",), (key.removeprefix("json:"),))
        else:
            parts[side] = Part(()) if side == "x" or request.views else Part(("txt", "json"), CAPTION_COLUMNS)
    return keys, parts


def _modality(
    descriptor: int,
    samples: Sequence[TarSample],
    part: Part,
) -> str:
    """Return the name of the modality of a part; that of an entry of the `.json` is recognized from its values."""
    if part.suffixes != ("json",):
        return _MODALITIES.get("".join(part.suffixes[:1]).rpartition(".")[2], "image")
    for sample in samples:
        block, size = sample.members.get("json", (0, 0))
        try:
            cells = part.cells(os.pread(descriptor, min(size, _MAX_TEXT), block * BLOCK), "json")
        except BadSample:
            continue
        if cells[0] is not None:
            return "vector" if is_list_of_numbers(cells[0]) else "text"
    return "text"


def _side_name(part: Part) -> str:
    """Return the name of a side: "question" for `question.txt`, "image" for `jpg` or any image."""
    stem, _, last = "".join(part.suffixes[:1]).rpartition(".")
    return stem or ("image" if last in (*_IMAGES, "") else _MODALITIES.get(last, last))


# -- index -------------------------------------------------------------------------------------------------------------


def _index(
    tars: Sequence[Path],
    scanners: Sequence[TarScanner],
    target: Path | None,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Index all tars and write the index to the cache.

    Returns:
        The rows of all tars, one tar after the other, and their metadata.

    """
    scans = [_scan(number, tar, scanners) for number, tar in enumerate(tars)]
    _pad(tars, scans)
    rows = np.concatenate([scan.rows for scan in scans])
    hashed = hashlib.sha256()
    for side, scanner in zip(SIDES, scanners, strict=True):
        in_files = scanner.heading.modality.in_files
        hashed.update(rows[f"{side}_block" if in_files else f"{side}_id"].tobytes())
        rows[f"{side}_id"] = number_distinct(rows[f"{side}_id"])
    bad: dict[int, str] = {}
    start = 0
    for scan in scans:
        bad |= {start + row: reason for row, reason in scan.bad.items()}
        start += len(scan.rows)
    meta = {
        "counts": [len(scan.rows) for scan in scans],
        "bad": bad,
        "grouped": any(scan.grouped for scan in scans),
        "fingerprint": hashed.hexdigest(),
    }
    rows = rows.astype(ROW)
    if target is not None:
        # The JSON is written last: its presence shows that the rows are complete. Without a cache, for example on a
        # full disk, the index is made again next time.
        with contextlib.suppress(OSError):
            with write_atomically(target.with_suffix(".rows"), sync=False) as file:
                file.write(rows.data)
            with write_atomically(target, sync=False) as file:
                file.write(json.dumps(meta).encode())
    return _load(target, len(tars)) or (rows, meta)


def _scan(
    number: int,
    tar: Path,
    scanners: Sequence[TarScanner],
) -> TarScan:
    """Return the pairs of a tar."""
    rows: list[tuple[Any, ...]] = []
    scan = TarScan()
    x_scanner, y_scanner = scanners
    with tar.open("rb") as file:
        descriptor = file.fileno()
        for sample in iter_samples(descriptor, tar):
            scan.truncated = sample.truncated
            xs = x_scanner.scan(descriptor, number, sample)
            ys = y_scanner.scan(descriptor, number, sample)
            if not (xs[0].block or ys[0].block or sample.truncated):
                continue  # neither side: not a sample
            scan.grouped = scan.grouped or min(len(xs), len(ys)) > 1
            for pair in range(max(len(xs), len(ys))):
                x = xs[pair % len(xs)]
                y = ys[pair % len(ys)]
                problem = "truncated tar" if sample.truncated else x.problem or y.problem
                if problem is not None:
                    scan.bad[len(rows)] = problem
                rows.append((x.block, y.block, x.size, y.size, x.key, y.key, x.which, y.which, pair == 0))
    scan.rows = np.array(rows, _SCANNED)
    return scan


def _pad(tars: Sequence[Path], scans: Sequence[TarScan]) -> None:
    """Add bad rows for the samples that truncated tars have lost, so that later tars are not renumbered."""
    longest = max((len(scan.rows) for scan in scans if not scan.truncated), default=0)
    for number, scan in enumerate(scans):
        if scan.truncated:
            count = len(scan.rows)
            is_last = number + 1 == len(tars)
            expected = _count_by_img2dataset(tars[number]) or (0 if is_last else longest)
            lost = np.arange(count, max(expected, count), dtype=np.uint64)
            padding = np.zeros(len(lost), _SCANNED)
            for side in SIDES:
                padding[f"{side}_id"] = lost + np.uint64(2**63 + number * 2**32)  # different from all others
            padding["begins"] = True
            scan.rows = np.concatenate([scan.rows, padding])
            scan.bad |= dict.fromkeys(lost.tolist(), "truncated tar")


def _count_by_img2dataset(tar: Path) -> int | None:
    """Return the number of samples in img2dataset's statistics file, or None without a plausible one."""
    try:
        count = int(read_object(tar.with_name(f"{tar.stem}_stats.json"))["successes"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return count if count <= _MOST_SAMPLES else None


def _load(path: Path | None, tars: int) -> tuple[np.ndarray, dict[str, Any]] | None:
    """Return a stored index of some tars, or None if there is none or it is damaged."""
    if path is None:
        return None
    try:
        meta = read_object(path)
        rows = np.memmap(path.with_suffix(".rows"), ROW, "r")
        counts = np.array(meta["counts"], np.int64)
        bad = {int(number): str(reason) for number, reason in meta["bad"].items()}
        is_whole = counts.shape == (tars,) and counts.min() >= 0 and counts.sum() == len(rows)
        if not is_whole or not all(0 <= number < len(rows) for number in bad):
            return None
        return rows, meta | {"bad": bad, "grouped": bool(meta["grouped"]), "fingerprint": str(meta["fingerprint"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


# -- names of tars -----------------------------------------------------------------------------------------------------


def expand(pattern: str) -> list[Path]:
    """Return the tars of a pattern; those at URLs are downloaded.

    Args:
        pattern: parts joined by `::`. Each is a path, a folder or the URL of a tar, and may contain `{00000..00012}` or
            `{a,b}`, and a path also `*`, `?` and `[0-9]`.

    Raises:
        UserError: if a tar is missing or a folder has no tar.

    """
    tars: list[Path | str] = []  # texts are URLs
    for part in split_parts(pattern):
        for name in expand_braces(part):
            tars += [name] if is_url(name) else _local_tars(name)
    missing = [tar for tar in tars if isinstance(tar, Path) and not tar.is_file()]
    if missing:
        raise UserError(f"{missing[0]}: no such file ({len(missing)} of the {len(tars)} tars are missing)")
    copies = iter(local_copies([tar for tar in tars if isinstance(tar, str)]))
    return [tar if isinstance(tar, Path) else next(copies) for tar in tars]


def _local_tars(name: str) -> list[Path]:
    """Return the tars of a path, of a folder, or of a pattern with `*`, `?` or `[...]`."""
    path = Path(name)
    if path.is_dir():
        found = sorted(path.glob("*.tar"))
    elif glob.has_magic(name) and not path.exists():
        found = [Path(match) for match in sorted(glob.glob(name))]  # noqa: PTH207 (a pattern may be absolute)
    else:
        found = [path]
    wrong = [tar.name for tar in found if tar.suffix.lower() != ".tar"]
    if wrong or not found:
        raise UserError(f"{name}: {wrong[0] if wrong else 'no file'} matches; needs tars")
    return found


def split_parts(pattern: str) -> list[str]:
    """Return the parts that `::` joins; `::` within the brackets of an address, `http://[::1]/a.tar`, is not meant."""
    return re.split(r"::(?![^\[\]/]*\])", pattern)


def expand_braces(pattern: str) -> list[str]:
    """Return the names that `{00000..00012}` and `{a,b}` in a pattern stand for, in order."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    first, last, names = match.groups()
    if names is None:
        choices = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        choices = names.split(",")
    head = pattern[: match.start()]
    tails = expand_braces(pattern[match.end() :])
    return [head + choice + tail for choice in choices for tail in tails]
