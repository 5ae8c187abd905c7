"""Pairs in img2dataset or webdataset tars, read at random through an index of where each sample lies.

Tars are numbered through in the order given: a path, a folder (its tars by name), a brace pattern such as
`cc3m/{00000..00331}.tar`, several of these joined by `::`. The index has thirty bytes a pair in one memory-mapped file,
and no Python object for any: ten million samples fit. It is kept in the cache folder and made anew, for the tars
concerned, when the size or the time of a tar changes.

A truncated tar keeps the numbers of what it has lost, so that those of the tars after it stay: as many as a former
index, img2dataset's `00000_stats.json` or else the longest of the other tars tells. All of these are bad samples.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from nuclr.data.formats.tar_index import BLOCK, ROW, TXT, Scan, caption_of, member_name, read_at, scan_tar
from nuclr.data.modalities.image import open_image
from nuclr.data.pairs import BadSample
from nuclr.data.texts import digest, number_distinct
from nuclr.errors import UserError
from nuclr.files import file_stamp, find_cache_folder, write_atomically

_VERSION = 1
_OPEN_FILES = 512  # below the usual limit of 1024; the tars beyond are opened for each read


class TarPairs:
    """Random access to all samples of `tars`, through `rows` (n,) of dtype ROW and `meta` as `_index` makes them."""

    x_kind = "image"
    y_kind = "text"

    def __init__(self, tars: Sequence[Path], rows: np.ndarray, meta: dict[str, Any], y_key: str | None) -> None:
        self._tars, self._rows, self._y_key = tars, rows, y_key
        self._starts = np.cumsum([0, *meta["counts"]])
        self._descriptors: dict[int, int] = {}
        self.known_bad = {int(number): reason for number, reason in meta["bad"].items()}
        self.fingerprint: str = meta["fingerprint"]
        self.folder = tars[0].parent
        self.x_id = np.cumsum(rows["first"], dtype=np.int64) - 1
        self.y_id = rows["y_id"].astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def x(self, number: int) -> Image.Image:
        """The image of the sample."""
        row = self._rows[number]
        if row["image"] == 0:
            raise BadSample(self.known_bad.get(number, "no image"))
        return open_image(self._member(number, int(row["image"]), int(row["image_size"])))

    def y(self, number: int) -> str:
        """The caption of the sample."""
        if number in self.known_bad:
            raise BadSample(self.known_bad[number])
        row = self._rows[number]
        data = self._member(number, int(row["text"]), int(row["text_size"]))
        try:
            return caption_of(data, int(row["which"]), self._y_key)
        except (ValueError, LookupError, TypeError):
            raise BadSample("caption cannot be read") from None

    def name(self, number: int) -> str:
        """Tar and member, or the place in the tar where there is no such member (any more)."""
        tar, row = self._tar(number), self._rows[number]
        block = int(row["image"] or row["text"])
        found = member_name(self._descriptor(tar), block) if block else ""
        return (
            f"{self._tars[tar].name}/{found}" if found else f"{self._tars[tar].name}, row {number - self._starts[tar]}"
        )

    def stamp(self) -> str:
        """Changes when the size or the time of a tar does."""
        return hashlib.sha256(json.dumps([file_stamp(tar) for tar in self._tars]).encode()).hexdigest()

    def _tar(self, number: int) -> int:
        if not 0 <= number < len(self):
            raise IndexError(f"number {number}; allowed: 0 to {len(self) - 1}")
        return int(np.searchsorted(self._starts, number, side="right")) - 1

    def _member(self, number: int, block: int, size: int) -> bytes:
        tar = self._tar(number)
        if tar < _OPEN_FILES:
            data = read_at(self._descriptor(tar), block, size)
        else:
            with self._tars[tar].open("rb") as file:
                data = read_at(file.fileno(), block, size)
        if len(data) < size:
            raise BadSample("truncated tar")
        return data

    def _descriptor(self, tar: int) -> int:
        # Two threads may open the same tar at once; one of the two descriptors is then left to the process's end.
        if tar not in self._descriptors:
            self._descriptors[tar] = os.open(self._tars[tar], os.O_RDONLY)
        return self._descriptors[tar]


def open_tars(tars: Sequence[Path], x_key: str | None = None, y_key: str | None = None) -> TarPairs:
    """Index the tars, or take the index from the cache."""
    folder = find_cache_folder(tars[0].parent)
    stem = f"tars-{_hash([_VERSION, [str(tar.absolute()) for tar in tars], x_key, y_key])}"
    stamps = [file_stamp(tar) for tar in tars]
    target = folder / f"{stem}-{_hash(stamps)}.json" if folder else None
    rows, meta = (_load(target) if target else None) or _index(tars, stamps, x_key, y_key, target)
    return TarPairs(tars, rows, meta, y_key)


def expand(pattern: str) -> list[Path]:
    """Tars of a pattern: parts joined by `::`, each a path, a folder, or with `{00000..00012}` or `{a,b}` in it."""
    tars = []
    for part in pattern.split("::"):
        for path in map(Path, _braces(part)):
            inside = sorted(path.glob("*.tar")) if path.is_dir() else [path]
            if not inside:
                raise UserError(f"{path}: no .tar file in it")
            tars += inside
    missing = [tar for tar in tars if not tar.is_file()]
    if missing:
        raise UserError(f"{missing[0]}: no such file ({len(missing)} of the {len(tars)} tars are missing)")
    return tars


def _braces(pattern: str) -> list[str]:
    match = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    first, last, names = match.groups()
    if names is None:
        choices = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        choices = names.split(",")
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [head + choice + rest for choice in choices for rest in _braces(tail)]


def _index(
    tars: Sequence[Path], stamps: list[list[int]], x_key: str | None, y_key: str | None, target: Path | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Rows of all tars, one tar after the other in one file, and what goes with them; written to the cache."""
    former = _former(target)
    with tempfile.TemporaryFile(dir=target.parent if target else None) as file:
        counts, bad, cut, suffixes = [], [], [], set()
        for number, (tar, stamp) in enumerate(zip(tars, stamps, strict=True)):
            scan = _scan(tar, stamp, x_key, y_key, former and _part(*former, number))
            file.write(scan.rows.tobytes())
            counts.append(len(scan.rows))
            bad.append(scan.bad)
            cut.append(scan.truncated)
            suffixes |= scan.suffixes
        rows = _mapped(file, sum(counts))
        rows, counts, bad = _pad(tars, rows, counts, bad, cut)
        _refuse_useless(tars, rows, suffixes)
        rows["y_id"] = number_distinct(rows["digest"])
    starts = np.cumsum([0, *counts])
    meta = {
        "stamps": stamps,
        "counts": counts,
        "truncated": cut,
        "bad": {int(starts[tar]) + row: why for tar, reasons in enumerate(bad) for row, why in reasons.items()},
        "fingerprint": hashlib.sha256(b"".join(rows[name].tobytes() for name in ("image", "digest"))).hexdigest(),
    }
    if target is not None:
        _store(target, rows, meta)
    return (_load(target) if target else None) or (rows, meta)


def _scan(tar: Path, stamp: list[int], x_key: str | None, y_key: str | None, former: Any) -> Scan:
    """What the tar holds now; where it lost its end since it was last indexed, what it held then."""
    if former and former["stamp"] == stamp:
        return Scan(former["rows"], former["bad"], set(), former["truncated"])
    scan = scan_tar(tar, x_key, y_key)
    whole = len(scan.rows) - 1
    if not (scan.truncated and former and len(former["rows"]) > whole):
        return scan
    rows = former["rows"]
    if not np.array_equal(rows["digest"][:whole], scan.rows["digest"][:whole]):
        return scan
    ends = [(rows[place].astype(np.int64) * BLOCK + rows[f"{place}_size"]) for place in ("image", "text")]
    lost = np.flatnonzero(np.maximum(*ends) > stamp[0]).tolist()
    return Scan(rows, former["bad"] | dict.fromkeys(lost, "truncated tar"), set(), True)


def _pad(
    tars: Sequence[Path], rows: np.ndarray, counts: list[int], bad: list[dict[int, str]], truncated: list[bool]
) -> tuple[np.ndarray, list[int], list[dict[int, str]]]:
    """Numbers for what truncated tars have lost, so that those of the tars after them stay."""
    longest = max((count for count, cut in zip(counts, truncated, strict=True) if not cut), default=0)
    expected = [
        max(count, _stated(tar) or (longest if number + 1 < len(tars) else 0)) if cut else count
        for number, (tar, count, cut) in enumerate(zip(tars, counts, truncated, strict=True))
    ]
    if expected == counts:
        return rows, counts, bad
    lost = np.array([(0, 0, 0, 0, TXT, True, digest(b""), 0)], ROW)
    parts = np.split(rows, np.cumsum(counts)[:-1])
    padded = [[part, lost.repeat(more - len(part))] for part, more in zip(parts, expected, strict=True)]
    reasons = [
        found | dict.fromkeys(range(count, more), "truncated tar")
        for found, count, more in zip(bad, counts, expected, strict=True)
    ]
    return np.concatenate([part for pair in padded for part in pair]), expected, reasons


def _stated(tar: Path) -> int | None:
    """The number of samples by img2dataset's own account."""
    try:
        return int(json.loads(tar.with_name(f"{tar.stem}_stats.json").read_text(encoding="utf-8"))["successes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _refuse_useless(tars: Sequence[Path], rows: np.ndarray, suffixes: set[str]) -> None:
    where = f"{tars[0]}{f' and {len(tars) - 1} more' if len(tars) > 1 else ''}"
    found = ", ".join(f".{suffix}" for suffix in sorted(suffixes)[:10]) or "nothing"
    if not len(rows) or not rows["image"].any():
        raise UserError(f"{where}: no sample with an image (found: {found})")
    if not rows["text"].any():
        raise UserError(f"{where}: no sample with a caption; needs .txt, or .json with y_key (found: {found})")


def _mapped(file: IO[bytes], count: int) -> np.ndarray:
    file.flush()
    return np.memmap(file, ROW, "r+", shape=(count,)) if count else np.empty(0, ROW)


def _store(target: Path, rows: np.ndarray, meta: dict[str, Any]) -> None:
    """Rows first: the JSON, written last and under its final name, says that all is there."""
    try:
        former = set(target.parent.glob(f"{_stem(target)}-*.[jr]*"))
        for path, content in ((target.with_suffix(".rows"), rows.data), (target, json.dumps(meta).encode())):
            with write_atomically(path, sync=False) as file:
                file.write(content)
        for path in former - {target, target.with_suffix(".rows")}:
            path.unlink(missing_ok=True)
    except OSError:
        return  # no room for the index: it is made again next time


def _load(path: Path) -> tuple[np.ndarray, dict[str, Any]] | None:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        rows = np.memmap(path.with_suffix(".rows"), ROW, "r")
    except (OSError, ValueError):
        return None
    return (rows, meta) if len(rows) == sum(meta["counts"]) else None


def _former(target: Path | None) -> tuple[np.ndarray, dict[str, Any]] | None:
    """The index of the same tars as they were before one of them changed."""
    found = sorted(target.parent.glob(f"{_stem(target)}-*.json")) if target else []
    return _load(found[-1]) if found else None


def _part(rows: np.ndarray, meta: dict[str, Any], tar: int) -> dict[str, Any]:
    begin = sum(meta["counts"][:tar])
    end = begin + meta["counts"][tar]
    bad = {int(n) - begin: reason for n, reason in meta["bad"].items() if begin <= int(n) < end}
    return {"rows": rows[begin:end], "bad": bad, "stamp": meta["stamps"][tar], "truncated": meta["truncated"][tar]}


def _stem(target: Path) -> str:
    return target.stem.rpartition("-")[0]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
