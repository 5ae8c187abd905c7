"""Load batches: numbers of pairs -> for each side pixels, texts or vectors, decoded ahead of their use.

Each side is read by its modality. If a side has something to decode, the loader uses threads instead of processes:
decoding and resizing release Python's global lock, nothing is copied between processes, and a killed run leaves no
workers behind. Batches arrive in the requested order, whatever the timing of the workers. Texts and vectors are in
memory already, so pairs of these are loaded without threads.

The threads write images directly into the memory of their batch, which is page-locked if the batch goes to an
accelerator (`pin_memory`). Each batch has memory of its own, so nothing is overwritten while it is being copied.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, repeat
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from nuclr.data.modalities import ImageOptions
from nuclr.data.modalities.augment import Crops
from nuclr.data.modalities.image import decode_for_crops, fit_image, resize_crop
from nuclr.data.pairs import SIDES, Pairs, SideName
from nuclr.errors import BadSample, UserError

_CHUNK = 16  # samples per task: enough to make overhead small, few enough to share a batch among the workers

Items = Tensor | list[Any]  # of one side: a tensor (b, ...), or a list of b items such as texts
SideCrops = Mapping[SideName, Sequence[Crops]]  # the random crops of a batch: per side, one entry per view
SideViews = Mapping[SideName, np.ndarray]  # per side with views from several pairs, (b, m) numbers of these pairs


@dataclass(frozen=True, repr=False)
class Batch:
    """A batch of b pairs.

    Attributes:
        numbers: (b,) int64, the numbers of the pairs.
        x_id: (b,) int64, equal for pairs that share their x.
        y_id: (b,) int64, equal for pairs that share their y.
        x: images (b, 3, size, size) uint8, m views of each image (b, m, 3, size, size), vectors (b, d_x), a list of b
            texts, or the batch of another modality. With m views from several pairs, b * m items, those of a pair next
            to each other.
        y: the same for y.
        group: (b,) int64, equal for pairs whose x and y all belong together; None if no pairs share more than an x or
            a y.
        row: (b,) int64, the rows of the pairs in the objective's state; None if they are `numbers`.
        shared: (b, k) int64; pairs whose views share an x or a y agree in a column. None if `x_id`, `y_id` and `group`
            say which pairs share one.

    """

    numbers: Tensor
    x_id: Tensor
    y_id: Tensor
    x: Items
    y: Items
    group: Tensor | None = None
    row: Tensor | None = None
    shared: Tensor | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"Batch({len(self)} pairs, x={_describe(self.x)}, y={_describe(self.y)})"


@dataclass(frozen=True)
class _Request:
    """A batch that is being read.

    Attributes:
        numbers: (b,), the numbers of the pairs.
        sides: the sides to read.
        views: per side with views from several pairs, (b, m) numbers of these pairs.
        images: per side of images, the memory that they are written to.
        targets: per side whose images are decoded, where they are written: (b, 3, size, size), with the crops to take.

    """

    numbers: np.ndarray
    sides: Sequence[SideName]
    views: SideViews
    images: dict[SideName, Tensor] = field(default_factory=dict)
    targets: dict[SideName, list[tuple[np.ndarray, Crops | None]]] = field(default_factory=dict)


class Loader:
    """Read batches of `pairs`, several batches ahead.

    Images become squares while they are loaded: random crops if `load` gets `crops`, otherwise the central square or
    the whole image (`modalities.image.fit_image`). Decoded images are kept as far as they fit into `memory`, and are
    not decoded again; what is loaded does not depend on this. All samples that are loaded must have passed
    `check_samples`; a sample that can no longer be read stops the run. If `pairs.views` is True, both sides are the
    same images, each of which is decoded once per batch.

    Args:
        pairs: the source of pairs.
        x: options of the modality of side x: `ImageOptions` or `TextOptions`. None: the modality's defaults.
        y: the same for side y.
        workers: number of threads.
        ahead: number of batches to read ahead.
        memory: bytes that decoded images may occupy.
        pin_memory: return tensors in page-locked memory, for copies to an accelerator (see `arrays.can_pin`).

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
        pin_memory: bool = False,
    ) -> None:
        self.pairs = pairs
        self.workers = workers
        self.ahead = ahead
        self.pin_memory = pin_memory
        self._options = {"x": x, "y": x if pairs.views else y}
        for name, side in pairs.sides.items():
            if side.modality.has_crops and self._options[name] is None:
                self._options[name] = ImageOptions()
        self._free = memory
        self._kept: dict[tuple[SideName, int], np.ndarray] = {}  # pixels by side and id
        self._lock = Lock()

    @property
    def decodes(self) -> bool:
        """Whether a side has something to decode, and batches are therefore read by threads."""
        return any(side.modality.decodes for side in self.pairs.sides.values())

    def load(
        self,
        batches: Iterable[ArrayLike],
        side: SideName | None = None,
        crops: Iterable[SideCrops] | None = None,
        views: Iterable[SideViews] | None = None,
    ) -> Iterator[Batch]:
        """Yield one Batch per array of numbers, in their order.

        Args:
            batches: arrays, tensors or lists of numbers of pairs, usually from `batches` or `all_batches`.
            side: read only this side; the other one is an empty list. None: read both.
            crops: for each batch, the random crops of the sides that hold images: {"x": [crops of b images]}, with one
                entry per view in the list.
            views: for each batch, the pairs that the views of a side come from, {"y": (b, m)}; see `ViewGroups`. The
                other sides have one item per pair.

        Yields:
            The batches, as CPU tensors and lists.

        Raises:
            UserError: if a sample cannot be read.
            IndexError: if the numbers are not whole numbers, or there is no pair with a number.

        """
        # `crops` and `views` may be endless, and usually are.
        source = zip(
            batches,
            crops or repeat({}),
            views or repeat({}),
            strict=False,
        )
        sides = [name for name in SIDES if side in (None, name)]
        requests = (self._request(numbers, sides, boxes, others) for numbers, boxes, others in source)
        if not any(self.pairs.sides[name].modality.decodes for name in sides):
            for request in requests:
                yield self._batch(request, [self._read(request, slice(0, None))])
            return
        waiting: deque[tuple[_Request, list[Future[dict[SideName, Items]]]]] = deque()
        pool = ThreadPoolExecutor(max(1, self.workers), thread_name_prefix="nuclr-loader")
        try:
            while True:
                for request in islice(requests, self.ahead + 1 - len(waiting)):
                    chunks = (slice(begin, begin + _CHUNK) for begin in range(0, len(request.numbers), _CHUNK))
                    waiting.append((request, [pool.submit(self._read, request, rows) for rows in chunks]))
                if not waiting:
                    return
                request, tasks = waiting.popleft()
                yield self._batch(request, [task.result() for task in tasks])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _request(
        self,
        numbers: ArrayLike,
        sides: Sequence[SideName],
        crops: SideCrops,
        views: SideViews,
    ) -> _Request:
        """Check the numbers and allocate memory: (b, 3, size, size), or (b, m, 3, size, size) for m crops."""
        array = np.asarray(numbers)
        are_numbers = array.ndim == 1 and len(array) and np.issubdtype(array.dtype, np.integer)
        if not are_numbers or array.min() < 0 or array.max() >= len(self.pairs):
            needs = f"needs whole numbers (b,) from 0 to {len(self.pairs) - 1}, b > 0"
            raise IndexError(f"batches: {array.dtype} of shape {array.shape}, {array.tolist()}; {needs}")
        request = _Request(array.astype(np.int64, copy=False), sides, views)
        for name in sides:
            if not self.pairs.sides[name].modality.has_crops:
                continue
            # Views of the same images are decoded once for both sides; without crops they are the same pixels.
            decoded: SideName = "x" if self.pairs.views else name
            choices = crops.get(name) or (None,)
            if choices == (None,) and decoded in request.images:
                request.images[name] = request.images[decoded]
                continue
            size = self._options[name].size
            memory = torch.empty(
                (len(array), len(choices), 3, size, size),
                dtype=torch.uint8,
                pin_memory=self.pin_memory,
            )
            request.images[name] = memory if len(choices) > 1 else memory[:, 0]
            views_of_side = [memory[:, view].numpy() for view in range(len(choices))]
            request.targets.setdefault(decoded, []).extend(zip(views_of_side, choices, strict=True))
        return request

    def _read(self, request: _Request, rows: slice) -> dict[SideName, Items]:
        """Write the images of some rows of a batch to its memory, and return the items of the other sides."""
        for name, targets in request.targets.items():
            self._read_images(
                name,
                request.numbers[rows].tolist(),
                rows.start,
                targets,
            )
        items: dict[SideName, Items] = {}
        for name in request.sides:
            if name not in request.images:
                numbers = request.views[name][rows].reshape(-1) if name in request.views else request.numbers[rows]
                try:
                    modality = self.pairs.sides[name].modality
                    items[name] = modality.collate(self.pairs.items(name, numbers), self._options[name])
                except BadSample as error:
                    raise self._unreadable(name, numbers.tolist(), error) from None
        return items

    def _read_images(
        self,
        side: SideName,
        numbers: list[int],
        first_row: int,
        targets: Sequence[tuple[np.ndarray, Crops | None]],
    ) -> None:
        cropped = targets[0][1] is not None
        for row, number in enumerate(numbers, start=first_row):
            try:
                pixels = self._decode(side, number, cropped)
            except BadSample as error:
                raise self._unreadable(side, [number], error) from None
            for target, crops in targets:
                if crops is None:
                    target[row] = pixels
                else:
                    height, width = pixels.shape[:2]
                    target[row] = resize_crop(pixels, crops.box(row, width, height), self._options[side].size)

    def _decode(
        self,
        side: SideName,
        number: int,
        cropped: bool,
    ) -> np.ndarray:
        """Return a square (3, size, size), or the pixels (height, width, 3) that crops are taken from."""
        options: ImageOptions = self._options[side]
        # A loader for training keeps images, from which crops are taken; its squares are not kept.
        keep = cropped or options.smallest_crop is None
        key = (side, int(self.pairs.sides[side].ids[number]))
        pixels = self._kept.get(key) if keep else None
        if pixels is None:
            image = self.pairs.item(side, number)
            if cropped:
                pixels = decode_for_crops(image, options.size, options.smallest_crop or 1.0)
            else:
                pixels = fit_image(image, options.size, options.fit)
            with self._lock:
                if keep and pixels.nbytes <= self._free and key not in self._kept:
                    self._kept[key] = pixels
                    self._free -= pixels.nbytes
        return pixels

    def _unreadable(
        self,
        side: SideName,
        numbers: list[int],
        error: BadSample,
    ) -> UserError:
        """Return the error for the first of the numbers that cannot be read."""
        bad = numbers[0]
        for bad in numbers:
            try:
                self.pairs.sides[side].modality.collate([self.pairs.item(side, bad)], self._options[side])
            except BadSample:
                break
        return UserError(
            f"sample {bad} ({self.pairs.name(bad)}): {error.reason}; it was good when the run began. "
            "Restore the file and continue with --resume"
        )

    def _batch(self, request: _Request, parts: list[dict[SideName, Items]]) -> Batch:
        items: dict[SideName, Items] = dict(request.images)
        for name in parts[0]:
            items[name] = self._join([part[name] for part in parts])
        ids = {name: torch.from_numpy(side.ids[request.numbers]) for name, side in self.pairs.sides.items()}
        group = None if self.pairs.group is None else torch.from_numpy(self.pairs.group[request.numbers])
        numbers = torch.from_numpy(request.numbers)
        return Batch(
            numbers,
            ids["x"],
            ids["y"],
            items.get("x", []),
            items.get("y", []),
            group,
        )

    def _join(self, parts: list[Items]) -> Items:
        """Return one batch of the parts of a batch."""
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if tensors:
            joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
            return joined.pin_memory() if self.pin_memory else joined
        return parts[0] if len(parts) == 1 else [item for part in parts for item in part]


def _describe(side: Items) -> str:
    if isinstance(side, Tensor):
        return str(tuple(side.shape))
    return f"{len(side)} {'texts' if side and isinstance(side[0], str) else 'items'}"
