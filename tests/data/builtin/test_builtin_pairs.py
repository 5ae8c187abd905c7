"""Built-in pairs: pair k depends only on (seed, split, k)."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from nuclr.data.builtin import BuiltinLabeled, BuiltinPairs
from nuclr.data.builtin.grammar import KINDS, LEVELS
from nuclr.data.builtin.scenes import CHUNK
from nuclr.data.open import open_pairs
from nuclr.errors import UserError


def digest(pairs: BuiltinPairs, count: int) -> str:
    """Hash the first pictures and captions."""
    hashed = hashlib.sha256()
    for k in range(count):
        hashed.update(pairs.x(k).tobytes() + pairs.y(k).encode())
    return hashed.hexdigest()


def test_a_larger_n_only_adds_pairs():
    few, many = BuiltinPairs(n=50, seed=3), BuiltinPairs(n=CHUNK + 50, seed=3)
    assert np.array_equal(few.truth.scenes, many.truth.scenes[:50])
    assert np.array_equal(few.truth.captions, many.truth.captions[:50])
    assert np.array_equal(few.y_id, many.y_id[:50])
    assert digest(few, 50) == digest(many, 50)
    assert few.fingerprint != many.fingerprint


def test_pairs_do_not_depend_on_the_reading_order():
    pairs, again = BuiltinPairs(n=20), BuiltinPairs(n=20)
    backwards = {k: (again.x(k).tobytes(), again.y(k)) for k in reversed(range(20))}
    assert all((pairs.x(k).tobytes(), pairs.y(k)) == backwards[k] for k in range(20))


def test_another_process_generates_the_same_pairs():
    program = (
        "from tests.data.builtin.test_builtin_pairs import *; "
        "print(digest(BuiltinPairs(n=30, seed=5, split='val'), 30))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert other == digest(BuiltinPairs(n=30, seed=5, split="val"), 30)


def test_splits_and_seeds_share_no_random_numbers():
    sources = [BuiltinPairs(300, seed, split) for seed in (0, 1) for split in ("train", "val", "test")]
    sources += [BuiltinLabeled(300, 0, split) for split in ("train", "val", "test")]
    for i, a in enumerate(sources):
        for b in sources[:i]:
            assert (a.truth.captions == b.truth.captions).mean() < 0.2
            assert a.x(0).tobytes() != b.x(0).tobytes()
    assert len({source.fingerprint for source in sources}) == len(sources)


def test_equal_captions_have_equal_ids():
    pairs = BuiltinPairs(n=500)
    texts = [pairs.y(k) for k in range(500)]
    same_text = np.array(texts)[:, None] == np.array(texts)[None]
    assert np.array_equal(same_text, pairs.y_id[:, None] == pairs.y_id[None])
    assert np.array_equal(np.unique(pairs.y_id), np.arange(len(set(texts))))
    assert pairs.x_id.dtype == pairs.y_id.dtype == np.int64


def test_labeled_pictures_have_balanced_classes_and_prompts():
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
def test_wrong_arguments_are_refused_with_their_names(arguments):
    key, value = next(iter(arguments.items()))
    with pytest.raises(UserError, match=f"{key}={value!r}; allowed"):
        BuiltinPairs(**arguments)


def test_open_pairs_gives_the_same_pairs():
    pairs = open_pairs("builtin:n=30,seed=5", split="val")
    assert digest(pairs, 5) == digest(BuiltinPairs(n=30, seed=5, split="val"), 5)
