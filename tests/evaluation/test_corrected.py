"""Choosing a correction on validation pairs."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from nuclr.evaluation import (
    Bank,
    choose_correction,
    cross_validated_ranks,
    query_ranks,
    retrieval_metrics,
    retrieval_ranks,
)
from nuclr.evaluation.corrected import Correction, ranks_by_correction
from nuclr.popularity import PopularityCorrection
from tests.popularity.test_correction import features


def test_the_correction_with_the_best_reciprocal_rank_is_chosen():
    x, y, links = features(n=150)
    bank = Bank(*features(seed=1, n=200)[:2])
    chosen = choose_correction(x, y, links, bank, temperatures=(0.05, 0.2), strengths=(0.5, 1.0))
    assert chosen.temperature in (0.05, 0.2) and chosen.strength in (0.5, 1.0)
    settings = chosen.temperature, chosen.strength
    bias_x = PopularityCorrection(*settings).fit(bank.y, bank.x).bias(x)
    bias_y = PopularityCorrection(*settings).fit(bank.x, bank.y).bias(y)
    assert retrieval_metrics(x, y, links, bias_x=bias_x, bias_y=bias_y)["mean_R@1"] == pytest.approx(chosen.recall)
    grid = {
        setting: sum(float((1 / of.expected()).mean()) for of in ranked)
        for setting, ranked in ranks_by_correction(x, y, links, bank, (0.05, 0.2), (0.5, 1.0))
    }
    assert max(grid, key=grid.get) == replace(chosen, recall=None)
    assert choose_correction(x, y, links, bank).recall >= float(query_ranks(x, y, links).hits(1).mean()) - 0.1
    with pytest.raises(ValueError, match="temperatures or strengths is empty"):
        choose_correction(x, y, links, bank, temperatures=())


def test_each_half_is_ranked_under_the_correction_chosen_on_the_other():
    x, y, _ = features(n=80)
    y = torch.cat([y, normalize(y + 0.1, dim=1)])
    links = torch.stack([torch.arange(160) % 80, torch.arange(160)], 1)
    bank = Bank(*features(seed=1, n=100)[:2])
    ranked, chosen = cross_validated_ranks(x, y, links, bank)
    for half, correction in enumerate(chosen):
        bias_x, bias_y = correction.biases(bank, x, y)
        for merged, alone in zip(ranked, retrieval_ranks(x, y, links, bias_x, bias_y), strict=True):
            own = merged.query % 2 == half  # with 80 images, a caption's row has the parity of its image's
            assert torch.equal(merged.hits(1)[own], alone.hits(1)[own])
        others = [of.hits(1)[of.query % 2 != half].mean() for of in retrieval_ranks(x, y, links, bias_x, bias_y)]
        assert correction.recall == pytest.approx(float(sum(others)) / 2)
    with pytest.raises(ValueError, match="1 x with a partner; needs two"):
        cross_validated_ranks(x[:1], y[:1], links[:1], bank)


def test_a_group_is_not_divided_into_halves():
    """Groups of two x and two y that all belong together: the halves alternate by group."""
    x, y, _ = features(n=80)
    groups = torch.arange(80) // 2
    links = torch.tensor([[a, b] for a in range(80) for b in range(80) if a // 2 == b // 2])
    bank = Bank(*features(seed=1, n=100)[:2])
    ranked, chosen = cross_validated_ranks(x, y, links, bank, 7 * groups + 3)
    for half, correction in enumerate(chosen):
        bias_x, bias_y = correction.biases(bank, x, y)
        for merged, alone in zip(ranked, retrieval_ranks(x, y, links, bias_x, bias_y), strict=True):
            own = groups[merged.query] % 2 == half
            assert torch.equal(merged.hits(1)[own], alone.hits(1)[own])
    alternating = cross_validated_ranks(x, y, links, bank)
    assert alternating[1] != chosen, "without groups, partners of one query are in both halves"
    with pytest.raises(ValueError, match="group"):
        cross_validated_ranks(x, y, links, bank, groups[:5])


def test_numpy_arrays_give_the_same_choice():
    x, y, links = features(n=40)
    bank_x, bank_y, _ = features(seed=1, n=50)
    chosen = choose_correction(x, y, links, Bank(bank_x, bank_y), temperatures=[0.1])
    arrays = x.numpy(), y.numpy(), links.tolist()
    assert choose_correction(*arrays, Bank(bank_x.numpy(), bank_y.numpy()), temperatures=[0.1]) == chosen


def test_a_bank_refuses_features_of_other_norms():
    x, y, _ = features()
    with pytest.raises(ValueError, match=r"y: row 0 has norm 2"):
        Bank(x, 2 * y)
    with pytest.raises(ValueError, match=r"gallery: row 0 has norm 3"):
        Bank(x, y).zeta(3 * x, y, 0.1)


@pytest.mark.parametrize("transductive", [False, True])
def test_without_a_temperature_the_biases_are_the_default_ones(transductive):
    x, y, _ = features(n=120)
    bank = Bank(x, y, transductive=transductive)
    bias_x, bias_y = Correction().biases(bank, x, y)
    assert torch.equal(bias_x, PopularityCorrection().fit(y, x, transductive=transductive).bias(x))
    assert torch.equal(bias_y, PopularityCorrection().fit(x, y, transductive=transductive).bias(y))
