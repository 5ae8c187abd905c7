"""Numbers of pairs -> batches of pixels (or vectors) and captions, decoded ahead of their use.

Threads, not processes: decoding and resizing release the interpreter's lock, nothing is copied between processes, and
a killed run leaves none behind. Batches come in the order asked for, whatever the workers' timing.
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
from PIL import Image
from torch import Tensor

from nuclr.data.formats.embeddings import VectorPairs
from nuclr.data.modalities.image import Fit, fit_image
from nuclr.data.pairs import BadSample, Pairs
from nuclr.errors import UserError

_CHUNK = 16  # samples a task: enough to make its cost small, few enough to share a batch among the workers


@dataclass(frozen=True)
class Batch:
    """The b samples `numbers` (b,), with `x_id`, `y_id` (b,), all int64.

    `x` is (b, 3, size, size) uint8 or (b, d_x), `y` b texts or (b, d_y).
    """

    numbers: Tensor
    x_id: Tensor
    y_id: Tensor
    x: Tensor
    y: list[str] | Tensor

    def __len__(self) -> int:
        return len(self.numbers)


class Loader:
    """Reads `pairs` with `workers` threads, up to `ahead` batches before they are asked for.

    Images are cropped and resized to `size` while decoding, see `images.fit_image`; where all of them take no more
    than `memory` bytes, they are kept and decoded only once. All samples must have been found good by
    `check.check_samples`; one that is not any more stops the run.
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

    def load(self, batches: Iterable[np.ndarray]) -> Iterator[Batch]:
        """A Batch for each array of numbers, in their order."""
        if isinstance(self.pairs, VectorPairs):  # nothing to decode, so nothing to do ahead
            for numbers in batches:
                x, y = self.pairs.rows(numbers)
                yield self._batch(numbers, torch.from_numpy(x), torch.from_numpy(y))
            return
        source = iter(batches)
        waiting: deque[tuple[np.ndarray, list[Future[_Read]]]] = deque()
        pool = ThreadPoolExecutor(max(1, self.workers), thread_name_prefix="nuclr-loader")
        try:
            while True:
                for numbers in islice(source, self.ahead + 1 - len(waiting)):
                    chunks = (numbers[begin : begin + _CHUNK] for begin in range(0, len(numbers), _CHUNK))
                    waiting.append((numbers, [pool.submit(self._read, chunk) for chunk in chunks]))
                if not waiting:
                    return
                numbers, tasks = waiting.popleft()
                parts = [task.result() for task in tasks]
                x = torch.from_numpy(np.concatenate([x for x, _ in parts]))
                yield self._batch(numbers, x, [caption for _, captions in parts for caption in captions])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, numbers: np.ndarray) -> "_Read":
        """The pictures, stacked, and the captions of these numbers."""
        x, y = [], []
        for number in numbers.tolist():
            try:
                x.append(self._x(number))
                y.append(str(self.pairs.y(number)))
            except BadSample as bad:
                raise UserError(
                    f"sample {number} ({self.pairs.name(number)}): {bad.reason}; it was good when the run began. "
                    "Restore the file and go on with --resume"
                ) from None
        return np.stack(x), y

    def _x(self, number: int) -> np.ndarray:
        image = int(self.pairs.x_id[number])
        if self._pixels is not None and self._decoded[image]:
            return np.asarray(self._pixels[image])
        x = fit_image(cast(Image.Image, self.pairs.x(number)), self.size, self.fit)
        if self._pixels is not None:
            self._pixels[image] = x
            self._decoded[image] = True
        return x

    def _batch(self, numbers: np.ndarray, x: Tensor, y: list[str] | Tensor) -> Batch:
        x_id, y_id = torch.from_numpy(self.pairs.x_id[numbers]), torch.from_numpy(self.pairs.y_id[numbers])
        return Batch(torch.from_numpy(numbers), x_id, y_id, x, y)


_Read = tuple[np.ndarray, list[str]]
