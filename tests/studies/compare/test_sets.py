"""Halves, and the outcome of every query."""

import numpy as np
import pytest
import torch

from nuclr.errors import UserError
from nuclr.evaluation.retrieval import retrieval
from nuclr.runs.settings import Data
from nuclr.studies.compare import false_negatives
from nuclr.studies.compare import measure as sets
from tests.training.runs import write_vectors


def features(images: int = 9, captions: int = 2) -> sets.Features:
    torch.manual_seed(0)
    x, y = torch.randn(images, 4), torch.randn(images * captions, 4)
    pairs = torch.stack([torch.arange(images).repeat_interleave(captions), torch.arange(images * captions)], dim=1)
    return sets.Features(x, y, pairs)


def test_hits_average_to_recall():
    found = features()
    hits, expected = sets.retrieval_hits(found), retrieval(found.x, found.y, found.pairs)
    for key, name in (("i2t", "image_to_text"), ("t2i", "text_to_image")):
        for place, k in enumerate(sets.KS):
            assert hits[key][:, place].mean() == pytest.approx(expected[f"{name}_R@{k}"], abs=1e-6)
    assert hits["t2i_image"].tolist() == np.repeat(np.arange(9), 2).tolist()


def test_halves_share_no_image_and_keep_captions_with_theirs():
    found = features()
    a, b = sets.halves(9)
    assert sorted([*a.tolist(), *b.tolist()]) == list(range(9))
    assert sets.halves(9)[0].tolist() == a.tolist()
    half = found.of_images(a)
    assert torch.equal(half.x, found.x[a])
    for image, caption in half.pairs.tolist():
        original = int((found.y == half.y[caption]).all(dim=1).nonzero())
        assert int(a[image]) == original // 2
    assert len(half.y) == 2 * len(a)


def test_kinds_of_test_sets_are_told_apart(tmp_path):
    data = Data(root=str(tmp_path))
    write_vectors(tmp_path / "pairs.npz", images=5)
    np.savez(tmp_path / "classes.npz", x=np.ones((4, 3), "f"), labels=np.arange(4) % 2, prompts=np.ones((2, 3), "f"))
    assert sets.parse_test("pairs.npz", data).kind == "pairs"
    named = sets.parse_test("other=classes.npz", data)
    assert (named.kind, named.name) == ("classes", "other")
    np.savez(tmp_path / "bad.npz", x=np.ones((4, 3), "f"), labels=np.full(4, 7), prompts=np.ones((2, 3), "f"))
    np.savez(tmp_path / "half.npz", x=np.ones((4, 3), "f"), labels=np.zeros(4, int))
    for name, told in (("nowhere.npz", "no such file"), ("bad.npz", "allowed: 0 to 1"), ("half.npz", "prompts")):
        with pytest.raises(UserError, match=told):
            sets.parse_test(name, data)


def test_share_of_false_negatives_equals_loops():
    torch.manual_seed(1)
    scores, zeta = torch.randn(5, 6), torch.randn(6)
    false, excluded = torch.rand(5, 6) < 0.3, torch.rand(5, 6) < 0.3
    excluded[4] = True  # an anchor without negatives is left out
    false &= ~excluded
    found = false_negatives.share(scores, false, excluded, 0.5, zeta)
    for i in range(4):
        weights = [0.0 if excluded[i, j] else float(((scores[i, j] - zeta[j]) / 0.5).exp()) for j in range(6)]
        expected = sum(w for j, w in enumerate(weights) if false[i, j]) / sum(weights)
        assert float(found[i]) == pytest.approx(expected, rel=1e-5)
    assert len(found) == 4
