"""Built-in pairs: pair k depends only on (seed, split, k)."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from nuclr.data.builtin import BuiltinLabeled, BuiltinPairs
from nuclr.data.builtin.grammar import CHUNK, KINDS, LEVELS
from nuclr.data.opening import open_pairs
from nuclr.errors import UserError


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
    kinds = np.unravel_index(labeled.scenes, LEVELS)[0]
    assert np.array_equal(kinds, labeled.sides["y"].ids)
    assert np.array_equal(np.bincount(labeled.sides["y"].ids), np.full(12, 20))
    assert labeled.item("y", 13) == KINDS[1]
    prompts = labeled.prompts()
    assert len(prompts) == len(labeled.classes) == 12
    assert "two crosses" in prompts[KINDS.index("cross")]
    assert "an arrow" in prompts[KINDS.index("arrow")]


def test_another_process_and_another_order_give_the_same_pairs():
    program = (
        "from tests.data.builtin.test_builtin_pairs import *; "
        "print(digest(BuiltinPairs(n=30, seed=5, split='val'), 30))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    pairs, again = open_pairs("builtin:n=30,seed=5", split="val"), BuiltinPairs(n=30, seed=5, split="val")
    assert other == digest(pairs, 30)
    for k in reversed(range(30)):
        assert again.item("x", k).tobytes() == pairs.item("x", k).tobytes() and again.item("y", k) == pairs.item("y", k)


@pytest.mark.parametrize(("key", "value"), [("n", 1), ("n", 2**31), ("seed", -1), ("split", "dev"), ("size", 8)])
def test_wrong_arguments_are_refused_with_their_names(key, value):
    with pytest.raises(UserError, match=f"{key}={value!r}"):
        BuiltinPairs(**{key: value})
