"""Learning W: gradients vanish at the result, risks and class probabilities against loops and quadrature."""

import math

import pytest
import torch

from nuclr.popularity import solve
from nuclr.studies.toy import learning, spaces

TAU = 0.3
W = torch.tensor([[0.8, 0.3], [-0.2, 1.4]], dtype=torch.float64)


@pytest.fixture(scope="module")
def pairs():
    stream = spaces.generator(3)
    x = spaces.sample_x(60, stream)
    return x, spaces.sample_y(x, TAU, stream)


def loss(method, w, x, y):
    """Return a method's loss by loops; NUCLR's zeta is solved for this w."""
    n, scores = len(x), x @ w @ y.T
    zeta = solve(scores=scores, temperature=TAU, tolerance=1e-10).zeta.tolist() if method == "nuclr" else [0.0] * n
    total = sum(zeta) / n
    for i in range(n):
        if method == "mle":
            a = [float(v) / TAU for v in x[i] @ w]
            log_z = sum(math.log(math.expm1(v) / v) for v in a)
        else:
            log_z = math.log(sum(math.exp((float(scores[i, j]) - zeta[j]) / TAU) for j in range(n)))
        total += (TAU * log_z - float(scores[i, i])) / n
    return total


@pytest.mark.parametrize("method", learning.METHODS)
def test_the_learned_model_is_a_minimum_of_the_loss(method, pairs):
    w = learning.learn(method, *pairs, TAU)
    lowest = loss(method, w, *pairs)
    for k in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[k] = 0.02
        for sign in (-1, 1):
            assert loss(method, w + sign * step.reshape(2, 2), *pairs) > lowest


def test_excess_risk_is_the_mean_divergence():
    """R(W) - R(I) = tau E_x KL, with the integral over y by quadrature."""
    x, weight = spaces.half_disc_nodes(24)
    nodes, measure = spaces.square_nodes(24)
    true, learned = spaces.log_density(x, nodes, TAU), spaces.log_density(x @ W, nodes, TAU)
    divergence = (true.exp() * (true - learned)) @ measure
    assert learning.excess_risk(W, TAU) == pytest.approx(TAU * (weight @ divergence).item(), rel=1e-6)
    assert learning.excess_risk(torch.eye(2, dtype=torch.float64), TAU) == 0


def test_class_probabilities_are_integrals_over_the_cells():
    features = torch.tensor([[0.3, -0.5], [0.0, 0.9]], dtype=torch.float64)
    unit, measure = spaces.square_nodes(20)
    cells = [
        ((a, b), (c, d))
        for a, b in ((0.0, learning.CUTS[0]), (learning.CUTS[0], 1.0))
        for c, d in ((0.0, learning.CUTS[1]), (learning.CUTS[1], 1.0))
    ]
    for k, ((a, b), (c, d)) in enumerate(cells):
        y = torch.stack([a + (b - a) * unit[:, 0], c + (d - c) * unit[:, 1]], dim=1)
        expected = (b - a) * (d - c) * spaces.log_density(features, y, TAU).exp() @ measure
        torch.testing.assert_close(learning.class_probabilities(features, TAU)[:, k], expected)


def test_zero_one_loss_is_below_its_bound():
    assert learning.zero_one_loss(torch.eye(2, dtype=torch.float64), TAU) == 0
    assert 0 < learning.zero_one_loss(W, TAU) < math.sqrt(2 * learning.excess_risk(W, TAU) / TAU)


def test_gcl_learns_another_model():
    values = learning.measure_learning(400, 0.2, spaces.generator(0))
    assert values["gcl"]["w_22"] < 0.5
    for method in ("mle", "nuclr"):
        assert 0.7 < values[method]["w_22"] < 1.5
        assert values[method]["excess_risk"] < values["gcl"]["excess_risk"] / 3
