"""The finite Y: with counts, the estimated partition function is the exact sum."""

import math

import pytest
import torch

from nuclr.studies.toy import finite, spaces


def test_densities_sum_to_one_and_the_risk_is_their_entropy():
    x = spaces.sample_x(5, spaces.generator(0))
    logs = finite.log_density(x, 0.2)
    for i in range(5):
        weights = [math.exp(float(x[i] @ v) / 0.2) for v in finite.points()]
        for v in range(25):
            assert logs[i, v].item() == pytest.approx(math.log(25 * weights[v] / sum(weights)), abs=1e-12)
    many = spaces.sample_x(20_000, spaces.generator(1))
    logs = finite.log_density(many, 0.2)
    losses = -0.2 * (logs.exp() / 25 * logs).sum(dim=1)
    assert finite.finite_risk(0.2) == pytest.approx(losses.mean().item(), abs=4 * losses.std().item() / 20_000**0.5)


def test_counts_give_the_risk_of_exact_likelihood():
    measured = finite.measure_finite(400, 0.5, spaces.generator(2))
    assert measured["seen"]
    assert measured["risk"]["counts"] == pytest.approx(measured["risk"]["mle"], abs=1e-12)
    assert abs(measured["risk"]["gcl"] - measured["risk"]["mle"]) > 0.01
    assert measured["error_term"]["nuclr"] < measured["error_term"]["gcl"]


def test_records_have_every_method_and_size():
    records = finite.finite_study(2, (100, 5000))
    assert {(r["tau"], r["n"], r["method"]) for r in records} == {
        (tau, 100, method) for tau in (0.2, 1.0) for method in finite.METHODS
    }
    assert torch.tensor([r["error_mean"] for r in records]).isfinite().all()
