"""The share of false negatives against loops."""

import pytest
import torch

from nuclr.runs.settings import Data, Objective, Settings
from nuclr.studies.compare import cells


def test_share_of_false_negatives_equals_loops():
    torch.manual_seed(1)
    scores, zeta = torch.randn(5, 6), torch.randn(6)
    false, excluded = torch.rand(5, 6) < 0.3, torch.rand(5, 6) < 0.3
    excluded[4] = True  # an anchor without negatives has no share
    false &= ~excluded
    shares = cells.false_negative_share(scores, false, excluded, 0.5, zeta)
    for i in range(4):
        weights = [0.0 if excluded[i, j] else float(((scores[i, j] - zeta[j]) / 0.5).exp()) for j in range(6)]
        expected = sum(w for j, w in enumerate(weights) if false[i, j]) / sum(weights)
        assert float(shares[i]) == pytest.approx(expected, rel=1e-5)
    assert len(shares) == 4


def test_it_applies_to_builtin_pairs_and_softmax_weights_only():
    def applies(train: str, name: str) -> bool:
        return cells.has_false_negatives(Settings(data=Data(train=train), objective=Objective(name=name)))

    assert applies("builtin:n=10", "nuclr")
    assert not applies("builtin:n=10", "siglip")
    assert not applies("train.npz", "nuclr")
