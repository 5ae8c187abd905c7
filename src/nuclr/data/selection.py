"""Select the samples to train on: find the bad ones, read the list of samples to keep, compare with held-out pairs.

A sample cannot be dropped during an epoch: processes would disagree about batches, and a resumed run about its past. So
all images are decoded once before the first epoch, at the smallest scale of libjpeg (1/8), each process checking its
share, and so are items of other modalities that are read from files. Texts and vectors were checked when their list was
read. The result depends only on the files and is the same on all processes. It is cached until the list, or the size
or modification time of a file, changes. Every epoch leaves out the bad samples (`usable`), and `bad_samples.jsonl` has
one line for each. The other samples keep their numbers and their order.
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from nuclr import distributed
from nuclr.data.pairs import SIDES, Pairs, SideName
from nuclr.errors import BadSample, UserError
from nuclr.files import find_cache_folder, read_lines, read_npy, write_atomically, write_text

MOST_COMPARED = 500_000  # longer lists of training and held-out pairs are not searched for common items
SHARED = 0.01  # if a larger share of the held-out items is also in the training set, a warning says so
_CHUNK = 256
_VERSION = 3  # of the rules for bad samples; cached results of other versions are not used


@dataclass(frozen=True)
class Source:
    """A source of pairs as a run uses it: the pairs, the numbers of those in use, and the bad ones with the reasons."""

    pairs: Pairs
    numbers: np.ndarray
    bad: dict[int, str]

    def width(self, side: SideName) -> int | None:
        """Return the number of coordinates of the vectors on one side; None for items of other modalities."""
        return self.pairs.sides[side].modality.width(self.pairs.item(side, int(self.numbers[0])))

    def describe(self, side: SideName) -> str:
        """Return what a side holds, such as "texts" or "vectors of 384 coordinates"."""
        width = self.width(side)
        items = f"{self.pairs.sides[side].modality.name}s"
        return items if width is None else f"{items} of {width} coordinates"


def check_samples(
    pairs: Pairs,
    numbers: np.ndarray | None = None,
    max_bad_share: float = 0.05,
    workers: int = 2,
) -> dict[int, str]:
    """Find the bad samples, by reading every image or from the cache.

    Under torch.distributed this is a collective call: every process has to make it.

    Args:
        pairs: the source of pairs.
        numbers: the samples to check; by default all.
        max_bad_share: the share of bad samples that is accepted (setting `data.max_bad_share`).
        workers: number of threads.

    Returns:
        Number -> reason for every bad sample, in ascending order. Empty for sources that do not read files.

    Raises:
        UserError: if more than `max_bad_share` of the samples are bad.

    Example:
        >>> from nuclr.data import open_pairs
        >>> check_samples(open_pairs("builtin:n=100"))
        {}

    """
    if pairs.folder is None:
        return {}
    numbers = np.arange(len(pairs)) if numbers is None else np.unique(numbers)
    path = _cache_path(pairs, numbers) if _sides_to_read(pairs) else None
    bad = _read_cache(path)
    # The check is collective: if one process has no cache, all of them check.
    if not all(is_cached for (is_cached,) in distributed.exchange([int(bad is not None)])):
        bad = _check_all(pairs, numbers, workers)
        if distributed.rank() == 0:
            _write_cache(path, bad)
    bad = cast(dict[int, str], bad)
    if len(bad) > max_bad_share * len(numbers):
        raise UserError(_too_many(pairs, bad, len(numbers), max_bad_share))
    return bad


def usable(
    pairs: Pairs,
    bad: Iterable[int] = (),
    keep: np.ndarray | None = None,
) -> np.ndarray:
    """Return the numbers of the pairs to train on.

    Args:
        pairs: the source of pairs.
        bad: numbers of bad samples, from `check_samples`.
        keep: numbers of the pairs to keep, from `read_keep`; by default all.

    Returns:
        Ascending numbers, int64.

    Example:
        >>> from nuclr.data import open_pairs
        >>> usable(open_pairs("builtin:n=5"), bad=[1])
        array([0, 2, 3, 4])

    """
    kept = np.arange(len(pairs)) if keep is None else np.unique(keep)
    return np.setdiff1d(kept, np.fromiter(bad, np.int64), assume_unique=True)


def read_keep(path: str | Path, n: int) -> np.ndarray:
    r"""Read the numbers of the pairs to keep from a file (setting `data.keep`).

    Args:
        path: a text file with one number per line, where # starts a comment, or a `.npy` file with an array of whole
            numbers.
        n: the number of pairs in the data.

    Returns:
        Ascending, distinct numbers, int64.

    Raises:
        UserError: if the file cannot be read, is empty, or names a pair that does not exist.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "keep.txt")
        ...     _ = path.write_text("3\n0  # the first pair\n")
        ...     read_keep(path, n=5)
        array([0, 3])

    """
    path = Path(path)
    try:
        if path.suffix == ".npy":
            numbers = read_npy(path)
        else:  # numpy.loadtxt may end the process on damaged text
            lines = [line.partition("#")[0].strip() for line in read_lines(path)]
            numbers = np.array([int(line) for line in lines if line], np.int64)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not len(numbers):
            raise ValueError(f"holds {numbers.dtype} of shape {numbers.shape}")
    except (OSError, OverflowError, ValueError) as error:
        raise UserError(f"data.keep={path}: {str(error)[:200]}; needs whole numbers, one per line") from None
    outside = numbers[(numbers < 0) | (numbers >= n)]
    if len(outside):
        raise UserError(f"data.keep={path}: pair {outside[0]} does not exist; the data has pairs 0 to {n - 1}")
    return np.unique(numbers).astype(np.int64)


def write_bad_samples(
    path: Path,
    pairs: Pairs,
    bad: dict[int, str],
) -> None:
    """Write one line `{"number", "name", "reason"}` per bad sample.

    Args:
        path: the file to write, usually `bad_samples.jsonl`.
        pairs: the source of pairs, for the names.
        bad: number -> reason, from `check_samples`.

    """
    lines = [json.dumps({"number": n, "name": pairs.name(n), "reason": reason}) for n, reason in sorted(bad.items())]
    write_text(path, "".join(f"{line}\n" for line in lines))


def _sides_to_read(pairs: Pairs) -> list[SideName]:
    """Return the sides whose items have to be read to know whether they are bad."""
    sides = SIDES[:1] if pairs.views else SIDES
    return [side for side in sides if not pairs.sides[side].modality.in_memory]


def _check_all(
    pairs: Pairs,
    numbers: np.ndarray,
    workers: int,
) -> dict[int, str]:
    """Read each distinct item once, each process its share, and exchange the results."""
    listed = np.intersect1d(numbers, np.fromiter(pairs.known_bad, np.int64))
    bad = {number: pairs.known_bad[number] for number in listed.tolist()}
    rest = np.setdiff1d(numbers, listed, assume_unique=True)
    for side in _sides_to_read(pairs):
        bad |= _check_side(pairs, side, rest, workers)
        rest = np.setdiff1d(rest, np.fromiter(bad, np.int64), assume_unique=True)
    return dict(sorted(bad.items()))


def _check_side(
    pairs: Pairs,
    side: SideName,
    numbers: np.ndarray,
    workers: int,
) -> dict[int, str]:
    ids: np.ndarray = pairs.sides[side].ids
    _, first = np.unique(ids[numbers], return_index=True)
    share = numbers[first][distributed.rank() :: distributed.world_size()]
    chunks = [share[begin : begin + _CHUNK] for begin in range(0, len(share), _CHUNK)]
    bad_of_share: list[int] = []
    with ThreadPoolExecutor(max(1, workers)) as pool:
        results = pool.map(lambda chunk: [n for n in chunk.tolist() if _problem(pairs, side, n)], chunks)
        for bad_of_chunk in results:
            bad_of_share += bad_of_chunk
    # All processes read the few bad items again, to get the reasons without exchanging texts.
    reasons = {
        int(ids[number]): _problem(pairs, side, number) or "cannot be read" for number in _gather_numbers(bad_of_share)
    }
    bad = numbers[np.isin(ids[numbers], np.fromiter(reasons, np.int64))].tolist() if reasons else []
    return {number: reasons[int(ids[number])] for number in bad}


def _problem(
    pairs: Pairs,
    side: SideName,
    number: int,
) -> str | None:
    try:
        item = pairs.item(side, number)
        pairs.sides[side].modality.check(item)
    except BadSample as bad:
        return bad.reason
    return None


def _gather_numbers(numbers: list[int]) -> list[int]:
    """Return the sorted numbers of all processes, whose lists may differ in length."""
    longest = max(count for (count,) in distributed.exchange([len(numbers)]))
    if longest == 0:
        return []
    gathered = distributed.exchange(numbers + [-1] * (longest - len(numbers)))
    return sorted(number for row in gathered for number in row if number >= 0)


def _too_many(
    pairs: Pairs,
    bad: dict[int, str],
    total: int,
    max_share: float,
) -> str:
    counts = Counter(reason.partition(" (")[0] for reason in bad.values())
    reasons = ", ".join(f"{count} x {reason}" for reason, count in counts.most_common(3))
    names = ", ".join([pairs.name(number) for number in bad][:3])
    return (
        f"{pairs.label}: {len(bad)} of {total} samples are bad, {len(bad) / total:.1%}, more than the {max_share:.1%} "
        f"allowed (data.max_bad_share): {reasons}; the first are {names} in {pairs.folder}"
    )


def _cache_path(pairs: Pairs, numbers: np.ndarray) -> Path | None:
    folder = find_cache_folder(pairs.folder or Path())
    sides = " ".join([*pairs.modalities, *pairs.side_names])
    key = hashlib.sha256(f"{_VERSION} {sides} {pairs.fingerprint} {pairs.stamp()} ".encode())
    key.update(numbers.astype(np.int64).tobytes())
    return folder / f"checked-{key.hexdigest()[:24]}.json" if folder else None


def _read_cache(path: Path | None) -> dict[int, str] | None:
    try:
        return None if path is None else {int(n): reason for n, reason in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, AttributeError):
        return None


def _write_cache(path: Path | None, bad: dict[int, str]) -> None:
    # Without a cache, for example on a full disk, the samples are checked again next time.
    with contextlib.suppress(OSError):
        if path is not None:
            with write_atomically(path, sync=False) as file:
                file.write(json.dumps(bad).encode())


# -- training and held-out pairs ---------------------------------------------------------------------------------------


def check_compatible(
    train: Source,
    val: Source,
    key: str = "data.val",
) -> None:
    """Refuse held-out pairs, of the setting `key`, of another modality or width than the training pairs."""
    for side in SIDES:
        trained = train.describe(side)
        held_out = val.describe(side)
        if trained != held_out:
            raise UserError(f"{key} holds {held_out} on side {side}, but data.train holds {trained}")


def describe_overlap(
    train: Source,
    val: Source,
    key: str = "data.val",
) -> str | None:
    """Return a warning if held-out pairs are also training pairs, or their images also training images; else None.

    Only what lists hold is compared, the names of files and texts, so no image is read. Other formats are compared as a
    whole.

    Args:
        train: the training pairs.
        val: the held-out pairs.
        key: the setting that names them.

    """
    advice = "so its recall does not show how the model does on new data; hold out other pairs"
    if train.pairs.fingerprint == val.pairs.fingerprint:
        return f"{key} holds the same pairs as data.train, {advice}"
    if max(len(train.numbers), len(val.numbers)) > MOST_COMPARED:
        return None
    files = [side for side in SIDES if val.pairs.sides[side].modality.in_files][:1]
    held_out = _identities(val, files or SIDES)
    shared = len(held_out & _identities(train, files or SIDES))
    if shared <= SHARED * len(held_out):
        return None
    what = "images" if files else "pairs"
    return f"{key}: {shared:,} of its {len(held_out):,} {what} are also in data.train, {advice}"


def _identities(source: Source, sides: Sequence[SideName]) -> set[tuple[str, ...]]:
    """Return the distinct items of these sides, by the paths of their files or by their texts.

    The set is empty if the source is not a list of them.
    """
    columns = []
    for side in sides:
        column = [source.pairs.identity(side, number) for number in source.numbers.tolist()]
        if None in column:
            return set()
        columns.append(column)
    return set(zip(*columns, strict=True))
