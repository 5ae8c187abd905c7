"""Load batches: numbers of pairs -> for each side pixels, texts or vectors, decoded ahead of their use.

Each side is read by its modality. If a side has something to decode, the loader uses threads instead of processes:
decoding and resizing release Python's global lock, nothing is copied between processes, and a killed run leaves no
workers behind. Batches arrive in the requested order, whatever the timing of the workers. Texts and vectors are in
memory already, so pairs of these are loaded without threads.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from nuclr.data.modalities import ImageOptions, get_modality
from nuclr.data.pairs import BadSample, Pairs
from nuclr.errors import UserError

_CHUNK = 16  # samples per task: enough to make overhead small, few enough to share a batch among the workers

Items = Tensor | list[Any]  # of one side: a tensor (b, ...), or a list of b items such as texts


@dataclass(frozen=True, repr=False)
class Batch:
    """A batch of b pairs.

    Attributes:
        numbers: (b,) int64, the numbers of the pairs.
        x_id: (b,) int64, equal for pairs that share their x.
        y_id: (b,) int64, equal for pairs that share their y.
        x: images (b, 3, size, size) uint8, vectors (b, d_x), a list of b texts, or the batch of another modality.
        y: the same for y.
        group: (b,) int64, equal for pairs whose x and y all belong together; None if no pairs share more than an x or
            a y.

    """

    numbers: Tensor
    x_id: Tensor
    y_id: Tensor
    x: Items
    y: Items
    group: Tensor | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        x, y = (_describe(side) for side in (self.x, self.y))
        return f"Batch({len(self)} pairs, x={x}, y={y})"


class Loader:
    """Read batches of `pairs`, several batches ahead.

    Images are cropped or squashed to a square while they are decoded (see `modalities.image.fit_image`). If all of them
    fit into `memory`, they are kept and each is decoded only once. All samples that are loaded must have passed
    `check_samples`; a sample that can no longer be read stops the run. If `pairs.views` is True, both sides are the
    same images, which are read once.

    Args:
        pairs: the source of pairs.
        x: options of the modality of side x: for images `ImageOptions`. None: the modality's defaults.
        y: the same for side y.
        workers: number of threads.
        ahead: number of batches to read ahead.
        memory: bytes that decoded images may occupy.

    Example:
        >>> from nuclr.data import all_batches, open_pairs
        >>> loader = Loader(open_pairs("builtin:n=100"), x=ImageOptions(size=32))
        >>> for batch in loader.load(all_batches(np.arange(100), batch=64)):
        ...     print(batch)
        Batch(64 pairs, x=(64, 3, 32, 32), y=64 texts)
        Batch(36 pairs, x=(36, 3, 32, 32), y=36 texts)

    """

    def __init__(
        self,
        pairs: Pairs,
        x: Any = None,
        y: Any = None,
        workers: int = 2,
        ahead: int = 4,
        memory: int = 512 * 2**20,
    ) -> None:
        self.pairs, self.workers, self.ahead = pairs, workers, ahead
        self._x = _make_side(pairs, "x", x, memory)
        self._y = self._x if pairs.views else _make_side(pairs, "y", y, memory - self._x.memory)

    def __repr__(self) -> str:
        sides = {"x": self._x.options} if self.pairs.views else {"x": self._x.options, "y": self._y.options}
        options = "".join(f", {side}={value!r}" for side, value in sides.items() if value is not None)
        return f"Loader({self.pairs!r}{options}, workers={self.workers})"

    def load(self, batches: Iterable[ArrayLike], side: Literal["x", "y"] | None = None) -> Iterator[Batch]:
        """Yield one Batch per array of numbers, in their order.

        Args:
            batches: arrays, tensors or lists of numbers of pairs, usually from `batches` or `all_batches`.
            side: read only this side; the other one is an empty list. None: read both.

        Yields:
            The batches, as CPU tensors and lists.

        Raises:
            UserError: if a sample cannot be read.
            IndexError: if there is no pair with a number.
            TypeError: if the numbers are not whole numbers.

        """
        source = (self._check_numbers(numbers) for numbers in batches)
        if not any(part.decodes for name, part in (("x", self._x), ("y", self._y)) if side in (None, name)):
            for numbers in source:
                yield self._batch(numbers, [self._read(numbers, side)])
            return
        waiting: deque[tuple[np.ndarray, list[Future[tuple[Items, Items]]]]] = deque()
        pool = ThreadPoolExecutor(max(1, self.workers), thread_name_prefix="nuclr-loader")
        try:
            while True:
                for numbers in islice(source, self.ahead + 1 - len(waiting)):
                    chunks = (numbers[begin : begin + _CHUNK] for begin in range(0, len(numbers), _CHUNK))
                    waiting.append((numbers, [pool.submit(self._read, chunk, side) for chunk in chunks]))
                if not waiting:
                    return
                numbers, tasks = waiting.popleft()
                yield self._batch(numbers, [task.result() for task in tasks])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _check_numbers(self, numbers: ArrayLike) -> np.ndarray:
        array = np.asarray(numbers)
        if array.ndim != 1 or not len(array) or not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"batches: {array.dtype} of shape {array.shape}; needs whole numbers of shape (b,), b > 0")
        if array.min() < 0 or array.max() >= len(self.pairs):
            raise IndexError(
                f"batches: numbers from {array.min()} to {array.max()}; allowed: 0 to {len(self.pairs) - 1}"
            )
        return array.astype(np.int64, copy=False)

    def _read(self, numbers: np.ndarray, side: Literal["x", "y"] | None) -> tuple[Items, Items]:
        """Return both sides of these pairs, or one side and an empty list."""
        if self.pairs.views:
            x = self._x.read(numbers)
            return x, x
        return [] if side == "y" else self._x.read(numbers), [] if side == "x" else self._y.read(numbers)

    def _batch(self, numbers: np.ndarray, parts: list[tuple[Items, Items]]) -> Batch:
        pairs = self.pairs
        x = _join([x for x, _ in parts])
        y = x if pairs.views else _join([y for _, y in parts])
        x_id, y_id = (torch.from_numpy(ids[numbers]) for ids in (pairs.x_id, pairs.y_id))
        group = None if pairs.group is None else torch.from_numpy(pairs.group[numbers])
        return Batch(torch.from_numpy(numbers), x_id, y_id, x, y, group)


class _Side:
    """One side of the pairs, whose items are in memory or are read again whenever they are needed."""

    memory = 0  # bytes kept for decoded items

    def __init__(self, pairs: Pairs, side: Literal["x", "y"], options: Any) -> None:
        self._pairs, self._side, self.options = pairs, side, options
        self._modality = get_modality(getattr(pairs, f"{side}_kind"))
        self.decodes = self._modality.decodes

    def read(self, numbers: np.ndarray) -> Items:
        """Return the batch of the side for these numbers."""
        try:
            return self._modality.collate(self._pairs.items(self._side, numbers), self.options)
        except BadSample as error:
            raise self._unreadable(numbers, error) from None

    def _unreadable(self, numbers: np.ndarray, error: BadSample) -> UserError:
        """Return the error for the first of the numbers that cannot be read."""
        bad, reason = int(numbers[0]), error.reason
        for number in numbers.tolist() if len(numbers) > 1 else ():
            try:
                self._modality.collate([getattr(self._pairs, self._side)(number)], self.options)
            except BadSample as problem:
                bad, reason = number, problem.reason
                break
        return UserError(
            f"sample {bad} ({self._pairs.name(bad)}): {reason}; it was good when the run began. "
            "Restore the file and continue with --resume"
        )


class _ImageSide(_Side):
    """Images, which are kept in memory once they are decoded if all of them fit."""

    def __init__(self, pairs: Pairs, side: Literal["x", "y"], options: ImageOptions, memory: int) -> None:
        super().__init__(pairs, side, options)
        self._ids: np.ndarray = getattr(pairs, f"{side}_id")
        self._pixels = None
        shape = (int(self._ids.max()) + 1, 3, options.size, options.size)
        if math.prod(shape) <= memory:
            self.memory = math.prod(shape)
            self._pixels, self._decoded = torch.empty(shape, dtype=torch.uint8), np.zeros(shape[0], bool)

    def read(self, numbers: np.ndarray) -> Items:
        """Return the pixels (b, 3, size, size)."""
        if self._pixels is None:
            return super().read(numbers)
        ids = self._ids[numbers]
        missing = np.flatnonzero(~self._decoded[ids])
        for position in missing.tolist():
            number, image = numbers[position], ids[position]
            if not self._decoded[image]:  # two numbers may have the same image
                self._pixels[image] = super().read(number[None])[0]
                self._decoded[image] = True
        return self._pixels[torch.from_numpy(ids)]


def _make_side(pairs: Pairs, side: Literal["x", "y"], options: Any, memory: int) -> _Side:
    if getattr(pairs, f"{side}_kind") == "image":
        return _ImageSide(pairs, side, options or ImageOptions(), memory)
    return _Side(pairs, side, options)


def _join(parts: list[Items]) -> Items:
    """Return one batch of the parts of a batch."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if tensors:
        return torch.cat(tensors)
    return [item for part in parts for item in part]


def _describe(side: Items) -> str:
    if isinstance(side, Tensor):
        return str(tuple(side.shape))
    return f"{len(side)} {'texts' if side and isinstance(side[0], str) else 'items'}"
