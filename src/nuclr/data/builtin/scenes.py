"""Draw scenes and captions by number from a counter-based random stream, with long-tailed frequencies.

Sample k uses the 64-bit words 16 k, ..., 16 k + 15 of the Philox stream keyed by (seed, stream), one word per choice.
It therefore depends only on (seed, stream, k), not on the number of samples or on the reading order.
Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

import numpy as np
from numpy.typing import NDArray

from nuclr.data.builtin.grammar import COLORS, KINDS, ONE_SHAPE, Language

Codes = NDArray[np.int32]
Uniforms = NDArray[np.float64]

DRAWS = 16  # words per sample: one per slot for its scene, one per slot for its caption, the rest unused
CHUNK = 2**16
FAVORITE = {
    "circle": "red", "square": "blue", "star": "yellow", "heart": "red", "triangle": "green", "moon": "yellow",
    "cross": "orange", "ring": "orange", "diamond": "blue", "arrow": "black", "flower": "pink", "bolt": "purple",
}  # fmt: skip


def zipf(levels: int, exponent: float) -> Uniforms:
    """Return probabilities (levels,) proportional to 1 / rank^exponent."""
    weights = np.arange(1, levels + 1) ** -exponent
    return weights / weights.sum()


def _color_of_kind() -> Uniforms:
    """Return p(color | kind), (kinds, colors): the favorite color first, then the others in the order of COLORS."""
    row = zipf(len(COLORS), 1.0)
    return np.stack([np.roll(row, COLORS.index(FAVORITE[kind])) for kind in KINDS])


# The product of these is long-tailed: the most frequent scene is 4,000 times as frequent as the rarest.
KIND = zipf(len(KINDS), 1.0)
COLOR_OF_KIND = _color_of_kind()
SIZE_OF_COUNT = np.array([[0.4, 0.6], [0.5, 0.5], [0.6, 0.4]])
PLACE = zipf(5, 0.7)
COUNT = zipf(3, 1.0)
KIND_OF_TWO = zipf(len(KINDS), 0.7)
EVEN = zipf(2, 0.0)
BACKGROUND = zipf(5, 0.7)


def draw_scenes_and_captions(
    n: int, seed: int, stream: int, balanced: bool = False, language: Language = ONE_SHAPE
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
    scenes, captions = np.empty(n, np.int32), np.empty(n, np.int32)
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
