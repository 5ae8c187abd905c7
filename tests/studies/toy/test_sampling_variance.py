"""Variances of importance sampling by quadrature and by repetition."""

import torch

from nuclr.popularity import importance_sampling as sampling
from nuclr.studies.toy import spaces, study


def test_measured_variance_agrees_with_the_quadrature():
    stream = spaces.generator(8)
    target, x = spaces.sample_x(4, stream), spaces.sample_x(20, stream)
    exact = study.by_quadrature(target, x, 0.5, "balance")
    measured = study.by_repetition(target, x, 0.5, "balance", 4, base_seed=0) * 4
    torch.testing.assert_close(measured, exact, rtol=0.35, atol=0)


def test_single_draws_all_samples_from_one_proposal():
    stream = spaces.generator(9)
    target, x = spaces.sample_x(3, stream), spaces.sample_x(5, stream)
    nodes, measure = spaces.square_nodes(32)
    alone = spaces.log_density(x[:1], nodes, 0.5).T
    log_integrand = spaces.log_density(target, nodes, 0.5)
    expected = sampling.variance(log_integrand, alone, torch.zeros_like(alone), measure) / 5
    torch.testing.assert_close(study.by_quadrature(target, x, 0.5, "single")[:3], expected)
