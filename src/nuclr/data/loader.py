"""Load batches: numbers of pairs -> pixels or vectors, and texts or vectors, decoded ahead of their use.

The loader uses threads instead of processes. Decoding and resizing release Python's global lock, nothing is copied
between processes, and a killed run leaves no workers behind. Batches arrive in the requested order, whatever the timing
of the workers.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from PIL import Image
from torch import Tensor

from nuclr.data.formats.embeddings import VectorPairs
from nuclr.data.modalities.image import Fit, fit_image
from nuclr.data.pairs import BadSample, Pairs
from nuclr.errors import UserError

_CHUNK = 16  # samples per task: enough to make overhead small, few enough to share a batch among the workers

_Decoded = tuple[np.ndarray, list[str]]


@dataclass(frozen=True, repr=False)
class Batch:
    """A batch of b pairs.

    Attributes:
        numbers: (b,) int64, the numbers of the pairs.
        x_id: (b,) int64, equal for pairs that share their x.
        y_id: (b,) int64, equal for pairs that share their y.
        x: images (b, 3, size, size) uint8, or vectors (b, d_x).
        y: b texts, or vectors (b, d_y).

    """

    numbers: Tensor
    x_id: Tensor
    y_id: Tensor
    x: Tensor
    y: list[str] | Tensor

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        x, y = (f"{len(side)} texts" if isinstance(side, list) else str(tuple(side.shape)) for side in (self.x, self.y))
        return f"Batch({len(self)} pairs, x={x}, y={y})"


class Loader:
    """Read batches of `pairs` with threads, several batches ahead.

    Images are cropped or squashed to a square while they are decoded (see `modalities.image.fit_image`). If all of them
    fit into `memory`, they are kept and each is decoded only once. All samples that are loaded must have passed
    `check_samples`; a sample that can no longer be read stops the run.

    Args:
        pairs: the source of pairs.
        size: height and width of the images.
        fit: "crop" or "squash" (setting `data.fit`).
        workers: number of threads.
        ahead: number of batches to read ahead.
        memory: bytes that decoded images may occupy.

    Example:
        >>> from nuclr.data import all_batches, open_pairs
        >>> loader = Loader(open_pairs("builtin:n=100"), size=32)
        >>> for batch in loader.load(all_batches(np.arange(100), batch=64)):
        ...     print(batch)
        Batch(64 pairs, x=(64, 3, 32, 32), y=64 texts)
        Batch(36 pairs, x=(36, 3, 32, 32), y=36 texts)

    """

    def __init__(
        self,
        pairs: Pairs,
        size: int = 224,
        fit: Fit = "crop",
        workers: int = 2,
        ahead: int = 4,
        memory: int = 512 * 2**20,
    ) -> None:
        self.pairs, self.size, self.fit, self.workers, self.ahead = pairs, size, fit, workers, ahead
        self._pixels = None
        if pairs.x_kind == "image":
            shape = (int(pairs.x_id.max()) + 1, 3, size, size)
            if math.prod(shape) <= memory:
                self._pixels, self._decoded = np.empty(shape, np.uint8), np.zeros(shape[0], bool)

    def __repr__(self) -> str:
        return f"Loader({self.pairs!r}, size={self.size}, fit={self.fit!r}, workers={self.workers})"

    def load(self, batches: Iterable[ArrayLike]) -> Iterator[Batch]:
        """Yield one Batch per array of numbers, in their order.

        Args:
            batches: arrays, tensors or lists of numbers of pairs, usually from `batches` or `all_batches`.

        Yields:
            The batches, as CPU tensors.

        Raises:
            UserError: if a sample cannot be read.
            IndexError: if there is no pair with a number.
            TypeError: if the numbers are not whole numbers.

        """
        source = (self._check_numbers(numbers) for numbers in batches)
        if isinstance(self.pairs, VectorPairs):  # there is nothing to decode
            for numbers in source:
                x, y = self.pairs.rows(numbers)
                yield self._batch(numbers, torch.from_numpy(x), torch.from_numpy(y))
            return
        waiting: deque[tuple[np.ndarray, list[Future[_Decoded]]]] = deque()
        pool = ThreadPoolExecutor(max(1, self.workers), thread_name_prefix="nuclr-loader")
        try:
            while True:
                for numbers in islice(source, self.ahead + 1 - len(waiting)):
                    chunks = (numbers[begin : begin + _CHUNK] for begin in range(0, len(numbers), _CHUNK))
                    waiting.append((numbers, [pool.submit(self._decode, chunk) for chunk in chunks]))
                if not waiting:
                    return
                numbers, tasks = waiting.popleft()
                parts = [task.result() for task in tasks]
                pixels = torch.from_numpy(np.concatenate([images for images, _ in parts]))
                yield self._batch(numbers, pixels, [caption for _, captions in parts for caption in captions])
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

    def _decode(self, numbers: np.ndarray) -> _Decoded:
        """Return the stacked images and the captions of these numbers."""
        x, y = [], []
        for number in numbers.tolist():
            try:
                x.append(self._image(number))
                y.append(str(self.pairs.y(number)))
            except BadSample as bad:
                raise UserError(
                    f"sample {number} ({self.pairs.name(number)}): {bad.reason}; it was good when the run began. "
                    "Restore the file and continue with --resume"
                ) from None
        return np.stack(x), y

    def _image(self, number: int) -> np.ndarray:
        x_id = int(self.pairs.x_id[number])
        if self._pixels is not None and self._decoded[x_id]:
            return np.asarray(self._pixels[x_id])
        pixels = fit_image(cast(Image.Image, self.pairs.x(number)), self.size, self.fit)
        if self._pixels is not None:
            self._pixels[x_id] = pixels
            self._decoded[x_id] = True
        return pixels

    def _batch(self, numbers: np.ndarray, x: Tensor, y: list[str] | Tensor) -> Batch:
        x_id, y_id = torch.from_numpy(self.pairs.x_id[numbers]), torch.from_numpy(self.pairs.y_id[numbers])
        return Batch(torch.from_numpy(numbers), x_id, y_id, x, y)
