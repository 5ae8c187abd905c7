"""Built-in pairs and labeled pictures, generated from their numbers."""

import hashlib
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nuclr.data.builtin.draw import picture, words_needed
from nuclr.data.builtin.grammar import KINDS, ONE_SHAPE, TWO_SHAPES, prompts
from nuclr.data.builtin.scenes import draw_scenes_and_captions
from nuclr.data.builtin.truth import Truth
from nuclr.data.pairs import Pairs
from nuclr.data.texts import number_distinct
from nuclr.errors import UserError

VERSION = 1  # raise it when pictures or captions change
SPLITS = ("train", "val", "test")


class BuiltinPairs(Pairs):
    """n generated pairs, one caption per picture; `truth` knows p(caption | picture).

    Pair k is a function of (seed, split, k) only, and its picture also of the size. A larger n only adds pairs. The
    splits have the same distribution and share no random numbers. Memory: 24 bytes per pair.

    Args:
        n: number of pairs, at least 2.
        seed: seed of all random numbers, in [0, 2^64).
        split: "train", "val" or "test".
        size: height and width of the pictures in pixels.
        shapes: 1 for pictures of one kind of shape, with captions that repeat; 2 for pictures of two different shapes,
            whose captions are mostly distinct.

    Raises:
        UserError: if an argument is out of range.

    Example:
        >>> pairs = BuiltinPairs(n=100)
        >>> pairs.y(0), pairs.x(0).size
        ('a red circle', (32, 32))
        >>> BuiltinPairs(n=100, shapes=2).y(0)
        'a small red circle above a blue heart over slate'
        >>> pairs.truth.popularity().shape
        (100,)

    """

    x_kind = x_name = "image"
    y_kind = y_name = "text"
    _balanced = False

    def __init__(self, n: int = 20_000, seed: int = 0, split: str = "train", size: int = 32, shapes: int = 1) -> None:
        if split not in SPLITS:
            raise UserError(f"built-in pairs: split={split!r}; allowed: {', '.join(SPLITS)}")
        limits = (("n", n, 2, 2**31), ("seed", seed, 0, 2**64), ("size", size, 16, 1024), ("shapes", shapes, 1, 3))
        for key, value, low, high in limits:
            if not low <= value < high:
                raise UserError(f"built-in pairs: {key}={value}; allowed: {low} to {high - 1}")
        self.seed, self.split, self.size = seed, split, size
        self.label = f"seed={seed},split={split}"
        stream = 4 * SPLITS.index(split) + 2 * self._balanced
        self.language = ONE_SHAPE if shapes == 1 else TWO_SHAPES
        self.truth = Truth(*draw_scenes_and_captions(n, seed, stream, self._balanced, self.language), self.language)
        self._picture_key = np.array([seed, stream + 1], np.uint64)
        self.x_id: NDArray[np.int64] = np.arange(n)
        arguments = f"{type(self).__name__} version={VERSION} n={n} seed={seed} split={split} size={size}"
        arguments += f" shapes={shapes}" if shapes > 1 else ""
        self.fingerprint = hashlib.sha256(arguments.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.x_id)

    @cached_property
    def y_id(self) -> NDArray[np.int64]:  # type: ignore[override]
        """(n,) numbers of the distinct captions, in the order of their first appearance."""
        return number_distinct(self.truth.captions)

    def x(self, number: int) -> Image.Image:
        """Return the picture, RGB."""
        scene = int(self.truth.scenes[number])
        noise = np.random.Philox(key=self._picture_key, counter=np.array([0, number, 0, 0], np.uint64))
        return picture(self.language, scene, noise.random_raw(words_needed(self.size)), self.size)

    def y(self, number: int) -> str:
        """Return the caption."""
        return self.language.text(int(self.truth.captions[number]))

    def name(self, number: int) -> str:
        """Return the split and the number."""
        return f"builtin/{self.split}/{number}"


class BuiltinLabeled(BuiltinPairs):
    """n generated pictures labeled by kind of shape, for zero-shot classification.

    `y_id` (n,) is the number of the class in `classes`, and `y` the name of the class. The classes take turns, so all
    are equally frequent and chance accuracy is 1 / 12. Everything else is distributed as in BuiltinPairs, with separate
    random numbers.
    """

    classes: ClassVar[list[str]] = list(KINDS)
    _balanced = True

    def __init__(self, n: int = 1_200, seed: int = 0, split: str = "test", size: int = 32) -> None:
        super().__init__(n, seed, split, size)

    @cached_property
    def y_id(self) -> NDArray[np.int64]:  # type: ignore[override]
        """(n,) numbers of the pictures' classes."""
        return np.arange(len(self)) % len(self.classes)

    def y(self, number: int) -> str:
        """Return the name of the class."""
        return self.classes[self.y_id[number]]

    def prompts(self) -> list[list[str]]:
        """Return, for each class, captions that name it."""
        return [prompts(name) for name in self.classes]
