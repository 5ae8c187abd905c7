"""Built-in pairs: pair k depends on nothing but (seed, split, k), and pictures show what their captions say."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from nuclr.data.builtin import BuiltinLabeled, BuiltinPairs
from nuclr.data.builtin.grammar import KINDS, LEVELS, SLOTS
from nuclr.data.builtin.scenes import CHUNK
from nuclr.data.open import open_pairs
from nuclr.errors import UserError


def digest(pairs: BuiltinPairs, count: int) -> str:
    """Of the first pictures and captions."""
    hashed = hashlib.sha256()
    for k in range(count):
        hashed.update(pairs.x(k).tobytes() + pairs.y(k).encode())
    return hashed.hexdigest()


def test_more_pairs_only_add_pairs():
    few, many = BuiltinPairs(n=50, seed=3), BuiltinPairs(n=CHUNK + 50, seed=3)
    assert np.array_equal(few.truth.scenes, many.truth.scenes[:50])
    assert np.array_equal(few.truth.captions, many.truth.captions[:50])
    assert np.array_equal(few.y_id, many.y_id[:50])
    assert digest(few, 50) == digest(many, 50)
    assert few.fingerprint != many.fingerprint


def test_reading_order_does_not_matter():
    pairs, again = BuiltinPairs(n=20), BuiltinPairs(n=20)
    backwards = {k: (again.x(k).tobytes(), again.y(k)) for k in reversed(range(20))}
    assert all((pairs.x(k).tobytes(), pairs.y(k)) == backwards[k] for k in range(20))


def test_another_process_makes_the_same_pairs():
    program = "from tests.data.test_builtin import *; print(digest(BuiltinPairs(n=30, seed=5, split='val'), 30))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert other == digest(BuiltinPairs(n=30, seed=5, split="val"), 30)


def test_splits_and_seeds_share_no_stream():
    sources = [BuiltinPairs(300, seed, split) for seed in (0, 1) for split in ("train", "val", "test")]
    sources += [BuiltinLabeled(300, 0, split) for split in ("train", "val", "test")]
    for i, a in enumerate(sources):
        for b in sources[:i]:
            assert (a.truth.captions == b.truth.captions).mean() < 0.2
            assert a.x(0).tobytes() != b.x(0).tobytes()
    assert len({source.fingerprint for source in sources}) == len(sources)


def test_pictures_of_one_scene_differ():
    pairs = BuiltinPairs(n=2000)
    scenes, counts = np.unique(pairs.truth.scenes, return_counts=True)
    same = np.flatnonzero(pairs.truth.scenes == scenes[counts.argmax()])
    assert len(same) > 1
    assert len({pairs.x(int(k)).tobytes() for k in same}) == len(same)


@pytest.mark.parametrize("size", [16, 33, 48])
def test_pictures_have_their_size(size):
    image = BuiltinPairs(n=2, size=size).x(1)
    assert (image.mode, image.size) == ("RGB", (size, size))


def test_equal_captions_share_an_id():
    pairs = BuiltinPairs(n=500)
    texts = [pairs.y(k) for k in range(500)]
    same_text = np.array(texts)[:, None] == np.array(texts)[None]
    assert np.array_equal(same_text, pairs.y_id[:, None] == pairs.y_id[None])
    assert np.array_equal(np.unique(pairs.y_id), np.arange(len(set(texts))))
    assert pairs.x_id.dtype == pairs.y_id.dtype == np.int64


def test_scenes_are_long_tailed():
    counts = np.sort(np.bincount(BuiltinPairs(n=200_000).truth.scenes, minlength=int(np.prod(LEVELS))))[::-1]
    assert counts[:1440].sum() > 0.5 * counts.sum()  # a tenth of the scenes makes up more than half of the pictures
    assert counts[0] > 100 * max(1, counts[-1440])


def test_where_the_picture_differs_is_where_the_caption_says():
    """A small shape lies on the side that its scene names: the pixels far from the background's mean are there."""
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


def test_labeled_pictures_are_balanced_and_named():
    labeled = BuiltinLabeled(n=240)
    kinds = np.unravel_index(labeled.truth.scenes, LEVELS)[0]
    assert np.array_equal(kinds, labeled.y_id)
    assert np.array_equal(np.bincount(labeled.y_id), np.full(12, 20))
    assert labeled.y(13) == KINDS[1]
    prompts = labeled.prompts()
    assert len(prompts) == len(labeled.classes) == 12
    assert "two crosses" in prompts[KINDS.index("cross")]
    assert "an arrow" in prompts[KINDS.index("arrow")]


@pytest.mark.parametrize(
    "arguments", [{"n": 1}, {"n": 2**31}, {"seed": -1}, {"split": "dev"}, {"size": 8}], ids=lambda a: next(iter(a))
)
def test_wrong_arguments_are_named(arguments):
    key, value = next(iter(arguments.items()))
    with pytest.raises(UserError, match=f"{key}={value!r}; allowed"):
        BuiltinPairs(**arguments)


def test_opened_by_name():
    pairs = open_pairs("builtin:n=30,seed=5", split="val")
    assert digest(pairs, 5) == digest(BuiltinPairs(n=30, seed=5, split="val"), 5)
