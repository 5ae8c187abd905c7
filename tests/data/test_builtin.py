"""Built-in pairs: pair k depends only on (seed, split, k), captions fit the pictures, and pictures show their scene."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from nuclr.data.builtin import BuiltinLabeled, BuiltinPairs
from nuclr.data.builtin.grammar import (
    CHUNK,
    KINDS,
    ONE_SHAPE,
    SLOTS,
    TWO_SHAPES,
    draw_scenes_and_captions,
    prompts,
)
from nuclr.data.opening import open_pairs
from nuclr.errors import UserError

CAPTIONS = np.arange(np.prod(ONE_SHAPE.words), dtype=np.int32)


def digest(pairs: BuiltinPairs, count: int) -> str:
    """Hash the first pictures and captions."""
    hashed = hashlib.sha256()
    for k in range(count):
        hashed.update(pairs.item("x", k).tobytes() + pairs.item("y", k).encode())
    return hashed.hexdigest()


def test_a_larger_n_only_adds_pairs():
    few, many = BuiltinPairs(n=50, seed=3), BuiltinPairs(n=CHUNK + 50, seed=3)
    assert np.array_equal(few.scenes, many.scenes[:50])
    assert np.array_equal(few.captions, many.captions[:50])
    assert np.array_equal(few.sides["y"].ids, many.sides["y"].ids[:50])
    assert digest(few, 50) == digest(many, 50)
    assert few.fingerprint != many.fingerprint


def test_splits_and_seeds_share_no_random_numbers():
    sources = [BuiltinPairs(300, seed, split) for seed in (0, 1) for split in ("train", "val", "test")]
    sources += [BuiltinLabeled(300, 0, split) for split in ("train", "val", "test")]
    for i, a in enumerate(sources):
        for b in sources[:i]:
            assert (a.captions == b.captions).mean() < 0.2
            assert a.item("x", 0).tobytes() != b.item("x", 0).tobytes()
    assert len({source.fingerprint for source in sources}) == len(sources)


def test_equal_captions_have_equal_ids():
    pairs = BuiltinPairs(n=500)
    texts = [pairs.item("y", k) for k in range(500)]
    same_text = np.array(texts)[:, None] == np.array(texts)[None]
    assert np.array_equal(same_text, pairs.sides["y"].ids[:, None] == pairs.sides["y"].ids[None])
    assert np.array_equal(np.unique(pairs.sides["y"].ids), np.arange(len(set(texts))))
    assert pairs.sides["x"].ids.dtype == pairs.sides["y"].ids.dtype == np.int64


def test_labeled_pictures_have_balanced_classes_and_prompts():
    labeled = BuiltinLabeled(n=240)
    kinds = np.unravel_index(labeled.scenes, ONE_SHAPE.levels)[0]
    assert np.array_equal(kinds, labeled.sides["y"].ids)
    assert np.array_equal(np.bincount(labeled.sides["y"].ids), np.full(12, 20))
    assert labeled.item("y", 13) == KINDS[1]
    texts = labeled.prompts()
    assert len(texts) == len(labeled.classes) == 12
    assert "two crosses" in texts[KINDS.index("cross")]
    assert "an arrow" in texts[KINDS.index("arrow")]


def test_another_process_and_another_order_give_the_same_pairs():
    program = "from tests.data.test_builtin import *; print(digest(BuiltinPairs(n=30, seed=5, split='val'), 30))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    pairs, again = open_pairs("builtin:n=30,seed=5", split="val"), BuiltinPairs(n=30, seed=5, split="val")
    assert other == digest(pairs, 30)
    for k in reversed(range(30)):
        assert again.item("x", k).tobytes() == pairs.item("x", k).tobytes() and again.item("y", k) == pairs.item("y", k)


@pytest.mark.parametrize(("key", "value"), [("n", 1), ("n", 2**31), ("seed", -1), ("split", "dev"), ("size", 8)])
def test_wrong_arguments_are_refused_with_their_names(key, value):
    with pytest.raises(UserError, match=f"{key}={value!r}"):
        BuiltinPairs(**{key: value})


def test_texts_of_captions():
    assert ONE_SHAPE.phrase("shape", "", "", "", "", "") == "shape"
    assert ONE_SHAPE.phrase("arrow", "", "", "", "a", "over sand") == "an arrow over sand"
    words = ("cross", "red", "small", "on the left", "two", "over water")
    assert ONE_SHAPE.phrase(*words) == "two small red crosses on the left over water"
    texts = {ONE_SHAPE.text(int(caption)) for caption in CAPTIONS}
    assert len(texts) == len(CAPTIONS), "different captions have different texts"
    assert texts.issuperset(prompt for kind in KINDS for prompt in prompts(kind))


def test_captions_of_two_shapes():
    words = ["star", "red", "small", "shape", "", "", "left of", "over sand"]
    code = np.ravel_multi_index(
        [slot.words.index(w) for slot, w in zip(TWO_SHAPES.slots, words, strict=True)], TWO_SHAPES.words
    )
    assert TWO_SHAPES.text(int(code)) == "a small red star left of a shape over sand"
    drawn = np.random.default_rng(0).choice(int(np.prod(TWO_SHAPES.words)), 3000, replace=False)
    assert len({TWO_SHAPES.text(int(c)) for c in drawn}) == len(drawn)


def test_every_detail_can_be_omitted_and_probabilities_sum_to_one():
    for slot in (*ONE_SHAPE.slots, *TWO_SHAPES.slots):
        omitted = [slot.words.index(word) for word in ("", "shape", "and") if word in slot.words]
        assert (slot.table[:, omitted] > 0).all()
        assert np.allclose(slot.table.sum(axis=1), 1)


def test_captions_are_drawn_with_the_probabilities_of_the_grammar():
    """Compare counts of captions with n p, in units of the standard error, for the most frequent scenes."""
    scenes, captions = draw_scenes_and_captions(300_000, seed=0, stream=0)
    for scene in np.bincount(scenes).argsort()[-3:]:
        drawn = np.bincount(captions[scenes == scene], minlength=len(CAPTIONS))
        p = np.ones(len(CAPTIONS))
        levels = np.unravel_index(scene, ONE_SHAPE.levels)
        words = np.unravel_index(CAPTIONS, ONE_SHAPE.words)
        for slot, level, word in zip(ONE_SHAPE.slots, levels, words, strict=True):
            p *= slot.table[level, word]
        expected = drawn.sum() * p
        assert drawn[p == 0].sum() == 0
        frequent = expected >= 5
        z = (drawn - expected)[frequent] / np.sqrt(expected * (1 - p))[frequent]
        assert frequent.sum() > 20
        assert np.abs(z).max() < 4.5
        assert 0.5 < (z**2).mean() < 1.6


def test_scenes_are_long_tailed():
    counts = np.sort(np.bincount(BuiltinPairs(n=200_000).scenes, minlength=int(np.prod(ONE_SHAPE.levels))))[::-1]
    assert counts[:1440].sum() > 0.5 * counts.sum()  # a tenth of the scenes has more than half of the pictures
    assert counts[0] > 100 * max(1, counts[-1440])


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
    _, _, size, place, count, background = np.unravel_index(pairs.scenes, ONE_SHAPE.levels)
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
