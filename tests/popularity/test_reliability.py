"""The share of zeta that is not sampling noise, against the noise that other banks really cause."""

import pytest
import torch
from torch.nn.functional import normalize

from nuclr.popularity import solve
from nuclr.popularity.reliability import default_strength, zeta_reliability


def bank(seed, n, d, offset):
    return normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + offset, dim=1)


@pytest.mark.parametrize(("offset", "temperature"), [(0.0, 0.2), (0.05, 0.15), (0.3, 0.15)])
def test_the_noise_is_that_of_other_banks(offset, temperature):
    """Zeta of 30 banks: the mean over items of its variance over banks is the noise."""
    items, zetas, shares = bank(0, 300, 32, 0.0), [], []
    for seed in range(1, 31):
        queries = bank(seed, 200, 32, offset)
        result = solve(queries, items, temperature=temperature)
        zetas.append(result.zeta)
        shares.append(zeta_reliability(queries, result.problem.a, result.log_z, items, temperature))
    zeta = torch.stack(zetas).double()
    noise = float(zeta.var(dim=0).mean())
    expected = 1 - noise / float(zeta.var(dim=1).mean())
    assert sum(shares) / len(shares) == pytest.approx(expected, abs=0.15)
    assert all(0 <= share <= 1 for share in shares)


def test_more_queries_are_more_reliable():
    items = bank(0, 200, 32, 0.0)

    def reliability(n):
        queries = bank(1, n, 32, 0.1)
        result = solve(queries, items, temperature=0.15)
        return zeta_reliability(queries, result.problem.a, result.log_z, items, 0.15)

    few, some, many = (reliability(n) for n in (20, 200, 2000))
    assert few < some < many
    assert many > 0.9


def test_weights_count_as_copies_up_to_the_number_of_queries():
    """A bank in which a few queries have nearly all the weight is as noisy as a bank of these few."""
    items, queries = bank(0, 200, 16, 0.0), bank(1, 100, 16, 0.1)
    weight = torch.full((100,), 1e-9)
    weight[:10] = 1.0

    def reliability(x, x_weight=None):
        result = solve(x, items, temperature=0.2, x_weight=x_weight)
        return zeta_reliability(x, result.problem.a, result.log_z, items, 0.2)

    assert reliability(queries, weight) == pytest.approx(reliability(queries[:10]), abs=1e-3)
    assert reliability(queries, torch.full((100,), 7.0)) == pytest.approx(reliability(queries), abs=1e-3)


def test_constant_zeta_has_nothing_to_apply():
    queries = torch.eye(4)
    result = solve(queries, queries, temperature=0.5)
    assert zeta_reliability(queries, result.problem.a, result.log_z, torch.eye(4)[:1], 0.5) == 0.0


def test_strength_rises_from_zero_to_one():
    strengths = [default_strength(number / 100) for number in range(101)]
    assert strengths == sorted(strengths)
    assert (strengths[0], strengths[50], strengths[100]) == (0.0, 0.5, 1.0)
