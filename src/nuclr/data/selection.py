"""Which samples are bad: found once, before the first epoch, by decoding every image.

A sample cannot be dropped while an epoch runs without making the processes disagree about batches, or a resumed run
about the past. So all samples are looked at beforehand, at the smallest scale that libjpeg can decode (an eighth), by
all processes together, each its share; the outcome depends on the files alone, not on timing, and all have the same.
It is kept in the cache folder until the list, or the size or time of a file, changes. Bad samples are then left out of
every epoch (`usable`), with a line each in `bad_samples.jsonl`; the others keep their numbers and their order.
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
from PIL import Image

from nuclr import distributed
from nuclr.data.modalities.image import check_image
from nuclr.data.pairs import BadSample, Checkable, Pairs
from nuclr.errors import UserError
from nuclr.files import find_cache_folder, read_text, write_atomically

_CHUNK = 256


def check_samples(
    pairs: Pairs,
    numbers: np.ndarray | None = None,
    max_bad_share: float = 0.05,
    workers: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, str]:
    """Number and reason of every bad sample among `numbers` (default: all), in order of the numbers.

    More than `max_bad_share` of them bad is a UserError. `progress` is called with (images done, images in all).
    Collective: under torch.distributed every process has to call it.
    """
    if not isinstance(pairs, Checkable):
        return {}
    numbers = np.arange(len(pairs)) if numbers is None else np.unique(numbers)
    path = _cache_path(pairs, numbers)
    bad = _read_cache(path)
    if not all(found for (found,) in distributed.exchange([int(bad is not None)])):
        bad = _look(pairs, numbers, workers, progress)
        if distributed.rank() == 0:
            _write_cache(path, bad)
    bad = cast(dict[int, str], bad)
    if len(bad) > max_bad_share * len(numbers):
        raise UserError(_too_many(pairs, bad, len(numbers), max_bad_share))
    return bad


def usable(pairs: Pairs, bad: Iterable[int] = (), keep: np.ndarray | None = None) -> np.ndarray:
    """Numbers, ascending, of the pairs to train on: all or those to `keep`, without the bad ones."""
    wanted = np.arange(len(pairs)) if keep is None else np.unique(keep)
    return np.setdiff1d(wanted, np.fromiter(bad, np.int64), assume_unique=True)


def read_keep(path: Path, n: int) -> np.ndarray:
    """Numbers, ascending, of the pairs to keep out of n: a text with one a line (# begins a comment), or a `.npy`."""
    if not path.is_file():
        raise UserError(f"{path}: no such file (data.keep)")
    numbers = _from_npy(path) if path.suffix == ".npy" else _from_text(path)
    outside = numbers[(numbers < 0) | (numbers >= n)]
    if len(outside):
        more = f", and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise UserError(f"{path}: pair {outside[0]}{more} does not exist; the data has pairs 0 to {n - 1}")
    if not len(numbers):
        raise UserError(f"{path}: keeps no pairs")
    return np.unique(numbers)


def write_bad_samples(path: Path, pairs: Pairs, bad: dict[int, str]) -> None:
    """One line `{"number", "name", "reason"}` for each."""
    lines = [json.dumps({"number": n, "name": pairs.name(n), "reason": reason}) for n, reason in sorted(bad.items())]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _look(
    pairs: Checkable, numbers: np.ndarray, workers: int, progress: Callable[[int, int], None] | None
) -> dict[int, str]:
    """Decode each image once, this process its share; then exchange what was found."""
    listed = np.intersect1d(numbers, np.fromiter(pairs.known_bad, np.int64))
    known = {number: pairs.known_bad[number] for number in listed.tolist()}
    rest = np.setdiff1d(numbers, listed, assume_unique=True)
    _, first = np.unique(pairs.x_id[rest], return_index=True)
    share = rest[first][distributed.rank() :: distributed.world_size()]
    chunks = [share[begin : begin + _CHUNK] for begin in range(0, len(share), _CHUNK)]
    found: list[int] = []
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for done, broken in enumerate(pool.map(lambda chunk: [n for n in chunk.tolist() if _reason(pairs, n)], chunks)):
            found += broken
            if progress is not None:
                progress(min(len(share), (done + 1) * _CHUNK), len(share))
    reasons = {int(pairs.x_id[number]): _reason(pairs, number) or "cannot be read" for number in _from_all(found)}
    broken_rest = rest[np.isin(pairs.x_id[rest], np.fromiter(reasons, np.int64))].tolist() if reasons else []
    return dict(sorted((known | {number: reasons[int(pairs.x_id[number])] for number in broken_rest}).items()))


def _reason(pairs: Pairs, number: int) -> str | None:
    try:
        check_image(cast(Image.Image, pairs.x(number)))
    except BadSample as bad:
        return bad.reason
    return None


def _from_all(numbers: list[int]) -> list[int]:
    """The numbers of all processes, sorted; each holds a list of its own length."""
    longest = max(count for (count,) in distributed.exchange([len(numbers)]))
    if longest == 0:
        return []
    gathered = distributed.exchange(numbers + [-1] * (longest - len(numbers)))
    return sorted(number for row in gathered for number in row if number >= 0)


def _too_many(pairs: Pairs, bad: dict[int, str], total: int, share: float) -> str:
    counts = Counter(reason.partition(" (")[0] for reason in bad.values())
    reasons = ", ".join(f"{count} x {reason}" for reason, count in counts.most_common(3))
    number = next(iter(bad))
    return (
        f"{len(bad)} of {total} samples are bad, {len(bad) / total:.1%}, more than the {share:.1%} allowed "
        f"(max_bad_share): {reasons}; the first is sample {number}, {pairs.name(number)}"
    )


def _cache_path(pairs: Checkable, numbers: np.ndarray) -> Path | None:
    folder = find_cache_folder(pairs.folder)
    key = hashlib.sha256(f"{pairs.fingerprint} {pairs.stamp()} ".encode() + numbers.astype(np.int64).tobytes())
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


def _from_text(path: Path) -> np.ndarray:
    numbers = []
    for row, line in enumerate(read_text(path).splitlines(), start=1):
        text = line.partition("#")[0].strip()
        try:
            numbers += [int(text)] if text else []
        except ValueError:
            raise UserError(
                f"{path}, line {row}: {text[:40]!r} is no pair's number; needs one whole number a line"
            ) from None
    return np.array(numbers, np.int64)


def _from_npy(path: Path) -> np.ndarray:
    try:
        numbers = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: cannot be read as .npy ({error})") from None
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise UserError(f"{path}: holds {numbers.dtype} of shape {numbers.shape}; needs one row of whole numbers")
    return np.asarray(numbers, np.int64)
