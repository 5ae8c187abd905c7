"""The language of the built-in pairs: a caption names or omits each of six details of the picture.

A picture shows a scene, which has one *level* for each slot of SLOTS: kind, color, size, place, count and background.
Given the scene, each slot chooses its word independently, with the probabilities in its table T_a (levels, words).
Hence, exactly,

    p(caption | picture) = prod_a T_a[level_a(picture), word_a(caption)].

The word "" omits the detail; for the kind, "shape" does. Different choices of words never give the same text, so this
is the probability of the text. Every detail can be omitted at every level. If captions always named a detail, such as
the count, no caption would fit pictures with different counts, and the popularity problem would split into independent
problems, each with its own undetermined constant.

Scenes and captions are stored as *codes*, mixed-radix numbers over the slots (numpy's `ravel_multi_index`).
"""

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


def _slot(name: str, choices: dict[str, dict[str, float]]) -> Slot:
    words = tuple(dict.fromkeys(word for row in choices.values() for word in row))
    table = np.array([[row.get(word, 0.0) for word in words] for row in choices.values()])
    return Slot(name, tuple(choices), words, table)


def _named(*words: str, left_out: float, instead: str = "") -> dict[str, dict[str, float]]:
    """Return levels that are named, except with probability `left_out`."""
    return {word: {instead: left_out, word: 1 - left_out} for word in words}


KINDS = ("circle", "square", "star", "heart", "triangle", "moon", "cross", "ring", "diamond", "arrow", "flower", "bolt")
COLORS = ("red", "blue", "yellow", "green", "orange", "purple", "pink", "black")
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
    _slot("background", _named("over sand", "over grass", "over water", "over snow", "over slate", left_out=0.85)),
)
LEVELS = tuple(len(slot.levels) for slot in SLOTS)
WORDS = tuple(len(slot.words) for slot in SLOTS)


def text(caption: int) -> str:
    """Return the caption with this code, such as "two small red stars over sand"."""
    kind, color, size, place, count, background = (
        slot.words[i] for slot, i in zip(SLOTS, np.unravel_index(caption, WORDS), strict=True)
    )
    shapes = _plural(kind) if count in ("two", "three") else kind
    things = " ".join(filter(None, (size, color, shapes)))
    article = "an" if count == "a" and things[0] in "aeiou" else count
    return " ".join(filter(None, (article, things, place, background)))


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


def _plural(word: str) -> str:
    return word + ("es" if word.endswith("s") else "s")
