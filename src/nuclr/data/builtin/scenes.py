"""Which scenes and captions there are: drawn by number from a counter-based stream, with long-tailed frequencies.

Sample k takes the 64-bit words 16 k, ..., 16 k + 15 of the Philox stream keyed by (seed, stream), one for each
choice. So it depends on nothing but (seed, stream, k): not on how many samples there are, nor on who asks first.
Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

import numpy as np
from numpy.typing import NDArray

from nuclr.data.builtin.grammar import COLORS, KINDS, LEVELS, SLOTS, WORDS

Codes = NDArray[np.int32]
Uniforms = NDArray[np.float64]

DRAWS = 16  # words of the stream a sample: six for its scene, six for its caption, and four to spare
CHUNK = 2**16
FAVOURITE = {
    "circle": "red", "square": "blue", "star": "yellow", "heart": "red", "triangle": "green", "moon": "yellow",
    "cross": "orange", "ring": "orange", "diamond": "blue", "arrow": "black", "flower": "pink", "bolt": "purple",
}  # fmt: skip


def zipf(levels: int, exponent: float) -> Uniforms:
    """Probabilities proportional to 1 / rank^exponent."""
    weights = np.arange(1, levels + 1) ** -exponent
    return weights / weights.sum()


def _color_of_kind() -> Uniforms:
    """(kinds, colors): each kind has its favorite, and the others follow in the order of COLORS."""
    row = zipf(len(COLORS), 1.0)
    return np.stack([np.roll(row, COLORS.index(FAVOURITE[kind])) for kind in KINDS])


# Their product is long-tailed: the most frequent scene is four thousand times as frequent as the rarest.
KIND = zipf(len(KINDS), 1.0)
COLOR_OF_KIND = _color_of_kind()
SIZE_OF_COUNT = np.array([[0.4, 0.6], [0.5, 0.5], [0.6, 0.4]])
PLACE = zipf(5, 0.7)
COUNT = zipf(3, 1.0)
BACKGROUND = zipf(5, 0.7)


def draw_scenes_and_captions(n: int, seed: int, stream: int, balanced: bool = False) -> tuple[Codes, Codes]:
    """Codes of the scenes and of the captions of samples 0, ..., n - 1; balanced: all kinds equally often, in turn."""
    scenes, captions = np.empty(n, np.int32), np.empty(n, np.int32)
    generator = np.random.Philox(key=np.array([seed, stream], np.uint64))
    for start in range(0, n, CHUNK):
        rows = slice(start, min(start + CHUNK, n))
        u = uniforms(generator.random_raw((rows.stop - start) * DRAWS)).reshape(-1, DRAWS)
        kinds = np.arange(start, rows.stop) % len(KINDS) if balanced else pick(KIND, u[:, 0])
        levels = _levels(kinds, u[:, 1:6])
        words = [pick(slot.table[levels[slot.name]], u[:, 6 + a]) for a, slot in enumerate(SLOTS)]
        scenes[rows] = np.ravel_multi_index([levels[slot.name] for slot in SLOTS], LEVELS)
        captions[rows] = np.ravel_multi_index(words, WORDS)
    return scenes, captions


def uniforms(words: NDArray[np.uint64]) -> Uniforms:
    """Numbers in [0, 1) from the upper 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def pick(probabilities: Uniforms, u: Uniforms) -> NDArray[np.intp]:
    """For each row of probabilities (m, k), or one for all (k,), the choice in which u (m,) falls."""
    total = np.cumsum(probabilities, axis=-1)
    return (u[:, None] >= total / total[..., -1:]).sum(axis=1)  # it ends in 1 exactly, so no choice of probability 0


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
