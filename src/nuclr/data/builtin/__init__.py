"""Built-in pairs: small pictures of shapes, and captions that leave out details at random.

Reading order: `grammar` (the words of a caption, their probabilities, and which scenes and captions are drawn), `draw`
(pictures of scenes), then the numbered pairs and labeled pictures below.
"""

import hashlib
from typing import Any

import numpy as np

from nuclr.data.builtin.draw import picture, words_needed
from nuclr.data.builtin.grammar import KINDS, ONE_SHAPE, TWO_SHAPES, draw_scenes_and_captions, prompts
from nuclr.data.modalities import get_modality
from nuclr.data.modalities.text import number_distinct
from nuclr.data.pairs import Labeled, Pairs, Side, SideName
from nuclr.errors import UserError

VERSION = 1  # raise it when pictures or captions change
SPLITS = ("train", "val", "test")


class BuiltinPairs(Pairs):
    """n generated pairs, one caption per picture.

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
        >>> pairs.item("y", 0), pairs.item("x", 0).size
        ('a red circle', (32, 32))
        >>> BuiltinPairs(n=100, shapes=2).item("y", 0)
        'a small red circle above a blue heart over slate'

    """

    _balanced = False

    def __init__(
        self,
        n: int = 20_000,
        seed: int = 0,
        split: str = "train",
        size: int = 32,
        shapes: int = 1,
    ) -> None:
        if split not in SPLITS:
            raise UserError(f"built-in pairs: split={split!r}; allowed: {', '.join(SPLITS)}")
        limits = (("n", n, 2, 2**31), ("seed", seed, 0, 2**64), ("size", size, 16, 1024), ("shapes", shapes, 1, 3))
        for key, value, low, high in limits:
            if not low <= value < high:
                raise UserError(f"built-in pairs: {key}={value}; allowed: {low} to {high - 1}")
        self.seed = seed
        self.split = split
        self.size = size
        self.label = f"seed={seed},split={split}"
        stream = 4 * SPLITS.index(split) + 2 * self._balanced
        self.language = ONE_SHAPE if shapes == 1 else TWO_SHAPES
        self.scenes, self.captions = draw_scenes_and_captions(
            n,
            seed,
            stream,
            self._balanced,
            self.language,
        )
        self._picture_key = np.array([seed, stream + 1], np.uint64)
        self.sides = {
            "x": Side("image", None, get_modality("image"), np.arange(n)),
            "y": Side("text", None, get_modality("text"), self._labels()),
        }
        arguments = f"{type(self).__name__} version={VERSION} n={n} seed={seed} split={split} size={size}"
        arguments += f" shapes={shapes}" if shapes > 1 else ""
        self.fingerprint = hashlib.sha256(arguments.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.captions)

    def _labels(self) -> np.ndarray:
        """Return the numbers of the distinct captions (n,), in the order of their first appearance."""
        return number_distinct(self.captions)

    def item(self, side: SideName, number: int) -> Any:
        """Return the picture, RGB, or the caption."""
        if side == "y":
            return self._text(number)
        scene = int(self.scenes[number])
        noise = np.random.Philox(key=self._picture_key, counter=np.array([0, number, 0, 0], np.uint64))
        return picture(
            self.language,
            scene,
            noise.random_raw(words_needed(self.size)),
            self.size,
        )

    def _text(self, number: int) -> str:
        return self.language.text(int(self.captions[number]))

    def name(self, number: int) -> str:
        """Return the split and the number."""
        return f"builtin/{self.split}/{number}"


class BuiltinLabeled(BuiltinPairs, Labeled):
    """n generated pictures labeled by kind of shape, for zero-shot classification.

    The classes take turns, so all are equally frequent and chance accuracy is 1 / 12. Everything else is distributed as
    in BuiltinPairs, with separate random numbers.
    """

    keys = tuple(KINDS)
    classes = tuple(KINDS)
    templates = ("a {}",)
    _balanced = True

    def __init__(
        self,
        n: int = 1_200,
        seed: int = 0,
        split: str = "test",
        size: int = 32,
    ) -> None:
        super().__init__(n, seed, split, size)

    def _labels(self) -> np.ndarray:
        """Return the numbers of the pictures' classes (n,)."""
        return np.arange(len(self)) % len(self.classes)

    def _text(self, number: int) -> str:
        return self.classes[number % len(self.classes)]

    def prompts(self) -> list[list[str]]:
        """Return, for each class, captions that name it."""
        return [prompts(name) for name in self.classes]
