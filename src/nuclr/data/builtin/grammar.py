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

Scenes and captions are stored as *codes*, mixed-radix numbers over the slots (numpy's `ravel_multi_index`). They are
drawn by number from a counter-based random stream, with long-tailed frequencies. Sample k uses the 64-bit words 16 k,
..., 16 k + 15 of the Philox stream keyed by (seed, stream), one word per choice. It therefore depends only on (seed,
stream, k), not on the number of samples or on the reading order.
Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int32]
Uniforms = NDArray[np.float64]

DRAWS = 16  # words per sample: one per slot for its scene, one per slot for its caption, the rest unused
CHUNK = 2**16


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
    _slot(
        "kind",
        _named(
            *KINDS,
            left_out=0.2,
            instead="shape",
        ),
    ),
    _slot("color", _named(*COLORS, left_out=0.4)),
    _slot("size", _named("small", left_out=0.65) | _named("large", left_out=0.75)),
    _slot(
        "place",
        _named("in the middle", left_out=0.8)
        | _named(
            "on the left",
            "on the right",
            "at the top",
            "at the bottom",
            left_out=0.65,
        ),
    ),
    _slot("count", _named("a", left_out=0.6) | _named("two", "three", left_out=0.5)),  # "red star": any count
    _slot("background", _named(*BACKGROUNDS, left_out=0.85)),
)


def _one_shape(
    kind: str,
    color: str,
    size: str,
    place: str,
    count: str,
    background: str,
) -> str:
    shapes = _plural(kind) if count in ("two", "three") else kind
    things = _join(size, color, shapes)
    return _join(
        _article(things) if count == "a" else count,
        things,
        place,
        background,
    )


def _two_shapes(*words: str) -> str:
    first, second, (arrangement, background) = words[:3], words[3:6], words[6:]
    things = [_join(size, color, kind) for kind, color, size in (first, second)]
    return _join(
        _article(things[0]),
        things[0],
        arrangement,
        _article(things[1]),
        things[1],
        background,
    )


def _join(*words: str) -> str:
    return " ".join(filter(None, words))


def _article(things: str) -> str:
    return "an" if things[0] in "aeiou" else "a"


def _plural(word: str) -> str:
    return word + ("es" if word.endswith("s") else "s")


ONE_SHAPE = Language(SLOTS, _one_shape)
TWO_SHAPES = Language(
    (
        *(
            slot
            for shape in ("first", "second")
            for slot in (
                _slot(
                    f"{shape} kind",
                    _named(
                        *KINDS,
                        left_out=0.05,
                        instead="shape",
                    ),
                ),
                _slot(f"{shape} color", _named(*COLORS, left_out=0.1)),
                _slot(f"{shape} size", _named("small", "large", left_out=0.3)),
            )
        ),
        _slot(
            "arrangement",
            _named(
                "left of",
                "above",
                left_out=0.2,
                instead="and",
            ),
        ),
        _slot("background", _named(*BACKGROUNDS, left_out=0.5)),
    ),
    _two_shapes,
)


def prompts(kind: str) -> list[str]:
    """Return captions that name this kind of shape, with every size and count, and without other details.

    Example:
        >>> prompts("star")[:3]
        ['star', 'a star', 'two stars']

    """
    texts = []
    for size in SLOTS[2].words:
        for count in SLOTS[4].words:
            texts.append(_one_shape(kind, "", size, "", count, ""))
    return texts


# -- how often scenes occur --------------------------------------------------------------------------------------------

FAVORITE = {
    "circle": "red", "square": "blue", "star": "yellow", "heart": "red", "triangle": "green", "moon": "yellow",
    "cross": "orange", "ring": "orange", "diamond": "blue", "arrow": "black", "flower": "pink", "bolt": "purple",
}  # fmt: skip


def zipf(levels: int, exponent: float) -> Uniforms:
    """Return probabilities (levels,) proportional to 1 / rank^exponent."""
    weights = np.arange(1, levels + 1) ** -exponent
    return weights / weights.sum()


# The product of these is long-tailed: the most frequent scene is 4,000 times as frequent as the rarest.
KIND = zipf(len(KINDS), 1.0)
# p(color | kind), (kinds, colors): the favorite color first, then the others in the order of COLORS.
COLOR_OF_KIND = np.stack([np.roll(zipf(len(COLORS), 1.0), COLORS.index(FAVORITE[kind])) for kind in KINDS])
SIZE_OF_COUNT = np.array([[0.4, 0.6], [0.5, 0.5], [0.6, 0.4]])
PLACE = zipf(5, 0.7)
COUNT = zipf(3, 1.0)
KIND_OF_TWO = zipf(len(KINDS), 0.7)
EVEN = zipf(2, 0.0)
BACKGROUND = zipf(5, 0.7)


def draw_scenes_and_captions(
    n: int,
    seed: int,
    stream: int,
    balanced: bool = False,
    language: Language = ONE_SHAPE,
) -> tuple[Codes, Codes]:
    """Draw the scenes and captions of samples 0, ..., n - 1.

    Args:
        n: number of samples.
        seed: first half of the key of the random stream.
        stream: second half of the key.
        balanced: let the kinds of shape take turns, so that all are equally frequent. Only with one shape.
        language: of the captions: `ONE_SHAPE` or `TWO_SHAPES`.

    Returns:
        The codes of the scenes (n,) and of the captions (n,).

    """
    scenes = np.empty(n, np.int32)
    captions = np.empty(n, np.int32)
    generator = np.random.Philox(key=np.array([seed, stream], np.uint64))
    slots = language.slots
    for start in range(0, n, CHUNK):
        rows = slice(start, min(start + CHUNK, n))
        u = uniforms(generator.random_raw((rows.stop - start) * DRAWS)).reshape(-1, DRAWS)
        if language is ONE_SHAPE:
            kinds = np.arange(start, rows.stop) % len(KINDS) if balanced else pick(KIND, u[:, 0])
            levels = _levels(kinds, u[:, 1:6])
        else:
            levels = _levels_of_two(u[:, :8])
        words = [pick(slot.table[levels[slot.name]], u[:, len(slots) + a]) for a, slot in enumerate(slots)]
        scenes[rows] = np.ravel_multi_index([levels[slot.name] for slot in slots], language.levels)
        captions[rows] = np.ravel_multi_index(words, language.words)
    return scenes, captions


def uniforms(words: NDArray[np.uint64]) -> Uniforms:
    """Convert 64-bit words to numbers in [0, 1), using their upper 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def pick(probabilities: Uniforms, u: Uniforms) -> NDArray[np.intp]:
    """Return the choices (m,) that the uniform numbers `u` (m,) select.

    `probabilities` is (m, k), or (k,) if all rows are the same.
    """
    total = np.cumsum(probabilities, axis=-1)
    return (u[:, None] >= total / total[..., -1:]).sum(axis=1)  # divided by its end, it ends in exactly 1


def _levels(kind: NDArray[np.intp], u: Uniforms) -> dict[str, NDArray[np.intp]]:
    count = pick(COUNT, u[:, 0])
    return {
        "kind": kind,
        "color": pick(COLOR_OF_KIND[kind], u[:, 1]),
        "size": pick(SIZE_OF_COUNT[count], u[:, 2]),
        "place": pick(PLACE, u[:, 3]),
        "count": count,
        "background": pick(BACKGROUND, u[:, 4]),
    }


def _levels_of_two(u: Uniforms) -> dict[str, NDArray[np.intp]]:
    levels = {"arrangement": pick(EVEN, u[:, 6]), "background": pick(BACKGROUND, u[:, 7])}
    for shape, v in (("first", u[:, :3]), ("second", u[:, 3:6])):
        kind = pick(KIND_OF_TWO, v[:, 0])
        levels |= {
            f"{shape} kind": kind,
            f"{shape} color": pick(COLOR_OF_KIND[kind], v[:, 1]),
            f"{shape} size": pick(EVEN, v[:, 2]),
        }
    return levels
