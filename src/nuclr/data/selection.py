"""Select the samples to train on: find the bad ones, and read the list of samples to keep (`data.keep`).

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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np

from nuclr import distributed
from nuclr.data.modalities import get_modality
from nuclr.data.pairs import BadSample, Checkable, Pairs, Side
from nuclr.errors import UserError
from nuclr.files import find_cache_folder, read_lines, read_npy, write_atomically, write_text

_CHUNK = 256
_VERSION = 3  # of the rules for bad samples; cached results of other versions are not used


def check_samples(
    pairs: Pairs,
    numbers: np.ndarray | None = None,
    max_bad_share: float = 0.05,
    workers: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, str]:
    """Find the bad samples, by reading every image or from the cache.

    Under torch.distributed this is a collective call: every process has to make it.

    Args:
        pairs: the source of pairs.
        numbers: the samples to check; by default all.
        max_bad_share: the share of bad samples that is accepted (setting `data.max_bad_share`).
        workers: number of threads.
        progress: called with (items checked, items to check) from time to time.

    Returns:
        Number -> reason for every bad sample, in ascending order. Empty for sources that do not read files.

    Raises:
        UserError: if more than `max_bad_share` of the samples are bad.

    Example:
        >>> from nuclr.data import open_pairs
        >>> check_samples(open_pairs("builtin:n=100"))
        {}

    """
    if not isinstance(pairs, Checkable) or pairs.trusted:
        return {}
    numbers = np.arange(len(pairs)) if numbers is None else np.unique(numbers)
    path = _cache_path(pairs, numbers) if _sides_to_read(pairs) else None
    bad = _read_cache(path)
    # The check is collective: if one process has no cache, all of them check.
    if not all(is_cached for (is_cached,) in distributed.exchange([int(bad is not None)])):
        bad = _check_all(pairs, numbers, workers, progress)
        if distributed.rank() == 0:
            _write_cache(path, bad)
    bad = cast(dict[int, str], bad)
    if len(bad) > max_bad_share * len(numbers):
        raise UserError(_too_many(pairs, bad, len(numbers), max_bad_share))
    return bad


def usable(pairs: Pairs, bad: Iterable[int] = (), keep: np.ndarray | None = None) -> np.ndarray:
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
    if not path.is_file():
        raise UserError(f"data.keep={path}: no such file")
    numbers = _keep_from_npy(path) if path.suffix == ".npy" else _keep_from_text(path)
    outside = numbers[(numbers < 0) | (numbers >= n)]
    if len(outside):
        more = f", and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise UserError(f"data.keep={path}: pair {outside[0]}{more} does not exist; the data has pairs 0 to {n - 1}")
    if not len(numbers):
        raise UserError(f"data.keep={path}: the file has no numbers; name at least one pair")
    return np.unique(numbers)


def write_bad_samples(path: Path, pairs: Pairs, bad: dict[int, str]) -> None:
    """Write one line `{"number", "name", "reason"}` per bad sample.

    Args:
        path: the file to write, usually `bad_samples.jsonl`.
        pairs: the source of pairs, for the names.
        bad: number -> reason, from `check_samples`.

    """
    lines = [json.dumps({"number": n, "name": pairs.name(n), "reason": reason}) for n, reason in sorted(bad.items())]
    write_text(path, "".join(f"{line}\n" for line in lines))


def _sides_to_read(pairs: Pairs) -> list[Side]:
    """Return the sides whose items have to be read to know whether they are bad."""
    kinds: dict[Side, str] = {"x": pairs.x_kind} if pairs.views else {"x": pairs.x_kind, "y": pairs.y_kind}
    return [side for side, kind in kinds.items() if kind not in ("text", "vector")]


def _check_all(
    pairs: Checkable, numbers: np.ndarray, workers: int, progress: Callable[[int, int], None] | None
) -> dict[int, str]:
    """Read each distinct item once, each process its share, and exchange the results."""
    listed = np.intersect1d(numbers, np.fromiter(pairs.known_bad, np.int64))
    bad = {number: pairs.known_bad[number] for number in listed.tolist()}
    rest = np.setdiff1d(numbers, listed, assume_unique=True)
    for side in _sides_to_read(pairs):
        bad |= _check_side(pairs, side, rest, workers, progress)
        rest = np.setdiff1d(rest, np.fromiter(bad, np.int64), assume_unique=True)
    return dict(sorted(bad.items()))


def _check_side(
    pairs: Checkable, side: Side, numbers: np.ndarray, workers: int, progress: Callable[[int, int], None] | None
) -> dict[int, str]:
    ids: np.ndarray = getattr(pairs, f"{side}_id")
    _, first = np.unique(ids[numbers], return_index=True)
    share = numbers[first][distributed.rank() :: distributed.world_size()]
    chunks = [share[begin : begin + _CHUNK] for begin in range(0, len(share), _CHUNK)]
    bad_of_share: list[int] = []
    with ThreadPoolExecutor(max(1, workers)) as pool:
        results = pool.map(lambda chunk: [n for n in chunk.tolist() if _problem(pairs, side, n)], chunks)
        for done, bad_of_chunk in enumerate(results):
            bad_of_share += bad_of_chunk
            if progress is not None:
                progress(min(len(share), (done + 1) * _CHUNK), len(share))
    # All processes read the few bad items again, to get the reasons without exchanging texts.
    reasons = {
        int(ids[number]): _problem(pairs, side, number) or "cannot be read" for number in _gather_numbers(bad_of_share)
    }
    bad = numbers[np.isin(ids[numbers], np.fromiter(reasons, np.int64))].tolist() if reasons else []
    return {number: reasons[int(ids[number])] for number in bad}


def _problem(pairs: Pairs, side: Side, number: int) -> str | None:
    try:
        item = pairs.x(number) if side == "x" else pairs.y(number)
        get_modality(pairs.x_kind if side == "x" else pairs.y_kind).check(item)
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


def _too_many(pairs: Checkable, bad: dict[int, str], total: int, max_share: float) -> str:
    counts = Counter(reason.partition(" (")[0] for reason in bad.values())
    reasons = ", ".join(f"{count} x {reason}" for reason, count in counts.most_common(3))
    names = list(dict.fromkeys(pairs.name(number) for number in bad))
    first = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    searched = f" (images are read from {pairs.folder})" if "image" in (pairs.x_kind, pairs.y_kind) else ""
    return (
        f"{pairs.label}: {len(bad)} of {total} samples are bad, {len(bad) / total:.1%}, more than the {max_share:.1%} "
        f"allowed (data.max_bad_share): {reasons}; they are {first}{searched}"
    )


def _cache_path(pairs: Checkable, numbers: np.ndarray) -> Path | None:
    folder = find_cache_folder(pairs.folder)
    sides = f"{pairs.x_kind} {pairs.y_kind} {pairs.x_name} {pairs.y_name}"
    key = hashlib.sha256(f"{_VERSION} {sides} {pairs.fingerprint} {pairs.stamp()} ".encode())
    key.update(numbers.astype(np.int64).tobytes())
    return folder / f"checked-{key.hexdigest()[:24]}.json" if folder else None


def _read_cache(path: Path | None) -> dict[int, str] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path else None
        return {int(number): reason for number, reason in content.items()} if content is not None else None
    except (OSError, ValueError, AttributeError):
        return None


def _write_cache(path: Path | None, bad: dict[int, str]) -> None:
    if path is None:
        return
    # Without a cache, for example on a full disk, the samples are checked again next time.
    with contextlib.suppress(OSError), write_atomically(path, sync=False) as file:
        file.write(json.dumps(bad).encode())


def _keep_from_text(path: Path) -> np.ndarray:
    numbers = []
    for row, line in enumerate(read_lines(path), start=1):
        text = line.partition("#")[0].strip()
        try:
            numbers += [np.int64(int(text))] if text else []
        except ValueError:
            raise UserError(
                f"data.keep={path}, line {row}: {text[:40]!r} is not a whole number; write one number per line"
            ) from None
        except OverflowError:
            raise UserError(f"data.keep={path}, line {row}: pair {text[:40]} does not exist") from None
    return np.array(numbers, np.int64)


def _keep_from_npy(path: Path) -> np.ndarray:
    try:
        numbers = read_npy(path)
    except UserError as error:
        raise UserError(f"data.keep={error}") from None
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise UserError(
            f"data.keep={path}: holds {numbers.dtype} of shape {numbers.shape}; needs whole numbers of shape (n,)"
        )
    return np.asarray(numbers, np.int64)
