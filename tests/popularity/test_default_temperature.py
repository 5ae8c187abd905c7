"""The default temperature: held-out evenness of N_10, without labels."""

import pytest
import torch
from torch.nn.functional import normalize

from nuclr.popularity import PopularityCorrection, hubness, solve
from nuclr.popularity.default_temperature import FACTORS, default_temperature, held_out_spread, score_std


def sides(seed, n, d, offset):
    """Queries, and candidates of which some are near to all queries."""
    generator = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(n, d, generator=generator) + offset, dim=1)
    y = normalize(x + 0.5 * torch.randn(n, d, generator=generator) / d**0.5, dim=1)
    y[: n // 20] = normalize(y[: n // 20] + 0.8 * normalize(torch.ones(d), dim=0), dim=1)
    return x, y


def test_spread_is_that_of_a_loop():
    x, y = sides(0, 200, 8, 0.3)
    zeta = solve(x[::2], y, temperature=0.1, tolerance=1e-2, max_iterations=100).zeta
    counts = torch.zeros(200)
    for query in x[1::2]:
        for item in (y @ query - zeta).argsort(descending=True)[:10]:
            counts[item] += 1
    assert held_out_spread(x[::2], x[1::2], y, 0.1) == pytest.approx(float(counts.std(correction=0)), rel=1e-6)


@pytest.mark.parametrize(("d", "offset"), [(4, 0.0), (16, 0.3)])
def test_the_choice_is_the_first_minimum_from_above(d, offset):
    x, y = sides(1, 400, d, offset)
    scale = score_std(x, y)
    spreads = [held_out_spread(x[::2], x[1::2], y, factor * scale) for factor in FACTORS]
    first = next((n for n in range(len(FACTORS) - 1) if spreads[n + 1] >= spreads[n]), len(FACTORS) - 1)
    assert default_temperature(x, y) == FACTORS[first] * scale
    assert PopularityCorrection().fit(x, y).temperature == FACTORS[first] * scale


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
        assert default_temperature(queries, candidates) == 0.6 * score_std(queries, candidates)
