"""Choosing a correction on validation pairs, and what it changes on held-out queries."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from nuclr.evaluation import (
    Bank,
    choose_correction,
    cross_validated_ranks,
    cut_halves,
    popularity_agreement,
    query_ranks,
    rank_correlation,
    retrieval_metrics,
    retrieval_ranks,
)
from nuclr.evaluation.corrected import Correction, ranks_by_correction
from nuclr.popularity import PopularityCorrection, hubness
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
    with pytest.raises(ValueError):
        choose_correction(x, y, links, bank, temperatures=())


@pytest.mark.parametrize("grouped", [False, True])
def test_each_half_is_ranked_under_the_correction_chosen_on_the_other(grouped):
    x, y, _ = features(n=80)
    y = torch.cat([y, normalize(y + 0.1, dim=1)])
    # Image i has the captions i and i + 80; with groups, images 2 k and 2 k + 1 and their captions belong together.
    owner = torch.arange(80) // 2 if grouped else torch.arange(80)
    links = torch.tensor([[a, b] for a in range(80) for b in range(160) if owner[a] == owner[b % 80]])
    bank = Bank(*features(seed=1, n=100)[:2])
    ranked, chosen = cross_validated_ranks(x, y, links, bank, 7 * owner + 3 if grouped else None)
    for correction, rows in zip(chosen, cut_halves(owner), strict=True):
        others = []
        for merged, alone in zip(ranked, retrieval_ranks(x, y, links, *correction.biases(bank, x, y)), strict=True):
            own = torch.isin(merged.query % 80, rows)
            assert torch.equal(merged.hits(1)[own], alone.hits(1)[own])
            others.append(alone.hits(1)[~own].mean())
        assert correction.recall == pytest.approx(float(sum(others)) / 2)


def test_what_cannot_be_cross_validated_is_refused():
    x, y, links = features(n=80)
    bank = Bank(x, y)
    with pytest.raises(ValueError, match="1 x"):
        cross_validated_ranks(x[:1], y[:1], links[:1], bank)
    with pytest.raises(ValueError, match="group"):
        cross_validated_ranks(x, y, links, bank, torch.arange(5))
    with pytest.raises(ValueError, match="y: row 0 has norm 2"):
        Bank(x, 2 * y)


@pytest.mark.parametrize("transductive", [False, True])
def test_without_a_temperature_the_biases_are_the_default_ones(transductive):
    x, y, _ = features(n=120)
    bank = Bank(x, y, transductive=transductive)
    bias_x, bias_y = Correction().biases(bank, x, y)
    assert torch.equal(bias_x, PopularityCorrection().fit(y, x, transductive=transductive).bias(x))
    assert torch.equal(bias_y, PopularityCorrection().fit(x, y, transductive=transductive).bias(y))


def test_agreement_uses_disjoint_anchors():
    x, y, _ = features(n=200)
    bias = PopularityCorrection(0.1, 1.0).fit(x[::2], y).bias(y)
    expected = rank_correlation(bias, hubness(x[1::2], y).counts)
    assert popularity_agreement(x, y, 0.1) == pytest.approx(expected)
    assert expected > 0.4
    generator = torch.Generator().manual_seed(0)
    unrelated = torch.nn.functional.normalize(torch.randn(2, 200, 64, generator=generator), dim=-1)
    assert abs(popularity_agreement(unrelated[0], unrelated[1], 0.1)) < expected
    assert math.isnan(popularity_agreement(x[:3], y, 0.1)) and math.isnan(popularity_agreement(x, y[:10], 0.1))
