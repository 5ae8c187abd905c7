"""Popularity corrections of a test set: the bank, cross-validation by groups, and the bias of documents."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.evaluation import Bank, Correction, retrieval_metrics, summarize_ranks
from nuclr.runs.features import PairFeatures
from nuclr.studies.evaluate.study import Corrector


def random_features(n, seed=0):
    x, y = normalize(torch.randn(2, n, 6, generator=torch.Generator().manual_seed(seed)), dim=-1)
    return x, normalize(x + y, dim=1)


@pytest.fixture
def pairs():
    """Sixteen groups of two x and two y that all belong together."""
    x, y = random_features(32)
    rows = torch.stack([torch.arange(32)] * 2, dim=1)
    links = torch.tensor([[a, b] for a in range(32) for b in range(32) if a // 2 == b // 2])
    numbers = np.arange(32)
    return PairFeatures(x, y, links, rows, numbers, numbers, numbers, torch.arange(32) // 2, ("en", "de"))


def corrector(bank=None):
    return Corrector("train" if bank else "queries", Correction(0.2, 0.75), "nothing", bank)


def test_metrics_have_the_names_of_the_sides_and_use_the_bank(pairs):
    for bank in (None, Bank(*random_features(40, seed=1))):
        used = bank or Bank(pairs.x, pairs.y)
        bias_x, bias_y = Correction(0.2, 0.75).biases(used, pairs.x, pairs.y)
        expected = retrieval_metrics(pairs.x, pairs.y, pairs.links, bias_x=bias_x, bias_y=bias_y, sides=("en", "de"))
        assert summarize_ranks(*corrector(bank).ranks(pairs), sides=("en", "de")) == expected
