"""Pairs in img2dataset or webdataset tars, with random access through an index of the samples' positions.

Samples are numbered through all tars, in the order of the tars: a path, a folder (its tars by name), a pattern such as
`cc3m/{00000..00331}.tar` or `cc3m/*.tar`, or several of these joined by `::`. The index has about thirty bytes per pair
in one memory-mapped file and no Python objects, so ten million samples fit into memory. It is stored in the cache
folder. If the size or modification time of a tar changes, that tar is indexed again.

Samples lost from a truncated tar keep their numbers (marked bad), so later tars are not renumbered. How many were lost
is taken from the previous index, from img2dataset's `00000_stats.json`, or else from the largest of the other tars.

A damaged tar is read by its previous index only as far as captions in the file still have the digests of the index. The
digest is compared again whenever a caption is read.
"""

import glob
import hashlib
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from nuclr.data.formats.choose import Choice
from nuclr.data.formats.listed import ListedPairs
from nuclr.data.formats.tar_columns import find_members, open_tar_columns
from nuclr.data.formats.tar_index import BLOCK, ROW, TXT, Scan, TarFiles, caption_of, scan_tar, verify_rows
from nuclr.data.modalities.image import open_image
from nuclr.data.pairs import BadSample, Checkable
from nuclr.data.texts import digest, number_distinct
from nuclr.errors import UserError
from nuclr.files import file_stamp, find_cache_folder, parse_json, write_atomically
from nuclr.remote import file_name, is_url, list_folder, local_copies

_VERSION = 2
_LOST = ("truncated tar", "damaged tar")  # reasons of samples that may be good again after a repair
_MOST_SAMPLES = 1_000_000  # that img2dataset's statistics may promise for one tar
_LOST_ROW = (0, 0, 0, 0, TXT, True, digest(b""), 0)  # of the index, for a sample whose position is not known


class TarPairs(Checkable):
    """Pairs in tars, with random access.

    Args:
        tars: the files, in the order of their samples' numbers.
        rows: the index, (n,) of dtype ROW, from `_index`.
        meta: counts, bad samples and fingerprint, from `_index`.
        y_key: the entry of the `.json` files that holds the captions, or None for the usual ones.

    """

    x_kind = x_name = "image"
    y_kind = y_name = "text"

    def __init__(self, tars: Sequence[Path], rows: np.ndarray, meta: dict[str, Any], y_key: str | None) -> None:
        self._files, self._rows, self._y_key = TarFiles(tars), rows, y_key
        self._starts = np.cumsum([0, *meta["counts"]])
        self.known_bad = {int(number): reason for number, reason in meta["bad"].items()}
        self.fingerprint: str = meta["fingerprint"]
        self.folder = tars[0].parent
        self.label = tars[0].name if len(tars) == 1 else f"{tars[0].name} to {tars[-1].name}"
        self.x_id = np.cumsum(rows["first"], dtype=np.int64) - 1
        self.y_id = rows["y_id"].astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def x(self, number: int) -> Image.Image:
        """Return the image, not decoded yet."""
        row = self._rows[number]
        if row["image"] == 0 or row["image_size"] == 0:
            raise BadSample(self.known_bad.get(number, "no image" if row["image"] == 0 else "empty image"))
        return open_image(self._member(number, int(row["image"]), int(row["image_size"])))

    def y(self, number: int) -> str:
        """Return the caption."""
        if number in self.known_bad:
            raise BadSample(self.known_bad[number])
        row = self._rows[number]
        data = self._member(number, int(row["text"]), int(row["text_size"]))
        try:
            caption = caption_of(data, int(row["which"]), self._y_key)
        except ValueError:
            raise BadSample("caption cannot be read") from None
        if digest(caption.encode()) != int(row["digest"]):
            raise BadSample("caption differs from the index of the tar")
        return caption

    def name(self, number: int) -> str:
        """Return the tar and the member, or the row within the tar if the member is lost."""
        tar, row = self._tar(number), self._rows[number]
        member = self._files.member_name(tar, int(row["image"] or row["text"]))
        return self._files.tars[tar].name + (f"/{member}" if member else f", row {number - self._starts[tar]}")

    def stamp(self) -> str:
        """Return a hash that changes when the size or modification time of a tar does."""
        return hashlib.sha256(json.dumps([file_stamp(tar) for tar in self._files.tars]).encode()).hexdigest()

    def _tar(self, number: int) -> int:
        if not 0 <= number < len(self):
            raise IndexError(f"number {number}; allowed: 0 to {len(self) - 1}")
        return int(np.searchsorted(self._starts, number, side="right")) - 1

    def _member(self, number: int, block: int, size: int) -> bytes:
        return self._files.read(self._tar(number), block, size)


def open_tars(tars: Sequence[Path], choice: Choice | None = None) -> TarPairs | ListedPairs:
    """Open tars: images and captions through their index, which is read from the cache or made; others in memory.

    Args:
        tars: the files, in the order of their samples' numbers.
        choice: the settings of both sides.

    Raises:
        UserError: if a file is not a tar, or no sample has an image and a caption.

    """
    choice = choice or Choice()
    members = find_members(tars, choice)
    if members is not None:
        return open_tar_columns(tars, choice, members)
    x_key, y_key = choice.x.key, None if choice.y.key is None else choice.y.key.removeprefix("json:")
    folder = find_cache_folder(tars[0].parent)
    stem = f"tars-{_hash([_VERSION, [str(tar.absolute()) for tar in tars], x_key, y_key])}"
    stamps = [file_stamp(tar) for tar in tars]
    target = folder / f"{stem}-{_hash(stamps)}.json" if folder else None
    rows, meta = (_load(target, len(tars)) if target else None) or _index(tars, stamps, x_key, y_key, target)
    return TarPairs(tars, rows, meta, y_key)


def expand(pattern: str) -> list[Path]:
    """Return the tars of a pattern; those at URLs are downloaded.

    Args:
        pattern: parts joined by `::`. Each is a path, a folder or the URL of one, and may contain `{00000..00012}` or
            `{a,b}`, and a path also `*`, `?` and `[0-9]`.

    Raises:
        UserError: if a tar is missing or a folder has no tar.

    """
    tars: list[Path | str] = []  # texts are URLs
    for part in split_parts(pattern):
        for name in expand_braces(part):
            if is_url(name) and "*" in name:
                raise UserError(f"{name}: * is not possible in a URL; name the folder, or tars as {{00000..00099}}.tar")
            if is_url(name):
                tars += [name] if _is_tar(name) else list_folder(name, ".tar")
                continue
            tars += _local_tars(name)
    missing = [tar for tar in tars if isinstance(tar, Path) and not tar.is_file()]
    if missing:
        raise UserError(f"{missing[0]}: no such file ({len(missing)} of the {len(tars)} tars are missing)")
    copies = iter(local_copies([tar for tar in tars if isinstance(tar, str)]))
    return [tar if isinstance(tar, Path) else next(copies) for tar in tars]


def _local_tars(name: str) -> list[Path]:
    """Return the tars of a path, of a folder, or of a pattern with `*`, `?` or `[...]`."""
    path = Path(name)
    if not path.exists() and glob.has_magic(name):
        inside = [Path(match) for match in sorted(glob.glob(name))]  # noqa: PTH207 (a pattern may be absolute)
        if not inside:
            raise UserError(f"{name}: no file matches this pattern")
        others = [tar for tar in inside if tar.suffix.lower() != ".tar"]
        if others:
            raise UserError(
                f"{name}: matches {others[0].name}, but patterns are for tars only; name a file or a folder"
            )
        return inside
    inside = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    if not inside:
        raise UserError(f"{path}: has no .tar file")
    return inside


def split_parts(pattern: str) -> list[str]:
    """Return the parts that `::` joins; `::` within the brackets of an address, `http://[::1]/a.tar`, is not meant."""
    return re.split(r"::(?![^\[\]/]*\])", pattern)


def _is_tar(url: str) -> bool:
    """Return whether a URL is that of a tar, and not of a folder."""
    return file_name(url).lower().endswith(".tar") and not url.endswith("/")


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
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [head + choice + rest for choice in choices for rest in expand_braces(tail)]


def _index(
    tars: Sequence[Path], stamps: list[list[int]], x_key: str | None, y_key: str | None, target: Path | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Index all tars and write the index to the cache.

    Returns:
        The rows of all tars, one tar after the other, and their metadata.

    """
    previous = _load_previous(target, len(tars))
    # Rows are collected in a temporary file, because those of millions of samples may not fit into memory.
    with tempfile.TemporaryFile(dir=target.parent if target else None) as file:
        counts, bad, cut, suffixes = [], [], [], set()
        for number, (tar, stamp) in enumerate(zip(tars, stamps, strict=True)):
            scan = _scan(tar, stamp, x_key, y_key, previous and _part_of_tar(*previous, number))
            file.write(scan.rows.tobytes())
            counts.append(len(scan.rows))
            bad.append(scan.bad)
            cut.append(scan.truncated)
            suffixes |= scan.suffixes
        rows = _mapped(file, sum(counts))
        rows, counts, bad = _pad(tars, rows, counts, bad, cut)
        _check_usable(tars, rows, suffixes)
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
    return (_load(target, len(tars)) if target else None) or (rows, meta)


def _scan(tar: Path, stamp: list[int], x_key: str | None, y_key: str | None, previous: Any) -> Scan:
    """Return the content of the tar; if it has been truncated since the previous index, its content at that time."""
    if previous and previous["stamp"] == stamp:
        return Scan(previous["rows"], previous["bad"], set(), previous["truncated"])
    scan = scan_tar(tar, x_key, y_key)
    complete = len(scan.rows) - 1
    if not (scan.truncated and previous and len(previous["rows"]) > complete):
        return scan
    rows = previous["rows"]
    if any(not np.array_equal(rows[name][:complete], scan.rows[name][:complete]) for name in ("image", "digest")):
        return scan
    same = verify_rows(tar, rows, y_key)
    if not same.any():  # perhaps another tar: only the number of samples is taken from the index
        more = np.array([_LOST_ROW], ROW).repeat(len(rows) - len(scan.rows))
        lost = dict.fromkeys(range(len(scan.rows), len(rows)), "truncated tar")
        return Scan(np.concatenate([scan.rows, more]), scan.bad | lost, scan.suffixes, True)
    bad = {row: reason for row, reason in previous["bad"].items() if reason not in _LOST}
    for row in np.flatnonzero(~same).tolist():
        ends = [int(rows[part][row]) * BLOCK + int(rows[f"{part}_size"][row]) for part in ("image", "text")]
        bad.setdefault(row, "truncated tar" if max(ends) > stamp[0] else "damaged tar")
    return Scan(rows, dict(sorted(bad.items())), set(), True)


def _pad(
    tars: Sequence[Path], rows: np.ndarray, counts: list[int], bad: list[dict[int, str]], truncated: list[bool]
) -> tuple[np.ndarray, list[int], list[dict[int, str]]]:
    """Add bad rows for the samples that truncated tars have lost, so that later tars are not renumbered."""
    longest = max((count for count, cut in zip(counts, truncated, strict=True) if not cut), default=0)
    expected = [
        max(count, _count_by_img2dataset(tar) or (longest if number + 1 < len(tars) else 0)) if cut else count
        for number, (tar, count, cut) in enumerate(zip(tars, counts, truncated, strict=True))
    ]
    if expected == counts:
        return rows, counts, bad
    lost = np.array([_LOST_ROW], ROW)
    parts = np.split(rows, np.cumsum(counts)[:-1])
    padded = [[part, lost.repeat(more - len(part))] for part, more in zip(parts, expected, strict=True)]
    reasons = [
        known | dict.fromkeys(range(count, more), "truncated tar")
        for known, count, more in zip(bad, counts, expected, strict=True)
    ]
    return np.concatenate([part for pair in padded for part in pair]), expected, reasons


def _count_by_img2dataset(tar: Path) -> int | None:
    """Return the number of samples in img2dataset's statistics file, or None without a plausible one."""
    try:
        count = int(parse_json(tar.with_name(f"{tar.stem}_stats.json").read_bytes())["successes"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return count if count <= _MOST_SAMPLES else None


def _check_usable(tars: Sequence[Path], rows: np.ndarray, suffixes: set[str]) -> None:
    source = f"{tars[0]}{f' and {len(tars) - 1} more' if len(tars) > 1 else ''}"
    present = ", ".join(f".{suffix}" for suffix in sorted(suffixes)[:10]) or "nothing"
    if not len(rows) or not rows["image"].any():
        other = "for other pairs, name two members with data.x.key and data.y.key"
        raise UserError(f"{source}: no sample with an image; {other} (found: {present})")
    if not rows["text"].any():
        raise UserError(f"{source}: no sample with a caption; needs .txt, or .json with data.y.key (found: {present})")


def _mapped(file: IO[bytes], count: int) -> np.ndarray:
    file.flush()
    return np.memmap(file, ROW, "r+", shape=(count,)) if count else np.empty(0, ROW)


def _store(target: Path, rows: np.ndarray, meta: dict[str, Any]) -> None:
    """Write the rows, then the JSON, whose presence shows that the rows are complete; remove older indexes."""
    try:
        older = set(target.parent.glob(f"{_stem(target)}-*.[jr]*"))
        for path, content in ((target.with_suffix(".rows"), rows.data), (target, json.dumps(meta).encode())):
            with write_atomically(path, sync=False) as file:
                file.write(content)
        for path in older - {target, target.with_suffix(".rows")}:
            path.unlink(missing_ok=True)
    except OSError:
        return  # for example a full disk: the index is made again next time


def _load(path: Path, tars: int) -> tuple[np.ndarray, dict[str, Any]] | None:
    """Return a stored index of so many tars, or None if there is none or it is damaged."""
    try:
        meta = parse_json(path.read_bytes())
        rows = np.memmap(path.with_suffix(".rows"), ROW, "r")
        counts, bad = meta["counts"], meta["bad"]
        if (
            any(len(meta[key]) != tars for key in ("counts", "stamps", "truncated"))
            or not all(isinstance(count, int) and count >= 0 for count in counts)
            or sum(counts) != len(rows)
            or not all(0 <= int(number) < len(rows) and isinstance(reason, str) for number, reason in bad.items())
            or not isinstance(meta["fingerprint"], str)
        ):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return rows, meta


def _load_previous(target: Path | None, tars: int) -> tuple[np.ndarray, dict[str, Any]] | None:
    """Return the index of the same tars before one of them changed."""
    paths = sorted(target.parent.glob(f"{_stem(target)}-*.json")) if target else []
    return _load(paths[-1], tars) if paths else None


def _part_of_tar(rows: np.ndarray, meta: dict[str, Any], tar: int) -> dict[str, Any]:
    begin = sum(meta["counts"][:tar])
    end = begin + meta["counts"][tar]
    bad = {int(n) - begin: reason for n, reason in meta["bad"].items() if begin <= int(n) < end}
    return {"rows": rows[begin:end], "bad": bad, "stamp": meta["stamps"][tar], "truncated": meta["truncated"][tar]}


def _stem(target: Path) -> str:
    return target.stem.rpartition("-")[0]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
