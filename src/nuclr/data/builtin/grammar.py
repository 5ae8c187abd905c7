"""The languages of the built-in pairs: a caption names or omits each of several details of the picture.

A picture shows a scene, which has one *level* for each slot of its language. `ONE_SHAPE` has six slots: kind, color,
size, place, count and background. `TWO_SHAPES` has eight: kind, color and size of each shape, how they are arranged,
and the background. Given the scene, each slot chooses its word independently, with the probabilities in its table T_a
(levels, words). Hence, exactly,

    p(caption | picture) = prod_a T_a[level_a(picture), word_a(caption)].

The word "" omits the detail; for the kind, "shape" does, and for the arrangement "and". Different choices of words
never give the same text, so this is the probability of the text. Every detail can be omitted at every level. If
captions always named a detail, such as the count, no caption would fit pictures with different counts, and the
popularity problem would split into independent problems, each with its own undetermined constant.

Captions of one shape repeat: a popular caption is the right answer for many pictures. Captions of two shapes hardly do,
as in collections of photographs: a popular caption fits many pictures, and is the right answer for one of them.

Scenes and captions are stored as *codes*, mixed-radix numbers over the slots (numpy's `ravel_multi_index`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Slot:
    """A detail of the picture. `table` (levels, words) has the probability of each word at each level."""

    name: str
    levels: tuple[str, ...]
    words: tuple[str, ...]
    table: NDArray[np.float64]


@dataclass(frozen=True)
class Language:
    """Slots, and `phrase`, which makes a caption of one word per slot."""

    slots: tuple[Slot, ...]
    phrase: Callable[..., str]

    @property
    def levels(self) -> tuple[int, ...]:
        """Number of levels of each slot: the radices of a scene's code."""
        return tuple(len(slot.levels) for slot in self.slots)

    @property
    def words(self) -> tuple[int, ...]:
        """Number of words of each slot: the radices of a caption's code."""
        return tuple(len(slot.words) for slot in self.slots)

    def text(self, caption: int) -> str:
        """Return the caption with this code, such as "two small red stars over sand"."""
        chosen = np.unravel_index(caption, self.words)
        return self.phrase(*(slot.words[i] for slot, i in zip(self.slots, chosen, strict=True)))


def _slot(name: str, choices: dict[str, dict[str, float]]) -> Slot:
    words = tuple(dict.fromkeys(word for row in choices.values() for word in row))
    table = np.array([[row.get(word, 0.0) for word in words] for row in choices.values()])
    return Slot(name, tuple(choices), words, table)


def _named(*words: str, left_out: float, instead: str = "") -> dict[str, dict[str, float]]:
    """Return levels that are named, except with probability `left_out`."""
    return {word: {instead: left_out, word: 1 - left_out} for word in words}


KINDS = ("circle", "square", "star", "heart", "triangle", "moon", "cross", "ring", "diamond", "arrow", "flower", "bolt")
COLORS = ("red", "blue", "yellow", "green", "orange", "purple", "pink", "black")
BACKGROUNDS = ("over sand", "over grass", "over water", "over snow", "over slate")
SLOTS = (
    _slot("kind", _named(*KINDS, left_out=0.2, instead="shape")),
    _slot("color", _named(*COLORS, left_out=0.4)),
    _slot("size", _named("small", left_out=0.65) | _named("large", left_out=0.75)),
    _slot(
        "place",
        _named("in the middle", left_out=0.8)
        | _named("on the left", "on the right", "at the top", "at the bottom", left_out=0.65),
    ),
    _slot("count", _named("a", left_out=0.6) | _named("two", "three", left_out=0.5)),  # "red star": any count
    _slot("background", _named(*BACKGROUNDS, left_out=0.85)),
)


def _one_shape(kind: str, color: str, size: str, place: str, count: str, background: str) -> str:
    shapes = _plural(kind) if count in ("two", "three") else kind
    things = _join(size, color, shapes)
    return _join(_article(things) if count == "a" else count, things, place, background)


def _two_shapes(*words: str) -> str:
    first, second, (arrangement, background) = words[:3], words[3:6], words[6:]
    things = [_join(size, color, kind) for kind, color, size in (first, second)]
    return _join(_article(things[0]), things[0], arrangement, _article(things[1]), things[1], background)


def _join(*words: str) -> str:
    return " ".join(filter(None, words))


def _article(things: str) -> str:
    return "an" if things[0] in "aeiou" else "a"


def _plural(word: str) -> str:
    return word + ("es" if word.endswith("s") else "s")


ONE_SHAPE = Language(SLOTS, _one_shape)
LEVELS, WORDS, text = ONE_SHAPE.levels, ONE_SHAPE.words, ONE_SHAPE.text
TWO_SHAPES = Language(
    (
        *(
            slot
            for shape in ("first", "second")
            for slot in (
                _slot(f"{shape} kind", _named(*KINDS, left_out=0.05, instead="shape")),
                _slot(f"{shape} color", _named(*COLORS, left_out=0.1)),
                _slot(f"{shape} size", _named("small", "large", left_out=0.3)),
            )
        ),
        _slot("arrangement", _named("left of", "above", left_out=0.2, instead="and")),
        _slot("background", _named(*BACKGROUNDS, left_out=0.5)),
    ),
    _two_shapes,
)


def encode(**words: str) -> int:
    """Return the code of the caption with these words; the other details are omitted.

    Example:
        >>> text(encode(kind="star", count="two"))
        'two stars'

    """
    words = {"kind": "shape"} | words
    return int(np.ravel_multi_index([slot.words.index(words.get(slot.name, "")) for slot in SLOTS], WORDS))


def prompts(kind: str) -> list[str]:
    """Return captions that name this kind of shape, with every size and count, and without other details."""
    sizes, counts = SLOTS[2].words, SLOTS[4].words
    return [text(encode(kind=kind, size=size, count=count)) for size in sizes for count in counts]
