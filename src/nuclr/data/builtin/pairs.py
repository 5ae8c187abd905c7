"""Built-in pairs and labeled pictures, made from their numbers."""

import hashlib
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nuclr.data.builtin.draw import picture, words_needed
from nuclr.data.builtin.grammar import KINDS, prompts, text
from nuclr.data.builtin.scenes import draw_scenes_and_captions
from nuclr.data.builtin.truth import Truth
from nuclr.data.texts import number_distinct
from nuclr.errors import UserError

VERSION = 1  # of the pictures and captions; raise it when either changes
SPLITS = ("train", "val", "test")


class BuiltinPairs:
    """n pairs (see `nuclr.data.pairs.Pairs`), one caption a picture; `truth` knows p(caption | picture).

    Pair k is a function of (seed, split, k) alone, its picture also of the size: a larger n only adds pairs. The splits
    have the same distribution and share no random numbers. Memory: 24 bytes a pair.

    Args:
        n: how many pairs, at least 2.
        seed: of everything, in [0, 2^64).
        split: "train", "val" or "test".
        size: height and width of the pictures in pixels.

    """

    x_kind: Literal["image"] = "image"
    y_kind: Literal["text"] = "text"
    _balanced = False

    def __init__(self, n: int = 20_000, seed: int = 0, split: str = "train", size: int = 32) -> None:
        if split not in SPLITS:
            raise UserError(f"built-in pairs: split={split!r}; allowed: {', '.join(SPLITS)}")
        for key, value, low, high in (("n", n, 2, 2**31), ("seed", seed, 0, 2**64), ("size", size, 16, 1024)):
            if not low <= value < high:
                raise UserError(f"built-in pairs: {key}={value}; allowed: {low} to {high - 1}")
        self.seed, self.split, self.size = seed, split, size
        stream = 4 * SPLITS.index(split) + 2 * self._balanced
        self.truth = Truth(*draw_scenes_and_captions(n, seed, stream, self._balanced))
        self._picture_key = np.array([seed, stream + 1], np.uint64)
        self.x_id: NDArray[np.int64] = np.arange(n)
        arguments = f"{type(self).__name__} version={VERSION} n={n} seed={seed} split={split} size={size}"
        self.fingerprint = hashlib.sha256(arguments.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.x_id)

    @cached_property
    def y_id(self) -> NDArray[np.int64]:
        """(n,), the number of each pair's caption among the distinct ones, in the order of their first appearance."""
        return number_distinct(self.truth.captions)

    def x(self, number: int) -> Image.Image:
        """The picture, RGB."""
        scene = int(self.truth.scenes[number])
        noise = np.random.Philox(key=self._picture_key, counter=np.array([0, number, 0, 0], np.uint64))
        return picture(scene, noise.random_raw(words_needed(self.size)), self.size)

    def y(self, number: int) -> str:
        """The caption."""
        return text(int(self.truth.captions[number]))

    def name(self, number: int) -> str:
        """For messages: the split and the number."""
        return f"builtin/{self.split}/{number}"


class BuiltinLabeled(BuiltinPairs):
    """n pictures with the kind of shape as their class (see `nuclr.data.labeled.LabeledImages`).

    `y_id` (n,) is the number of the class in `classes`, and `y` its name. The classes take turns, so that each has its
    share and chance is 1 / 12; everything else is distributed as in BuiltinPairs, from random numbers of its own.
    """

    classes: ClassVar[list[str]] = list(KINDS)
    _balanced = True

    def __init__(self, n: int = 1_200, seed: int = 0, split: str = "test", size: int = 32) -> None:
        super().__init__(n, seed, split, size)

    @cached_property
    def y_id(self) -> NDArray[np.int64]:
        """(n,), the number of each picture's class."""
        return np.arange(len(self)) % len(self.classes)

    def y(self, number: int) -> str:
        """The name of the class."""
        return self.classes[self.y_id[number]]

    def prompts(self) -> list[list[str]]:
        """For each class, captions that name it."""
        return [prompts(name) for name in self.classes]
