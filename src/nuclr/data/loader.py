"""Load batches: numbers of pairs -> for each side pixels, texts or vectors, decoded ahead of their use.

Each side is read by its modality. If a side has something to decode, the loader uses threads instead of processes:
decoding and resizing release Python's global lock, nothing is copied between processes, and a killed run leaves no
workers behind. Batches arrive in the requested order, whatever the timing of the workers. Texts and vectors are in
memory already, so pairs of these are loaded without threads.

The threads write images directly into the memory of their batch, which is page-locked if the batch goes to an
accelerator (`pin_memory`). Each batch has memory of its own, so nothing is overwritten while it is being copied.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, repeat
from threading import Lock
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from PIL import Image
from torch import Tensor

from nuclr.data.modalities import ImageOptions, get_modality
from nuclr.data.modalities.augment import Crops
from nuclr.data.modalities.image import decode_for_crops, fit_image, resize_crop
from nuclr.data.pairs import SIDES, BadSample, Pairs, Side
from nuclr.errors import UserError

_CHUNK = 16  # samples per task: enough to make overhead small, few enough to share a batch among the workers

Items = Tensor | list[Any]  # of one side: a tensor (b, ...), or a list of b items such as texts
SideCrops = Mapping[Side, Sequence[Crops]]  # the random crops of a batch: per side, one entry per view
SideViews = Mapping[Side, np.ndarray]  # per side with views from several pairs, (b, m) numbers of these pairs


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
        x, y = (_describe(side) for side in (self.x, self.y))
        return f"Batch({len(self)} pairs, x={x}, y={y})"


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
        pin_memory: return tensors in page-locked memory, for copies to an accelerator (see `transfer.can_pin`).

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
        self.pairs, self.workers, self.ahead, self.pin_memory = pairs, workers, ahead, pin_memory
        self._cache = _Cache(memory)
        self._sides: dict[Side, _Side] = {"x": _make_side(pairs, "x", x, self._cache)}
        self._sides["y"] = self._sides["x"] if pairs.views else _make_side(pairs, "y", y, self._cache)

    def __repr__(self) -> str:
        named: Sequence[Side] = SIDES[:1] if self.pairs.views else SIDES
        chosen = ((side, self._sides[side].options) for side in named)
        options = "".join(f", {side}={value!r}" for side, value in chosen if value is not None)
        return f"Loader({self.pairs!r}{options}, workers={self.workers})"

    @property
    def decodes(self) -> bool:
        """Whether a side has something to decode, and batches are therefore read by threads."""
        return any(side.decodes for side in self._sides.values())

    def share_kept(self, numbers: np.ndarray) -> float:
        """Return the share of the images of these pairs that fit into `memory`, judged by those decoded so far.

        Args:
            numbers: numbers of pairs.

        Example:
            >>> from nuclr.data import open_pairs
            >>> loader = Loader(open_pairs("builtin:n=100"), x=ImageOptions(size=32), memory=5 * 3 * 32 * 32)
            >>> batch = next(loader.load([np.arange(10)]))
            >>> loader.share_kept(np.arange(100))
            0.05

        """
        sides = {side for side in self._sides.values() if isinstance(side, _ImageSide)}
        return self._cache.share_kept(sum(len(np.unique(side.ids[numbers])) for side in sides))

    def load(
        self,
        batches: Iterable[ArrayLike],
        side: Side | None = None,
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
            IndexError: if there is no pair with a number.
            TypeError: if the numbers are not whole numbers.

        """
        checked = (self._check_numbers(numbers) for numbers in batches)
        # `crops` and `views` may be endless, and usually are.
        source = zip(checked, crops or repeat({}), views or repeat({}), strict=False)
        sides = [name for name in SIDES if side in (None, name)]
        if not any(self._sides[name].decodes for name in sides):
            for numbers, boxes, others in source:
                yield self._batch(numbers, {}, [self._read(numbers, sides, boxes, others, {})])
            return
        waiting: deque[tuple[np.ndarray, dict[Side, Tensor], list[Future[dict[Side, Items]]]]] = deque()
        pool = ThreadPoolExecutor(max(1, self.workers), thread_name_prefix="nuclr-loader")
        try:
            while True:
                for numbers, boxes, others in islice(source, self.ahead + 1 - len(waiting)):
                    images = self._allocate(len(numbers), sides, boxes, others)
                    chunks = (slice(begin, begin + _CHUNK) for begin in range(0, len(numbers), _CHUNK))
                    tasks = [
                        pool.submit(
                            self._read,
                            numbers[rows],
                            sides,
                            _part(boxes, rows),
                            _rows(others, rows),
                            _image_rows(images, rows, len(numbers)),
                        )
                        for rows in chunks
                    ]
                    waiting.append((numbers, images, tasks))
                if not waiting:
                    return
                numbers, images, tasks = waiting.popleft()
                yield self._batch(numbers, images, [task.result() for task in tasks])
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

    def _allocate(self, b: int, sides: Sequence[Side], crops: SideCrops, views: SideViews) -> dict[Side, Tensor]:
        """Return memory for the images of a batch of b pairs, (b, 3, size, size), or (b, m, 3, size, size) for m crops.

        If both sides are the same images and are not cropped, they share it.
        """
        images: dict[Side, Tensor] = {}
        for name in sides:
            side, m = self._sides[name], len(crops.get(name, ()))
            if not isinstance(side, _ImageSide):
                continue
            if self.pairs.views and not any(crops.values()) and images:
                images[name] = next(iter(images.values()))
                continue
            rows, size = views[name].size if name in views else b, side.options.size
            shape = (rows, m, 3, size, size) if m > 1 else (rows, 3, size, size)
            images[name] = torch.empty(shape, dtype=torch.uint8, pin_memory=self.pin_memory)
        return images

    def _read(
        self,
        numbers: np.ndarray,
        sides: Sequence[Side],
        crops: SideCrops,
        views: SideViews,
        images: Mapping[Side, list[np.ndarray]],
    ) -> dict[Side, Items]:
        """Write images to `images`, one array (b, 3, size, size) per view, and return the items of the other sides."""
        items: dict[Side, Items] = {}
        if self.pairs.views and images:  # both sides are views of the same images, each of which is decoded once
            every = [crop for name in sides for crop in crops.get(name, ())]
            targets = [view for name in sides for view in images[name]]
            self._image_side("x").read_into(targets if every else targets[:1], numbers, every)
            return items
        for name in sides:
            own = views[name].reshape(-1) if name in views else numbers
            if name in images:
                self._image_side(name).read_into(images[name], own, crops.get(name, ()))
            else:
                items[name] = self._sides[name].read(own)
        return items

    def _image_side(self, name: Side) -> "_ImageSide":
        return cast(_ImageSide, self._sides[name])

    def _batch(self, numbers: np.ndarray, images: Mapping[Side, Tensor], parts: list[dict[Side, Items]]) -> Batch:
        pairs = self.pairs
        items: dict[Side, Items] = {name: self._join([part[name] for part in parts]) for name in parts[0]}
        x, y = (images[name] if name in images else items.get(name, []) for name in SIDES)
        x_id, y_id = (torch.from_numpy(ids[numbers]) for ids in (pairs.x_id, pairs.y_id))
        group = None if pairs.group is None else torch.from_numpy(pairs.group[numbers])
        return Batch(torch.from_numpy(numbers), x_id, y_id, x, y, group)

    def _join(self, parts: list[Items]) -> Items:
        """Return one batch of the parts of a batch."""
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if tensors:
            joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
            return joined.pin_memory() if self.pin_memory else joined
        return parts[0] if len(parts) == 1 else [item for part in parts for item in part]


class _Cache:
    """Decoded images of a loader, as far as they fit into its memory."""

    def __init__(self, memory: int) -> None:
        self._memory = self._free = memory
        self._kept, self._lock = dict[tuple[Side, int], np.ndarray](), Lock()
        self._decoded = self._decoded_bytes = 0

    def get(self, key: tuple[Side, int]) -> np.ndarray | None:
        return self._kept.get(key)

    def put(self, key: tuple[Side, int], pixels: np.ndarray) -> None:
        with self._lock:
            self._decoded += 1
            self._decoded_bytes += pixels.nbytes
            if pixels.nbytes <= self._free and key not in self._kept:
                self._kept[key] = pixels
                self._free -= pixels.nbytes

    def share_kept(self, images: int) -> float:
        """Return the share of so many images that fits, if they have the mean size of those decoded so far."""
        expected = images * self._decoded_bytes / max(self._decoded, 1)
        return min(1.0, self._memory / expected) if expected else 1.0


class _Side:
    """One side of the pairs, whose items are in memory or are read again whenever they are needed."""

    def __init__(self, pairs: Pairs, side: Side, options: Any) -> None:
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
    """Images, which are kept in memory once they are decoded, as far as they fit.

    A loader for training keeps decoded images, from which crops are taken. Any other keeps squares.
    """

    options: ImageOptions

    def __init__(self, pairs: Pairs, side: Side, options: ImageOptions, cache: _Cache) -> None:
        super().__init__(pairs, side, options)
        self.ids: np.ndarray = getattr(pairs, f"{side}_id")
        self._cache = cache

    def read_into(self, targets: Sequence[np.ndarray], numbers: np.ndarray, crops: Sequence[Crops]) -> None:
        """Write the images with these numbers to arrays (b, 3, size, size): one per crop; without crops one array."""
        keep = self.options.smallest_crop is None
        for row, number in enumerate(numbers):
            if not crops:
                targets[0][row] = self._square(number, keep)
                continue
            pixels = self._decoded(number)
            height, width = pixels.shape[:2]
            for target, choice in zip(targets, crops, strict=True):
                target[row] = resize_crop(pixels, choice.box(row, width, height), self.options.size)

    def _square(self, number: np.int64, keep: bool) -> np.ndarray:
        return self._cached(number, lambda image: fit_image(image, self.options.size, self.options.fit), keep)

    def _decoded(self, number: np.int64) -> np.ndarray:
        smallest = self.options.smallest_crop or 1.0
        return self._cached(number, lambda image: decode_for_crops(image, self.options.size, smallest), keep=True)

    def _cached(self, number: np.int64, decode: Callable[[Image.Image], np.ndarray], keep: bool) -> np.ndarray:
        key = (self._side, int(self.ids[number]))
        pixels = self._cache.get(key) if keep else None
        if pixels is None:
            try:
                pixels = decode(getattr(self._pairs, self._side)(int(number)))
            except BadSample as error:
                raise self._unreadable(np.array([number]), error) from None
            if keep:
                self._cache.put(key, pixels)
        return pixels


def _make_side(pairs: Pairs, side: Side, options: Any, cache: _Cache) -> _Side:
    if getattr(pairs, f"{side}_kind") == "image":
        return _ImageSide(pairs, side, options or ImageOptions(), cache)
    return _Side(pairs, side, options)


def _part(crops: SideCrops, rows: slice) -> SideCrops:
    return {side: [choice[rows] for choice in views] for side, views in crops.items()}


def _rows(views: SideViews, rows: slice) -> SideViews:
    return {side: numbers[rows] for side, numbers in views.items()}


def _image_rows(images: Mapping[Side, Tensor], rows: slice, b: int) -> dict[Side, list[np.ndarray]]:
    """Return, per side and view, the images of these rows of a batch of b pairs."""
    parts: dict[Side, list[np.ndarray]] = {}
    for side, pixels in images.items():
        m = len(pixels) // b  # more than 1 if the views of a pair are images of several pairs
        part = pixels.numpy()[rows.start * m : rows.stop * m]
        parts[side] = [part] if part.ndim == 4 else [part[:, view] for view in range(part.shape[1])]
    return parts


def _describe(side: Items) -> str:
    if isinstance(side, Tensor):
        return str(tuple(side.shape))
    return f"{len(side)} {'texts' if side and isinstance(side[0], str) else 'items'}"
