"""Defaults without labels: the temperature by held-out evenness of N_10, the strength by the noise of other banks."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from nuclr.popularity import PopularityCorrection, hubness, solve
from nuclr.popularity.defaults import (
    FACTORS,
    default_strength,
    default_temperature,
    found_spread,
    lowest_point,
    rough_bias,
    score_std,
    zeta_reliability,
)


def sides(seed, n, d, offset):
    """Queries, and candidates of which some are near to all queries."""
    generator = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(n, d, generator=generator) + offset, dim=1)
    y = normalize(x + 0.5 * torch.randn(n, d, generator=generator) / d**0.5, dim=1)
    y[: n // 20] = normalize(y[: n // 20] + 0.8 * normalize(torch.ones(d), dim=0), dim=1)
    return x, y


def test_spread_is_that_of_a_loop():
    x, y = sides(0, 200, 8, 0.3)
    bias, weight = solve(x, y, temperature=0.1).zeta, torch.arange(1.0, 201.0).double()
    counts = torch.zeros(200, dtype=torch.float64)
    for query, mass in zip(x, weight, strict=True):
        for item in (y @ query - bias).argsort(descending=True)[:10]:
            counts[item] += mass
    assert found_spread(x, y, bias, weight) == pytest.approx(float(counts.std(correction=0)), rel=1e-6)


def test_bias_of_a_temperature_is_strength_times_zeta():
    x, y = sides(0, 200, 8, 0.3)
    result = solve(x, y, temperature=0.1, tolerance=1e-2, max_iterations=100)
    strength = default_strength(zeta_reliability(x, result.problem.a, result.log_z, y, 0.1))
    assert torch.equal(rough_bias(x, y, 0.1, torch.ones(200), None), strength * result.zeta)
    assert torch.equal(rough_bias(x, y, 0.1, torch.ones(200), 0.7), 0.7 * result.zeta)


@pytest.mark.parametrize(("d", "offset"), [(4, 0.0), (16, 0.3)])
def test_the_choice_is_near_the_first_minimum_from_above(d, offset):
    x, y = sides(1, 400, d, offset)
    scale, counted, ones = score_std(x, y), torch.arange(400) % 4 == 1, torch.ones(300)
    spreads = [
        found_spread(x[counted], y, rough_bias(x[~counted], y, factor * scale, ones, None), ones[:100])
        for factor in FACTORS
    ]
    first = next((n for n in range(len(FACTORS) - 1) if spreads[n + 1] >= spreads[n]), len(FACTORS) - 1)
    expected = lowest_point(FACTORS[: first + 2], spreads[: first + 2]) * scale
    assert default_temperature(x, y) == pytest.approx(expected, rel=1e-9)
    assert default_temperature(x, y, torch.full((400,), 3.0).double()) == pytest.approx(expected, rel=1e-3)
    assert PopularityCorrection().fit(x, y).temperature == default_temperature(x, y)
    low, high = FACTORS[min(first + 1, len(FACTORS) - 1)], FACTORS[max(first - 1, 0)]
    assert low * scale <= expected <= high * scale


def test_the_lowest_point_is_that_of_a_parabola():
    factors = tuple(FACTORS[:5])
    for bottom in (0.45, 0.5, 0.55):
        spreads = [math.exp(0.3 + 0.7 * math.log(factor / bottom) ** 2) for factor in factors]
        assert lowest_point(factors, spreads) == pytest.approx(bottom, rel=1e-9)
    assert lowest_point((1.0,), [2.0]) == 1.0
    assert lowest_point((1.0, 0.8, 0.63), [3.0, 2.0, 1.0]) == 0.63, "still falling"
    assert lowest_point((1.0, 0.8), [3.0, 3.0]) == 1.0, "nothing falls"
    assert lowest_point((1.0, 0.8, 0.63), [3.0, 0.0, 0.0]) == 0.8, "no logarithm of zero"


def test_other_queries_find_the_items_more_evenly():
    """Clusters of different sizes: neither the highest nor the lowest temperature is best."""
    generator = torch.Generator().manual_seed(2)
    centers = normalize(torch.randn(8, 32, generator=generator), dim=1)
    cluster = (8 * torch.rand(480, generator=generator).square()).long()
    x, y, other = (
        normalize(centers[cluster] + normalize(torch.randn(480, 32, generator=generator), dim=1), dim=1)
        for _ in range(3)
    )
    fix, scale = PopularityCorrection().fit(x, y), score_std(x, y)
    assert min(FACTORS) * scale < fix.temperature < max(FACTORS) * scale

    def spread(bias):
        return float(hubness(other, y, bias=bias).counts.double().std())

    low = PopularityCorrection(min(FACTORS) * scale).fit(x, y, max_iterations=300)
    assert spread(fix.bias(y)) < spread(low.bias(y))
    assert spread(fix.bias(y)) < spread(None)


def test_few_queries_or_candidates():
    x, y = sides(3, 120, 8, 0.3)
    for queries, candidates in ((x[:99], y), (x, y[:99])):
        assert default_temperature(queries, candidates) == score_std(queries, candidates)


# Strength


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
    strengths = [default_strength(number / 100) for number in range(101)]
    assert strengths == sorted(strengths) and (strengths[0], strengths[50], strengths[100]) == (0.0, 0.5, 1.0)
    items = bank(0, 200, 32, 0.0)

    def reliability(n):
        queries = bank(1, n, 32, 0.1)
        result = solve(queries, items, temperature=0.15)
        return zeta_reliability(queries, result.problem.a, result.log_z, items, 0.15)

    few, some, many = (reliability(n) for n in (20, 200, 2000))
    assert few < some < many
    assert many > 0.9
    result = solve(torch.eye(4), torch.eye(4), temperature=0.5)
    constant = zeta_reliability(torch.eye(4), result.problem.a, result.log_z, torch.eye(4)[:1], 0.5)
    assert constant == 0.0, "constant zeta has nothing to apply"


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
