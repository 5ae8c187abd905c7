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


def estimates(x, target, heuristic, m, repeats, seed):
    """Return `repeats` independent values of Z_hat(target) / Z(target)."""
    generator, ratios = stream(seed), []
    for _ in range(repeats):
        y = spaces.sample_y(x, TAU, generator, m)
        flat = y.flatten(0, 1)
        log_density = spaces.log_density(x, flat, TAU).T.unflatten(0, (len(x), m))
        log_weight = sampling.log_weights(log_density, heuristic, proposal=2)
        own = torch.arange(len(x))
        log_z = sampling.log_partition(
            (target @ flat.T / TAU).unflatten(0, (len(x), m)), log_density[own, :, own], log_weight[own, :, own]
        )
        ratios.append((log_z - spaces.log_partition(target[None], TAU)[0]).exp())
    return torch.stack(ratios)


def test_log_partition_is_the_sum_of_the_definition(proposals):
    x, m = proposals, 3
    y = spaces.sample_y(x, TAU, stream(1), m)
    target = torch.tensor([0.3, 0.4], dtype=torch.float64)
    expected = 0.0
    for k in range(len(x)):
        for sample in range(m):
            densities = [math.exp(spaces.log_density(xi[None], y[k, sample][None], TAU).item()) for xi in x]
            weight = densities[k] / sum(densities)
            expected += weight * math.exp(target @ y[k, sample] / TAU) / densities[k] / m
    log_density = spaces.log_density(x, y.flatten(0, 1), TAU).T.unflatten(0, (len(x), m))
    log_weight = sampling.log_weights(log_density, "balance")
    own = torch.arange(len(x))
    estimate = sampling.log_partition((y @ target) / TAU, log_density[own, :, own], log_weight[own, :, own])
    assert estimate.item() == pytest.approx(math.log(expected), abs=1e-12)


@pytest.mark.parametrize("heuristic", ["balance", "uniform", "single"])
def test_weights_sum_to_one(heuristic, proposals):
    log_density = spaces.log_density(proposals, torch.rand(20, 2, dtype=torch.float64, generator=stream(2)), TAU).T
    weights = sampling.log_weights(log_density, heuristic, proposal=2).exp()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(20, dtype=torch.float64))


def test_unknown_heuristic_is_refused():
    with pytest.raises(ValueError, match="'power'"):
        sampling.log_weights(torch.zeros(3), "power")


@pytest.mark.parametrize("heuristic", ["balance", "uniform", "single"])
@pytest.mark.parametrize("m", [1, 4])
def test_estimate_is_unbiased_and_has_the_variance_of_the_quadrature(heuristic, m, proposals):
    target = torch.tensor([0.2, 0.7], dtype=torch.float64)
    ratios = estimates(proposals, target, heuristic, m, repeats=4000, seed=3)
    assert abs(ratios.mean() - 1) < 4 * ratios.std() / math.sqrt(len(ratios))

    nodes, measure = spaces.square_nodes(32)
    log_density = spaces.log_density(proposals, nodes, TAU).T
    log_weight = sampling.log_weights(log_density, heuristic, proposal=2)
    exact = sampling.variance(spaces.log_density(target[None], nodes, TAU)[0], log_density, log_weight, measure, m)
    standard_error = (ratios - 1).square().std() / math.sqrt(len(ratios))  # of the empirical variance
    assert abs(ratios.var() - exact) < 5 * standard_error


def test_balance_heuristic_has_the_smallest_second_moment(proposals):
    nodes, measure = spaces.square_nodes(32)
    log_density = spaces.log_density(proposals, nodes, TAU).T
    log_integrand = spaces.log_density(spaces.sample_x(5, stream(4)), nodes, TAU)

    def second(log_weight):
        first, second = sampling.moments(log_integrand, log_density, log_weight, measure)
        torch.testing.assert_close(first.sum(dim=-1), torch.ones(5, dtype=torch.float64))  # unbiased
        return second.sum(dim=-1)

    best = second(sampling.log_weights(log_density, "balance"))
    q = log_density.exp().sum(dim=1)
    torch.testing.assert_close(best, (measure * log_integrand.exp().square() / q).sum(dim=1))
    others = [sampling.log_weights(log_density, "uniform")]
    others += [sampling.log_weights(log_density, "single", proposal=k) for k in range(len(proposals))]
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
        log_weight = sampling.log_weights(log_density, "balance")
        return sampling.variance(log_integrand, log_density, log_weight, measure, m).mean().item()

    assert mean_variance(100, 4) == pytest.approx(mean_variance(100, 1) / 4)
    assert mean_variance(1600, 1) == pytest.approx(mean_variance(100, 1) / 16, rel=0.2)


def test_popularity_form_equals_the_balance_heuristic(proposals):
    y = spaces.sample_y(proposals, TAU, stream(7)).squeeze(1)
    scores = proposals @ y.T
    log_density = spaces.log_density(proposals, y, TAU).T
    log_weight = sampling.log_weights(log_density, "balance")
    expected = sampling.log_partition(
        (scores / TAU).unsqueeze(-1), log_density.diagonal()[:, None], log_weight.diagonal()[:, None]
    )
    estimate = sampling.log_partition_from_popularity(scores, spaces.log_popularity(proposals, y, TAU), TAU)
    torch.testing.assert_close(estimate, expected)


def test_risks_agree_with_loops_written_from_the_formula():
    n, tau = 7, 0.5
    x = spaces.sample_x(n, stream(8))
    y = spaces.sample_y(x, tau, stream(9)).squeeze(1)
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


def test_bound_term_bounds_the_change_of_the_partition_function():
    x = spaces.sample_x(40, stream(13))
    y = spaces.sample_y(x, TAU, stream(14)).squeeze(1)
    scores, log_q = x @ y.T, spaces.log_popularity(x, y, TAU)
    assert sampling.bound_term(log_q, log_q) == 0
    noise = 0.3 * torch.randn(len(log_q), dtype=torch.float64, generator=stream(15))
    for other in (sampling.uniform_log_popularity(scores), log_q + noise, log_q + 0.1):
        loops = sum(abs(math.exp(-a) - math.exp(-b)) for a, b in zip(other.tolist(), log_q.tolist(), strict=True))
        term = sampling.bound_term(other, log_q)
        assert term.item() == pytest.approx(loops)
        c = scores.abs().max()
        smallest = min((-other).exp().sum(), (-log_q).exp().sum())
        bound = torch.exp(2 * c / TAU) * term / smallest
        change = sampling.log_partition_from_popularity(scores, other, TAU)
        change -= sampling.log_partition_from_popularity(scores, log_q, TAU)
        assert change.abs().max() <= bound


def test_numpy_arrays_give_the_same_tensors():
    generator = stream(16)
    scores, log_q, true = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((5, 5), (5,), (5,)))
    for function, arguments in (
        (sampling.log_weights, (scores, "balance")),
        (sampling.log_partition, (scores, scores, scores)),
        (sampling.variance, (log_q, scores, scores, log_q)),
        (sampling.log_partition_from_popularity, (scores, log_q, 0.3)),
        (sampling.empirical_risk, (log_q, true, 0.3)),
        (sampling.empirical_risk_from_popularity, (scores, log_q, 0.3)),
        (sampling.uniform_log_popularity, (scores,)),
        (sampling.scale_to_area, (log_q,)),
        (sampling.scale_to_maximum, (log_q, true)),
        (sampling.bound_term, (log_q, true)),
    ):
        arrays = [value.numpy() if isinstance(value, torch.Tensor) else value for value in arguments]
        assert torch.equal(function(*arrays), function(*arguments)), function.__name__


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (sampling.log_weights, ([0.5], "balance"), "log_density is list"),
        (sampling.log_weights, (torch.zeros(3, dtype=torch.int64), "balance"), r"log_density is int64 of shape \(3,\)"),
        (sampling.log_partition, (torch.zeros(2, 3, 1), torch.zeros(2, 1), torch.zeros(3, 1)), "log_density has shape"),
        (sampling.log_partition_from_popularity, (torch.zeros(2, 3), torch.zeros(2), 0.1), r"log_q has shape \(2,\)"),
        (sampling.log_partition_from_popularity, (torch.zeros(2, 3), torch.zeros(3), 0.0), "temperature=0.0"),
        (
            sampling.empirical_risk,
            (torch.zeros(3), torch.zeros(2), 0.1),
            r"positives has shape \(3,\) and log_z \(2,\)",
        ),
        (
            sampling.empirical_risk_from_popularity,
            (torch.zeros(2, 3), torch.zeros(3), 0.1),
            r"scores has shape \(2, 3\)",
        ),
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
    for log_q in spaces.popularities(sample).values():
        z, z_true = (
            sampling.log_partition_from_popularity(sample.scores, q, TAU).exp() for q in (log_q, sample.log_q_true)
        )
        bound = math.exp(1 / TAU) * sampling.error_term(sample.scores, log_q, sample.log_q_true, TAU).item()
        assert (z - z_true).abs().mean().item() <= bound * (1 + 1e-9)


@pytest.mark.parametrize(
    ("shape", "message"), [((4,), r"log_q has shape \(4,\)"), ((2, 4), r"log_q has shape \(2, 4\)")]
)
def test_error_term_names_a_wrong_shape(shape, message):
    with pytest.raises(ValueError, match=message):
        sampling.error_term(torch.zeros(3, 3), torch.zeros(shape), torch.zeros(3), TAU)
