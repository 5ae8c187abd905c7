"""Popularity corrections of a test set: the bank, cross-validation by groups, and the bias of documents."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.errors import UserError
from nuclr.evaluation import Bank, Correction, cross_validated_ranks, retrieval_metrics, summarize_ranks
from nuclr.runs.features import PairFeatures
from nuclr.studies.evaluate.corrector import Corrector, parse_bank


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
    return PairFeatures(x, y, links, rows, numbers, numbers, numbers, torch.arange(32) // 2, "en", "de")


def corrector(bank=None, size=100):
    return Corrector("train" if bank else "queries", None, bank, Correction(0.2, 0.75), "nothing", size)


def test_metrics_have_the_names_of_the_sides_and_use_the_bank(pairs):
    for bank in (None, Bank(*random_features(40, seed=1))):
        used = bank or Bank(pairs.x, pairs.y)
        bias_x, bias_y = Correction(0.2, 0.75).biases(used, pairs.x, pairs.y)
        expected = retrieval_metrics(pairs.x, pairs.y, pairs.links, bias_x=bias_x, bias_y=bias_y, sides=("en", "de"))
        assert corrector(bank)(pairs) == expected and "de_to_en_R@1" in expected


def test_halves_keep_groups_together(pairs):
    bank = Bank(*random_features(40, seed=1))
    metrics, chosen = corrector(bank).crossed(pairs)
    ranked, corrections = cross_validated_ranks(pairs.x, pairs.y, pairs.links, bank, pairs.x_group)
    assert metrics == summarize_ranks(*ranked, sides=("en", "de"))
    assert chosen == [dataclasses.asdict(correction) for correction in corrections]


def test_the_bias_of_documents(pairs):
    bank = Bank(*random_features(40, seed=1))
    expected = Correction(0.2, 0.75).biases(bank, pairs.x, pairs.y)[1]
    assert torch.equal(corrector(bank).document_bias(pairs.x, pairs.y), expected)
    own = Correction(0.2, 0.75).biases(Bank(pairs.x, pairs.y), pairs.x, pairs.y)[1]
    assert torch.equal(corrector().document_bias(pairs.x, pairs.y), own)
    few = corrector(size=10).document_bias(pairs.x, pairs.y)
    assert few.shape == own.shape and not torch.equal(few, own), "a bank of ten queries and ten documents"
    description = corrector(bank).describe()
    assert (description["bank_x"], description["bank_y"], description["transductive"]) == (40, 40, False)


def test_banks_have_two_names():
    assert parse_bank("bank=train") == "train"
    for text in ("bank=test", "train", "bank="):
        with pytest.raises(UserError, match="allowed: bank=train or bank=queries"):
            parse_bank(text)
