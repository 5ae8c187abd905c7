"""Closed forms of the toy problem against quadrature and against each other."""

import math

import pytest
import torch
from torch.quasirandom import SobolEngine

from nuclr.popularity import importance_sampling as sampling
from nuclr.popularity import solve
from nuclr.studies.toy import spaces

ANCHORS = torch.tensor([[0.3, 0.4], [-0.8, 0.1], [0.0, 1.0], [0.6, 0.0], [-1e-12, 0.5]], dtype=torch.float64)


@pytest.mark.parametrize("tau", [0.05, 0.2, 1.0])
def test_partition_function_is_the_integral(tau):
    nodes, measure = spaces.square_nodes(40)
    integral = (measure * (ANCHORS @ nodes.T / tau).exp()).sum(dim=1)
    torch.testing.assert_close(spaces.log_partition(ANCHORS, tau), integral.log())


def test_anchors_are_uniform_on_the_upper_half_disc():
    x = spaces.sample_x(20_000, torch.Generator().manual_seed(0))
    assert x[:, 1].min() >= 0 and x.norm(dim=1).max() <= 1
    # E x_2 = 4/(3 pi), E |x|^2 = 1/2, and x_1 is symmetric.
    for values, expected in ((x[:, 1], 4 / (3 * math.pi)), (x.square().sum(dim=1), 0.5), (x[:, 0], 0.0)):
        assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(len(x))


@pytest.mark.parametrize("tau", [0.2, 1.0])
def test_samples_have_the_moments_of_the_density(tau):
    nodes, measure = spaces.square_nodes(40)
    repeated = ANCHORS.repeat_interleave(20_000, dim=0)
    y = spaces.sample_y(repeated, tau, torch.Generator().manual_seed(1)).reshape(len(ANCHORS), 20_000, 2)
    assert y.min() >= 0 and y.max() <= 1
    density = measure * spaces.log_density(ANCHORS, nodes, tau).exp()
    torch.testing.assert_close(density.sum(dim=1), torch.ones(len(ANCHORS), dtype=torch.float64))
    for power in (1, 2):
        error = (y**power).mean(dim=1) - density @ nodes**power
        assert (error.abs() < 4.5 * (y**power).std(dim=1) / math.sqrt(20_000)).all()


@pytest.mark.parametrize("tau", [0.2, 1.0])
def test_true_risk_agrees_with_quadrature(tau):
    x, weight = spaces.half_disc_nodes(60)
    losses = tau * spaces.log_partition(x, tau) - (x * spaces.expected_y(x, tau)).sum(dim=1)
    assert spaces.true_risk(tau) == pytest.approx((weight @ losses).item(), abs=5e-5)


def test_true_popularity_has_the_area_as_its_scale():
    """The mean of sum_j 1/q(y_j) is one, which scale_to_area relies on."""
    stream = spaces.generator(7)
    sums = []
    for _ in range(200):
        x = spaces.sample_x(50, stream)
        y = spaces.sample_y(x, 0.2, stream)
        sums.append((-spaces.log_popularity(x, y, 0.2)).exp().sum())
    totals = torch.stack(sums)
    assert abs(totals.mean() - spaces.AREA_OF_Y) < 4 * totals.std() / 200**0.5


def test_a_draw_is_solved_with_its_inner_products_as_scores():
    """Neither x nor y has unit norm, so nothing may be normalized."""
    sample = spaces.draw(80, 0.2, spaces.generator(5))
    zeta = solve(scores=sample.scores, temperature=0.2, tolerance=1e-9).zeta
    torch.testing.assert_close(0.2 * sample.log_q, zeta, atol=1e-6, rtol=0)


@pytest.mark.parametrize("tau", [0.05, 1.0])
def test_expected_y_and_nodes_of_the_half_disc_agree_with_integrals(tau):
    nodes, measure = spaces.square_nodes(40)
    density = measure * spaces.log_density(ANCHORS, nodes, tau).exp()
    torch.testing.assert_close(spaces.expected_y(ANCHORS, tau), density @ nodes)
    x, weight = spaces.half_disc_nodes(12)
    assert weight.sum().item() == pytest.approx(1)
    assert (weight @ x[:, 1]).item() == pytest.approx(4 / (3 * math.pi))
    assert (weight @ x.square().sum(dim=1)).item() == pytest.approx(0.5)


def test_the_constant_of_gcl_is_the_difference_of_the_risks_of_many_pairs():
    """The pairs are of low discrepancy; independent ones would need many more."""
    tau, n = 0.5, 2048
    u = SobolEngine(dimension=4, scramble=True, seed=0).draw(n, dtype=torch.float64)
    x = spaces.half_disc(u[:, :2])
    y = spaces.conditional_y(x, u[:, 2:], tau)
    log_z = sampling.log_partition_from_popularity(x @ y.T, torch.full((n,), math.log(n), dtype=torch.float64), tau)
    difference = (log_z - spaces.log_partition(x, tau)).mean().item()
    assert difference == pytest.approx(spaces.gcl_log_constant(tau), abs=2e-3)
