"""Bias and variance of importance sampling by quadrature and by repetition."""

import torch

from nuclr.popularity import importance_sampling as sampling
from nuclr.studies.toy import spaces, weights


def test_measured_variance_agrees_with_the_quadrature():
    stream = spaces.generator(8)
    target, x = spaces.sample_x(4, stream), spaces.sample_x(20, stream)
    exact = weights.by_quadrature(target, x, 0.5, "balance")
    measured = weights.repeat_estimates(target, x, 0.5, "balance", 4, base_seed=0).var(dim=0) * 4
    torch.testing.assert_close(measured, exact, rtol=0.35, atol=0)


def test_single_draws_all_samples_from_one_proposal():
    stream = spaces.generator(9)
    target, x = spaces.sample_x(3, stream), spaces.sample_x(5, stream)
    nodes, measure = spaces.square_nodes(32)
    alone = spaces.log_density(x[:1], nodes, 0.5).T
    log_integrand = spaces.log_density(target, nodes, 0.5)
    expected = sampling.variance(log_integrand, alone, torch.zeros_like(alone), measure) / 5
    torch.testing.assert_close(weights.by_quadrature(target, x, 0.5, "single")[:3], expected)


def test_the_balance_heuristic_has_the_smallest_second_moment_and_no_bias():
    stream = spaces.generator(10)
    target, x = spaces.sample_x(4, stream), spaces.sample_x(12, stream)
    by_exponent = {b: weights.by_exponent(target, x, 0.2, b) for b in weights.EXPONENTS}
    moments = {b: values["second_moment"] for b, values in by_exponent.items()}
    assert min(moments, key=moments.get) == 1.0
    for values in by_exponent.values():  # the integral over the weights' sum is Z itself
        assert abs(values["mean"] - 1) < 1e-9
    exact = weights.by_quadrature(target, x, 0.2, "balance").mean().item()
    assert abs(by_exponent[1.0]["variance"] / exact - 1) < 1e-9
