"""Importance sampling on the toy problem, whose integrals are exact, and against loops written from the formulas."""

import math

import pytest
import torch

from nuclr.popularity import importance_sampling as sampling
from nuclr.studies.toy import spaces

TAU = 0.3


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def proposals() -> torch.Tensor:
    return spaces.sample_x(6, stream())


def samples(x, m, generator):
    """Return m samples of each proposal, (n, m, 2)."""
    return torch.stack([spaces.sample_y(x, TAU, generator) for _ in range(m)], dim=1)


def log_weights(log_density, heuristic, proposal=0):
    """Return log omega_k(y), (..., n): p_k / sum p ("balance"), 1/n ("uniform"), or one proposal ("single")."""
    if heuristic == "balance":
        return log_density.log_softmax(dim=-1)
    if heuristic == "uniform":
        return torch.full_like(log_density, -math.log(log_density.shape[-1]))
    ignored = torch.arange(log_density.shape[-1]) != proposal
    return torch.zeros_like(log_density).masked_fill(ignored, -math.inf)


def log_partition(log_integrand, log_density, log_weight):
    """Return log Z_hat (...) from integrands (..., n, m), densities (n, m) and weights (n, m) of m samples each."""
    terms = log_integrand + log_weight - log_density
    return terms.flatten(-2).logsumexp(dim=-1) - math.log(log_integrand.shape[-1])


def moments(log_integrand, log_density, log_weight, measure):
    """Return mean and second moment (..., n) of omega_k f / p_k under p_k, by quadrature at g nodes."""
    integrand = log_integrand.exp()
    first = (measure * integrand) @ log_weight.exp()
    return first, (measure * integrand.square()) @ (2 * log_weight - log_density).exp()


def variance(log_integrand, log_density, log_weight, measure, m=1):
    """Return the variance of Z_hat with m samples per proposal."""
    first, second = moments(log_integrand, log_density, log_weight, measure)
    return (second - first.square()).sum(dim=-1) / m


def estimates(x, target, heuristic, m, repeats, seed):
    """Return `repeats` independent values of Z_hat(target) / Z(target)."""
    generator, ratios = stream(seed), []
    for _ in range(repeats):
        y = samples(x, m, generator)
        flat = y.flatten(0, 1)
        log_density = spaces.log_density(x, flat, TAU).T.unflatten(0, (len(x), m))
        log_weight = log_weights(log_density, heuristic, proposal=2)
        own = torch.arange(len(x))
        log_z = log_partition(
            (target @ flat.T / TAU).unflatten(0, (len(x), m)), log_density[own, :, own], log_weight[own, :, own]
        )
        ratios.append((log_z - spaces.log_partition(target[None], TAU)[0]).exp())
    return torch.stack(ratios)


def test_log_partition_is_the_sum_of_the_definition(proposals):
    x, m = proposals, 3
    y = samples(x, m, stream(1))
    target = torch.tensor([0.3, 0.4], dtype=torch.float64)
    expected = 0.0
    for k in range(len(x)):
        for sample in range(m):
            densities = [math.exp(spaces.log_density(xi[None], y[k, sample][None], TAU).item()) for xi in x]
            weight = densities[k] / sum(densities)
            expected += weight * math.exp(target @ y[k, sample] / TAU) / densities[k] / m
    log_density = spaces.log_density(x, y.flatten(0, 1), TAU).T.unflatten(0, (len(x), m))
    log_weight = log_weights(log_density, "balance")
    own = torch.arange(len(x))
    estimate = log_partition((y @ target) / TAU, log_density[own, :, own], log_weight[own, :, own])
    assert estimate.item() == pytest.approx(math.log(expected), abs=1e-12)


@pytest.mark.parametrize("heuristic", ["balance", "uniform", "single"])
@pytest.mark.parametrize("m", [1, 4])
def test_estimate_is_unbiased_and_has_the_variance_of_the_quadrature(heuristic, m, proposals):
    target = torch.tensor([0.2, 0.7], dtype=torch.float64)
    ratios = estimates(proposals, target, heuristic, m, repeats=4000, seed=3)
    assert abs(ratios.mean() - 1) < 4 * ratios.std() / math.sqrt(len(ratios))

    nodes, measure = spaces.square_nodes(32)
    log_density = spaces.log_density(proposals, nodes, TAU).T
    log_weight = log_weights(log_density, heuristic, proposal=2)
    exact = variance(spaces.log_density(target[None], nodes, TAU)[0], log_density, log_weight, measure, m)
    standard_error = (ratios - 1).square().std() / math.sqrt(len(ratios))  # of the empirical variance
    assert abs(ratios.var() - exact) < 5 * standard_error


def test_balance_heuristic_has_the_smallest_second_moment(proposals):
    nodes, measure = spaces.square_nodes(32)
    log_density = spaces.log_density(proposals, nodes, TAU).T
    log_integrand = spaces.log_density(spaces.sample_x(5, stream(4)), nodes, TAU)

    def second(log_weight):
        first, second = moments(log_integrand, log_density, log_weight, measure)
        torch.testing.assert_close(first.sum(dim=-1), torch.ones(5, dtype=torch.float64))  # unbiased
        return second.sum(dim=-1)

    best = second(log_weights(log_density, "balance"))
    q = log_density.exp().sum(dim=1)
    torch.testing.assert_close(best, (measure * log_integrand.exp().square() / q).sum(dim=1))
    others = [log_weights(log_density, "uniform")]
    others += [log_weights(log_density, "single", proposal=k) for k in range(len(proposals))]
    others += [torch.randn(log_density.shape, dtype=torch.float64, generator=stream(s)) for s in range(5)]
    others += [2 * log_density]  # the power heuristic
    for log_weight in others:
        assert (best < second(log_weight.log_softmax(dim=1))).all()


def test_variance_falls_with_m_times_n():
    nodes, measure = spaces.square_nodes(32)
    target = spaces.sample_x(20, stream(5))
    log_integrand = spaces.log_density(target, nodes, TAU)
    x = spaces.sample_x(1600, stream(6))

    def mean_variance(n: int, m: int) -> float:
        log_density = spaces.log_density(x[:n], nodes, TAU).T
        log_weight = log_weights(log_density, "balance")
        return variance(log_integrand, log_density, log_weight, measure, m).mean().item()

    assert mean_variance(100, 4) == pytest.approx(mean_variance(100, 1) / 4)
    assert mean_variance(1600, 1) == pytest.approx(mean_variance(100, 1) / 16, rel=0.2)


def test_popularity_form_equals_the_balance_heuristic(proposals):
    y = spaces.sample_y(proposals, TAU, stream(7))
    scores = proposals @ y.T
    log_density = spaces.log_density(proposals, y, TAU).T
    log_weight = log_weights(log_density, "balance")
    expected = log_partition(
        (scores / TAU).unsqueeze(-1), log_density.diagonal()[:, None], log_weight.diagonal()[:, None]
    )
    estimate = sampling.log_partition_from_popularity(scores, spaces.log_popularity(proposals, y, TAU), TAU)
    torch.testing.assert_close(estimate, expected)


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
