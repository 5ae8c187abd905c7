"""What every source of pairs looks like to the rest of the program.

n pairs, numbered 0 to n - 1 by their place in the source: an image with five captions is five pairs with consecutive
numbers. A number belongs to its pair for good: reading in another order, resuming, another number of processes or a
broken neighbor do not change it, so the objectives can keep one row of state for each.
"""

from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from PIL import Image


class BadSample(Exception):  # noqa: N818 (a sample is bad; the program is not in error)
    """A sample that cannot be used, and why: a broken or missing image, an empty caption, a truncated tar."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Pairs(Protocol):
    """n numbered pairs with random access; safe to read from several threads.

    `x_id` (n,) int64 is the number of the image behind each pair, `y_id` (n,) int64 that of its distinct caption: pairs
    that share one of the two are no negatives of each other. `fingerprint` is a hash of the list (not of the pixels),
    by which a resumed run recognizes its data.

    Sources that read images from files have what `Checkable` adds. In the others no sample can be bad.
    """

    x_kind: Literal["image", "vector"]
    y_kind: Literal["text", "vector"]
    x_id: np.ndarray
    y_id: np.ndarray
    fingerprint: str

    def __len__(self) -> int:
        """The number of pairs, n."""
        ...

    def x(self, number: int) -> Image.Image | np.ndarray:
        """The image, opened but not yet decoded (so that a reader may ask for a smaller one), or the vector (d,)."""
        ...

    def y(self, number: int) -> str | np.ndarray:
        """The caption or the vector (d,); raises BadSample, as `x` does."""
        ...

    def name(self, number: int) -> str:
        """The file or key of the image, for messages and reports."""
        ...


@runtime_checkable
class Checkable(Pairs, Protocol):
    """Pairs whose samples can be bad: `known_bad` maps those that the list alone tells to their reasons.

    `folder` is where the data lies; `stamp()` changes when one of its files does.
    """

    known_bad: dict[int, str]
    folder: Path

    def stamp(self) -> str:
        """A hash of the sizes and times of all files behind the pairs."""
        ...
