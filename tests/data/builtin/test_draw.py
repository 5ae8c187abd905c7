"""Pictures have the requested size and show their scene."""

import numpy as np

from nuclr.data.builtin import BuiltinPairs
from nuclr.data.builtin.grammar import LEVELS, SLOTS, TWO_SHAPES


def test_pictures_have_the_requested_size_and_differ_if_their_scene_is_the_same():
    for size in (16, 33, 48):
        image = BuiltinPairs(n=2, size=size).item("x", 1)
        assert (image.mode, image.size) == ("RGB", (size, size))
    pairs = BuiltinPairs(n=2000)
    same = np.flatnonzero(pairs.scenes == np.bincount(pairs.scenes).argmax())
    assert len({pairs.item("x", int(k)).tobytes() for k in same}) == len(same) > 1


def test_a_shape_is_on_the_side_that_its_scene_names():
    """Find a small shape by its pixels, which are far from the background's median."""
    place_slot, size_slot, count_slot, background_slot = (SLOTS[a] for a in (3, 2, 4, 5))
    pairs = BuiltinPairs(n=4000)
    _, _, size, place, count, background = np.unravel_index(pairs.scenes, LEVELS)
    chosen = (size == size_slot.levels.index("small")) & (count == count_slot.levels.index("a"))
    chosen &= background == background_slot.levels.index("over snow")
    sides = {"on the left": (-1, 0), "on the right": (1, 0), "at the top": (0, -1), "at the bottom": (0, 1)}
    for name, (dx, dy) in sides.items():
        for k in np.flatnonzero(chosen & (place == place_slot.levels.index(name)))[:5]:
            pixels = np.asarray(pairs.item("x", int(k)), float)
            far = np.abs(pixels - np.median(pixels, axis=(0, 1))).sum(axis=2) > 90
            y, x = (c.mean() / 31 - 0.5 for c in np.nonzero(far))
            assert abs(x - 0.27 * dx) < 0.06
            assert abs(y - 0.27 * dy) < 0.06


def test_the_first_of_two_shapes_is_left_of_the_second_or_above_it():
    """Find a red and a blue shape on snow by their colors."""
    pairs = BuiltinPairs(n=40_000, shapes=2)
    names = {slot.name: slot.levels for slot in TWO_SHAPES.slots}
    levels = dict(zip(names, np.unravel_index(pairs.scenes, TWO_SHAPES.levels), strict=True))
    wanted = {"first color": "red", "second color": "blue", "background": "over snow"}
    chosen = np.logical_and.reduce([levels[slot] == names[slot].index(level) for slot, level in wanted.items()])
    for axis, arrangement in ((1, "left of"), (0, "above")):
        rows = np.flatnonzero(chosen & (levels["arrangement"] == names["arrangement"].index(arrangement)))[:5]
        assert len(rows) == 5
        for k in rows:
            red, _, blue = np.moveaxis(np.asarray(pairs.item("x", int(k)), float), 2, 0)
            first, second = (np.nonzero(far > 80)[axis].mean() for far in (red - blue, blue - red))
            assert second - first > 8
