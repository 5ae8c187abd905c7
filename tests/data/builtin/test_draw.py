"""Pictures have the requested size and show their scene."""

import numpy as np
import pytest

from nuclr.data.builtin import BuiltinPairs
from nuclr.data.builtin.grammar import LEVELS, SLOTS


def test_pictures_of_the_same_scene_differ():
    pairs = BuiltinPairs(n=2000)
    scenes, counts = np.unique(pairs.truth.scenes, return_counts=True)
    same = np.flatnonzero(pairs.truth.scenes == scenes[counts.argmax()])
    assert len(same) > 1
    assert len({pairs.x(int(k)).tobytes() for k in same}) == len(same)


@pytest.mark.parametrize("size", [16, 33, 48])
def test_pictures_have_the_requested_size(size):
    image = BuiltinPairs(n=2, size=size).x(1)
    assert (image.mode, image.size) == ("RGB", (size, size))


def test_a_shape_is_on_the_side_that_its_scene_names():
    """Find a small shape by its pixels, which are far from the background's median."""
    place_slot, size_slot, count_slot, background_slot = (SLOTS[a] for a in (3, 2, 4, 5))
    pairs = BuiltinPairs(n=4000)
    _, _, size, place, count, background = np.unravel_index(pairs.truth.scenes, LEVELS)
    chosen = (size == size_slot.levels.index("small")) & (count == count_slot.levels.index("a"))
    chosen &= background == background_slot.levels.index("over snow")
    sides = {"on the left": (-1, 0), "on the right": (1, 0), "at the top": (0, -1), "at the bottom": (0, 1)}
    for name, (dx, dy) in sides.items():
        for k in np.flatnonzero(chosen & (place == place_slot.levels.index(name)))[:5]:
            pixels = np.asarray(pairs.x(int(k)), float)
            far = np.abs(pixels - np.median(pixels, axis=(0, 1))).sum(axis=2) > 90
            y, x = (c.mean() / 31 - 0.5 for c in np.nonzero(far))
            assert abs(x - 0.27 * dx) < 0.06
            assert abs(y - 0.27 * dy) < 0.06
