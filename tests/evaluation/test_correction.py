"""Correction of hubs: the popularity of a gallery, as a bias and as one more coordinate."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from nuclr.evaluation import Bank, append_bias, append_one, bias_of_scores, both, choose, gallery_bias, ranks, retrieval
from nuclr.evaluation.corrected import cross_chosen
from nuclr.evaluation.correction import spread, tried
from nuclr.popularity import solve


def features(seed=0, n=60, d=8, noise=0.6):
    """Images and captions of one direction each, and a hub: a caption near to all images."""
    generator = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(n, d, generator=generator) + 1, dim=1)
    y = normalize(x + noise * torch.randn(n, d, generator=generator) / d**0.5, dim=1)
    y[0] = normalize(torch.ones(d), dim=0)
    return x, y, torch.arange(n)[:, None].expand(n, 2)


def test_bias_is_the_solvers_zeta():
    x, y, _ = features()
    zeta = solve(x, y[:40], temperature=0.1, tolerance=1e-3).zeta
    assert torch.allclose(gallery_bias(x, y[:40], 0.1), zeta)
    assert torch.allclose(gallery_bias(x, y[:40], 0.1, strength=0.5), 0.5 * zeta)
    assert torch.allclose(bias_of_scores(x @ y[:40].T, 0.1), zeta, atol=1e-4)
    assert int(gallery_bias(x, y, 0.1).argmax()) == 0


def test_candidates_of_the_bank_are_what_its_queries_choose_from():
    x, y, _ = features(n=50)
    bank_x, bank_y, _ = features(seed=1, n=70)
    found = solve(bank_x.double(), bank_y.double(), temperature=0.1, tolerance=1e-9)
    probabilities = torch.exp((bank_x @ y.T).double() / 0.1 - found.log_z[:, None])  # by the definition of q, no extend
    expected = 0.1 * probabilities.sum(dim=0).log()
    expected -= expected.mean()
    bias = gallery_bias(bank_x, y, 0.1, strength=2.0, candidates=bank_y)
    assert torch.allclose(bias.double(), 2 * expected, atol=1e-3)
    assert torch.allclose(bias_of_scores(bank_x @ y.T, 0.1, candidates=bank_x @ bank_y.T), bias / 2, atol=1e-4)
    bias_x, bias_y = Bank(bank_x, bank_y).biases(x, y, 0.1)
    assert torch.allclose(bias_y, bias / 2)
    assert torch.allclose(bias_x, gallery_bias(bank_y, x, 0.1, candidates=bank_x))


def test_a_bank_of_the_gallery_itself_changes_nothing():
    x, y, _ = features()
    bias_x, bias_y = Bank(x, y).biases(x, y, 0.1)
    assert torch.allclose(bias_y, gallery_bias(x, y, 0.1), atol=2e-4)  # up to tau times the residual
    assert torch.allclose(bias_x, gallery_bias(y, x, 0.1), atol=2e-4)


def test_one_more_coordinate_is_the_same():
    x, y, pairs = features()
    bias = gallery_bias(x, y, 0.1)
    assert torch.allclose(append_one(x) @ append_bias(y, bias).T, x @ y.T - bias, atol=1e-6)
    by_bias, by_coordinate = ranks(x, y, pairs, bias), ranks(append_one(x), append_bias(y, bias), pairs)
    assert torch.equal(by_bias.above, by_coordinate.above)


def test_a_hub_is_corrected():
    x, y, pairs = features(n=300)
    bank = features(seed=1, n=400)[0]
    bias = gallery_bias(bank, y, 0.05)
    assert float(ranks(x, y, pairs, bias).hits(1).mean()) > float(ranks(x, y, pairs).hits(1).mean())


def test_spread():
    x, y, _ = features()
    y = y[:40] + 0.3
    assert spread(x, y) == pytest.approx(float((x.double() @ y.double().T).std(correction=0)))
    scores = x @ y.T
    assert torch.allclose(gallery_bias(x, y), gallery_bias(x, y, 0.6 * spread(x, y)))
    assert torch.allclose(bias_of_scores(scores), bias_of_scores(scores, 0.6 * float(scores.std())))


def test_choose():
    x, y, pairs = features(n=150)
    bank = Bank(*features(seed=1, n=200)[:2])
    chosen = choose(x, y, pairs, bank, temperatures=(0.05, 0.2), strengths=(0.5, 1.0))
    assert chosen.temperature in (0.05, 0.2) and chosen.strength in (0.5, 1.0)
    bias_x = gallery_bias(bank.y, x, chosen.temperature, chosen.strength, bank.x)
    bias_y = gallery_bias(bank.x, y, chosen.temperature, chosen.strength, bank.y)
    assert retrieval(x, y, pairs, bias_x=bias_x, bias_y=bias_y)["mean_R@1"] == pytest.approx(chosen.recall)
    grid = {
        setting: sum(float((1 / of.expected()).mean()) for of in ranked)
        for setting, ranked in tried(x, y, pairs, bank, (0.05, 0.2), (0.5, 1.0))
    }
    assert max(grid, key=grid.get) == replace(chosen, recall=None)
    assert choose(x, y, pairs, bank).recall >= float(ranks(x, y, pairs).hits(1).mean()) - 0.1
    with pytest.raises(ValueError, match="no temperatures"):
        choose(x, y, pairs, bank, temperatures=())


def test_cross_chosen_has_each_query_under_the_other_halfs_choice():
    x, y, _ = features(n=80)
    y = torch.cat([y, normalize(y + 0.1, dim=1)])
    pairs = torch.stack([torch.arange(160) % 80, torch.arange(160)], 1)
    bank = Bank(*features(seed=1, n=100)[:2])
    ranked, chosen = cross_chosen(x, y, pairs, bank)
    for half, correction in enumerate(chosen):
        bias_x, bias_y = correction.biases(bank, x, y)
        for found, alone in zip(ranked, both(x, y, pairs, bias_x, bias_y), strict=True):
            own = found.query % 2 == half  # 80 images: a caption's row has its image's parity
            assert torch.equal(found.hits(1)[own], alone.hits(1)[own])
        others = [of.hits(1)[of.query % 2 != half].mean() for of in both(x, y, pairs, bias_x, bias_y)]
        assert correction.recall == pytest.approx(float(sum(others)) / 2)
    with pytest.raises(ValueError, match="1 image with captions; needs two"):
        cross_chosen(x[:1], y[:1], pairs[:1], bank)
