"""What a correction changes on held-out queries, and whether popularity predicts N_k."""

import math

import pytest
import torch

from nuclr.evaluation import hubness_change, popularity_agreement, rank_correlation
from nuclr.popularity import PopularityCorrection, hubness
from tests.popularity.test_correction import features


def test_the_change_is_that_of_its_parts():
    x, y, links = features(n=200)
    bank = features(seed=1, n=300)[:2]
    change = hubness_change(bank, x, y, links)
    bias = PopularityCorrection().fit(*bank).bias(y)
    plain, corrected = hubness(x, y), hubness(x, y, bias=bias)
    gain = corrected.hits(links).double() - plain.hits(links).double()
    assert change == {
        "never_found": plain.never_found,
        "skewness": plain.skewness,
        "recall@1": plain.recall(links),
        "correlation": pytest.approx(rank_correlation(bias, plain.counts)),
        "never_found_corrected": corrected.never_found,
        "skewness_corrected": corrected.skewness,
        "recall@1_corrected": corrected.recall(links),
        "recall@1_error": pytest.approx(1.96 * float(gain.std(correction=0)) / len(gain) ** 0.5),
    }
    assert change["skewness_corrected"] < change["skewness"] and change["correlation"] > 0.5
    assert "recall@1" not in hubness_change(bank, x, y)
    assert hubness_change(bank, x, y[:5])["never_found"] == 0, "a gallery of fewer than ten"


def test_agreement_uses_disjoint_anchors():
    x, y, _ = features(n=200)
    bias = PopularityCorrection(0.1, 1.0).fit(x[::2], y, max_iterations=150).bias(y)
    expected = rank_correlation(bias, hubness(x[1::2], y).counts)
    assert popularity_agreement(x, y, 0.1) == pytest.approx(expected)
    assert expected > 0.4
    generator = torch.Generator().manual_seed(0)
    unrelated = torch.nn.functional.normalize(torch.randn(2, 200, 64, generator=generator), dim=-1)
    assert abs(popularity_agreement(unrelated[0], unrelated[1], 0.1)) < expected
    assert math.isnan(popularity_agreement(x[:3], y, 0.1)) and math.isnan(popularity_agreement(x, y[:10], 0.1))
