"""Importance sampling against loops written from the formulas, with the densities of the toy problem."""

import math

import pytest
import torch

from nuclr.popularity import importance_sampling as sampling
from nuclr.studies.toy import spaces

TAU = 0.3


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_popularity_form_equals_the_balance_heuristic():
    """Z_hat(x_i) = sum_k omega_k(y_k) exp(s_ik/tau) / p_k(y_k), with omega_k = p_k / sum of all p, one sample each."""
    proposals = spaces.sample_x(6, stream())
    y = spaces.sample_y(proposals, TAU, stream(7))
    scores = proposals @ y.T
    density = spaces.log_density(proposals, y, TAU).exp()  # of proposal i at y_k
    estimate = sampling.log_partition_from_popularity(scores, spaces.log_popularity(proposals, y, TAU), TAU)
    for i in range(6):
        terms = []
        for k in range(6):
            weight = density[k, k] / density[:, k].sum()
            terms.append(float(weight * torch.exp(scores[i, k] / TAU) / density[k, k]))
        assert float(estimate[i]) == pytest.approx(math.log(sum(terms)), abs=1e-12)


def test_risks_agree_with_loops_written_from_the_formula():
    n, tau = 7, 0.5
    x = spaces.sample_x(n, stream(8))
    y = spaces.sample_y(x, tau, stream(9))
    s = x @ y.T
    q = torch.rand(n, dtype=torch.float64, generator=stream(10)) + 0.5

    def risk(weights):
        total = 0.0
        for i in range(n):
            z = sum(math.exp(s[i, j] / tau) / weights[j] for j in range(n))
            total -= tau * math.log(math.exp(s[i, i] / tau) / z)
        return total / n

    assert sampling.empirical_risk_from_popularity(s, q.log(), tau).item() == pytest.approx(risk(q), abs=1e-12)
    uniform = sampling.empirical_risk_from_popularity(s, sampling.uniform_log_popularity(s), tau)
    assert uniform.item() == pytest.approx(risk([n] * n), abs=1e-12)
    cross_entropy = torch.nn.functional.cross_entropy(s / tau, torch.arange(n))
    assert uniform.item() == pytest.approx(tau * (cross_entropy.item() - math.log(n)), abs=1e-12)


def test_scaling_changes_only_the_constant():
    log_q = torch.randn(50, dtype=torch.float64, generator=stream(11))
    true = torch.randn(50, dtype=torch.float64, generator=stream(12))
    assert (-sampling.scale_to_area(log_q, area=2.5)).exp().sum().item() == pytest.approx(2.5)
    assert sampling.scale_to_maximum(log_q, true).max() == true.max()
    for scaled in (sampling.scale_to_area(log_q), sampling.scale_to_maximum(log_q, true)):
        assert (scaled - log_q).std().item() == pytest.approx(0, abs=1e-12)


def test_numpy_arrays_give_the_same_tensors():
    generator = stream(16)
    scores, log_q, true = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((5, 5), (5,), (5,)))
    for function, arguments in (
        (sampling.log_partition_from_popularity, (scores, log_q, 0.3)),
        (sampling.empirical_risk, (log_q, true, 0.3)),
        (sampling.empirical_risk_from_popularity, (scores, log_q, 0.3)),
        (sampling.uniform_log_popularity, (scores,)),
        (sampling.scale_to_area, (log_q,)),
        (sampling.scale_to_maximum, (log_q, true)),
    ):
        arrays = [value.numpy() if isinstance(value, torch.Tensor) else value for value in arguments]
        assert torch.equal(function(*arrays), function(*arguments)), function.__name__


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (sampling.log_partition_from_popularity, (torch.zeros(2, 3), torch.zeros(2), 0.1), r"log_q has shape \(2,\)"),
        (sampling.log_partition_from_popularity, (torch.zeros(2, 3), torch.zeros(3), 0.0), "temperature=0.0"),
        (sampling.empirical_risk, (torch.zeros(3), torch.zeros(2), 0.1), r"positives.*\(3,\).*log_z.*\(2,\)"),
        (sampling.empirical_risk_from_popularity, (torch.zeros(2, 3), torch.zeros(3), 0.1), r"scores.*\(2, 3\)"),
        (sampling.error_term, (torch.zeros(3, 3), torch.zeros(2, 4), torch.zeros(3), TAU), r"log_q.*\(2, 4\)"),
        (sampling.uniform_log_popularity, (torch.full((2, 2), math.nan),), r"scores\[0, 0\]=nan"),
        (sampling.scale_to_area, (torch.zeros(3), -1.0), "area=-1.0"),
    ],
)
def test_wrong_arguments_are_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_error_term_is_the_sum_of_the_definition():
    generator = stream(20)
    scores = 2 * torch.rand(5, 5, dtype=torch.float64, generator=generator) - 1
    log_q, log_q_true = (torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(2))
    expected = 0.0
    for i in range(5):
        for j in range(5):
            difference = abs(1 / math.exp(log_q[j]) - 1 / math.exp(log_q_true[j]))
            expected += difference * math.exp((float(scores[i, j]) - 1) / TAU) / 5
    assert sampling.error_term(scores, log_q, log_q_true, TAU).item() == pytest.approx(expected, rel=1e-12)
    several = sampling.error_term(scores.numpy(), torch.stack([log_q, log_q_true]), log_q_true, TAU)
    assert several.tolist() == [pytest.approx(expected, rel=1e-12), 0.0]


def test_error_term_bounds_the_error_of_the_partition_function():
    """|Z_hat(q~) - Z_hat(q)| <= exp(1/tau) sum_j |1/q~_j - 1/q_j| exp((s_ij - 1)/tau) per anchor, and in the mean."""
    sample = spaces.draw(40, TAU, spaces.generator(1))
    for log_q in spaces.popularities(sample, TAU).values():
        z, z_true = (
            sampling.log_partition_from_popularity(sample.scores, q, TAU).exp() for q in (log_q, sample.log_q_true)
        )
        bound = math.exp(1 / TAU) * sampling.error_term(sample.scores, log_q, sample.log_q_true, TAU).item()
        assert (z - z_true).abs().mean().item() <= bound * (1 + 1e-9)
