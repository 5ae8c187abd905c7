"""The interface that every source of pairs has: `Pairs`, its samples, and bad samples.

A source has n pairs, numbered 0 to n - 1 by their position in the source. A question with five answers gives five pairs
with consecutive numbers. The number of a pair never changes: it does not depend on the reading order, on resuming, on
the number of processes, or on broken samples next to it. The objectives can therefore keep one row of state per pair.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
from PIL import Image

Side = Literal["x", "y"]
SIDES: tuple[Side, Side] = ("x", "y")


class BadSample(Exception):  # noqa: N818 (the sample is bad; the program is not in error)
    """A sample that cannot be used: a broken or missing file, an empty text, a truncated tar.

    Args:
        reason: why it cannot be used, in a few words.

    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Sample(NamedTuple):
    """One pair, as `pairs[number]` returns it.

    `x` and `y` are each an RGB image, a text, a vector (d,), or the item of another modality. `x_id` and `y_id` are
    equal for pairs that share their x or their y.
    """

    x: Any
    y: Any
    number: int
    x_id: int
    y_id: int


class Pairs(ABC):
    """A source of n numbered pairs with random access, safe to read from several threads.

    `len(pairs)` and `pairs[number]` make it a map-style dataset: `torch.utils.data.DataLoader(pairs, collate_fn=...)`
    works. The program itself reads batches with `nuclr.data.Loader`.

    Attributes:
        x_kind: the modality of x: "image", "text", "vector", or one that a plugin has registered.
        y_kind: the same for y.
        x_name: the name of side x in tables, metrics and messages, such as "image" or "question".
        y_name: the same for y.
        x_key: the column that holds x; None if the source has no columns.
        y_key: the same for y.
        x_id: (n,) int64, the number of the distinct x of each pair. Pairs that share an x are not negatives of each
            other.
        y_id: (n,) int64, the same for y.
        group: (n,) int64, equal for pairs whose x and y all belong together, as those of a row with several x and
            several y do. None if pairs share at most an x or a y.
        views: whether x and y are the same image, of which training makes different views.
        fingerprint: a hash of the list of pairs (not of the pixels), by which a resumed run recognizes its data.
        label: the source in a few characters, for `repr`.

    Example:
        >>> from nuclr.data import open_pairs
        >>> pairs = open_pairs("builtin:n=100,seed=0")
        >>> pairs
        BuiltinPairs('seed=0,split=train', 100 pairs, image to text)
        >>> sample = pairs[3]
        >>> sample.x.size, sample.y, sample.number
        ((32, 32), 'pink shape over water', 3)

    """

    x_kind: str
    y_kind: str
    x_name: str = "x"
    y_name: str = "y"
    x_key: str | None = None
    y_key: str | None = None
    x_id: np.ndarray
    y_id: np.ndarray
    fingerprint: str
    label: str
    group: np.ndarray | None = None
    views: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of pairs, n."""

    @abstractmethod
    def x(self, number: int) -> Any:
        """Return the x of a pair: a PIL image, a text, a vector (d_x,), or the item of another modality.

        An image is opened but not decoded yet, so that the caller can decode it at a smaller size.

        Raises:
            BadSample: if the x cannot be read.

        """

    @abstractmethod
    def y(self, number: int) -> Any:
        """Return the y of a pair, as `x` does.

        Raises:
            BadSample: if the y cannot be read.

        """

    @abstractmethod
    def name(self, number: int) -> str:
        """Return the file, line or row of a pair, for messages and reports."""

    def item_name(self, side: Side, number: int) -> str | None:
        """Return the name of one item of a pair, or None if it does not have a name of its own."""
        return self.name(number) if side == "x" or self.views else None

    def items(self, side: Side, numbers: np.ndarray) -> Sequence[Any] | np.ndarray:
        """Return one side of several pairs: b items, or an array (b, d) of vectors.

        Args:
            side: "x" or "y".
            numbers: (b,), numbers of pairs.

        Raises:
            BadSample: if an item cannot be read.

        """
        read = self.x if side == "x" else self.y
        return [read(number) for number in numbers.tolist()]

    def __getitem__(self, number: SupportsIndex) -> Sample:
        """Return one pair, with images decoded as upright RGB.

        Args:
            number: from 0 to n - 1.

        Raises:
            IndexError: if `number` is negative or too large.
            TypeError: if `number` is not a whole number.
            BadSample: if the sample is bad.

        """
        from nuclr.data.modalities.image import decode_image  # that module imports BadSample from this one

        try:
            position = operator.index(number)
        except TypeError:
            raise TypeError(f"pairs[number]: number is {number!r}; needs one whole number") from None
        if not 0 <= position < len(self):
            raise IndexError(f"pairs[{position}]: there is no such pair; allowed: 0 to {len(self) - 1}")
        x, y = (
            decode_image(item) if isinstance(item, Image.Image) else item
            for item in (self.x(position), self.y(position))
        )
        return Sample(x, y, position, int(self.x_id[position]), int(self.y_id[position]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r}, {len(self):,} pairs, {self.x_kind} to {self.y_kind})"


class Checkable(Pairs):
    """Pairs read from files, whose samples can be bad. In other sources no sample is bad.

    Attributes:
        known_bad: number -> reason, for samples that the list alone shows to be bad, such as empty texts.
        folder: the folder that holds the data.
        trusted: True if no sample can be bad, so that samples need not be checked. Views of a source that does not read
            files are an example.

    """

    known_bad: dict[int, str]
    folder: Path
    trusted: bool = False

    @abstractmethod
    def stamp(self) -> str:
        """Return a hash of the sizes and modification times of all files behind the pairs."""
