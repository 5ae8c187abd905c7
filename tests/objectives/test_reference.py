"""The loops themselves: their gradients are derivatives of the functions that they claim, and their relations hold."""

import math

import numpy as np
import pytest
import torch

from tests import reference
from tests.objectives.comparison import BATCH, MASKS, SAMPLES, assert_close, batches, features

KEPT = {name: reference.kept_pairs(BATCH, *MASKS[name]) for name in ("no ids", "both", "a row without negatives")}


def views(generator: torch.Generator, count: int) -> np.ndarray:
    return features(generator, count).numpy()


def test_gradient_is_that_of_the_surrogate() -> None:
    """Compare with central differences of (1/B) sum w_ikjm (s_ikjm - S_i), at fixed w."""
    generator = torch.Generator().manual_seed(3)
    anchors, candidates = views(generator, 2), views(generator, 3)
    w = torch.rand(BATCH, 2, BATCH, 3, dtype=torch.float64, generator=generator).tolist()

    def surrogate(a: np.ndarray, c: np.ndarray) -> float:
        s = torch.einsum("ikd,jmd->ikjm", torch.from_numpy(a), torch.from_numpy(c))
        positive = torch.stack([s[i, :, i].mean() for i in range(BATCH)])
        return ((torch.tensor(w, dtype=torch.float64) * (s - positive[:, None, None, None])).sum() / BATCH).item()

    gradients = reference.surrogate_gradient(anchors, candidates, w)
    for which, gradient in enumerate(gradients):
        for position in np.ndindex(gradient.shape):
            shift = np.zeros_like(gradient)
            shift[position] = 1e-4
            up = [f + shift if k == which else f for k, f in enumerate((anchors, candidates))]
            down = [f - shift if k == which else f for k, f in enumerate((anchors, candidates))]
            assert abs((surrogate(*up) - surrogate(*down)) / 2e-4 - gradient[position]) < 1e-9


@pytest.mark.parametrize("per_view", [False, True])
@pytest.mark.parametrize("individual", [False, True])
@pytest.mark.parametrize("tau", [0.03, 0.1, 1.0])
def test_zeta_gradient_is_that_of_the_convex_problem(tau, individual, per_view) -> None:
    """If the batch is the whole data set and u is exact, n G_j is n times the derivative of the convex problem.

    With several views it is mean_i tau log(exp(-zeta_i/tau) + sum_{j != i} mean_{k,m} exp((s_ikjm - S_i)/tau_i -
    zeta_j/tau)) + mean_j zeta_j. With a zeta per view, it is mean_i tau log sum_j mean_{k,m} exp((s_ikjm - S_i)/tau_i -
    zeta_jm/tau) + mean_{j,m} zeta_jm, and n M G_jm is n M times its derivative.
    """
    generator = torch.Generator().manual_seed(4)
    x, y = views(generator, 2), views(generator, 3)
    tau_i = tau * (0.5 + torch.rand(BATCH, dtype=torch.float64, generator=generator)) if individual else [tau] * BATCH
    tau_i = torch.as_tensor(tau_i, dtype=torch.float64)
    count = 3 if per_view else 1
    zeta = (0.2 * torch.randn(BATCH, count, dtype=torch.float64, generator=generator)).requires_grad_()
    s = torch.einsum("ikd,jmd->ikjm", torch.from_numpy(x), torch.from_numpy(y))
    problem = zeta.mean()
    for i in range(BATCH):
        terms = [] if per_view else [-zeta[i] / tau]
        for j in range(BATCH):
            if j != i or per_view:
                difference = (s[i, :, j] - s[i, :, i].mean()) / tau_i[i]
                terms.append((difference - zeta[j] / tau).flatten() - math.log(6))
        problem = problem + tau * torch.logsumexp(torch.cat(terms), 0) / BATCH
    problem.backward()

    loop_scores, kept, values = reference.scores(x, y), reference.kept_pairs(BATCH), zeta.tolist()
    log_u = reference.log_phi(loop_scores, kept, values, tau_i.tolist(), tau, BATCH)
    for estimator in ("unbiased", "paper", "reference"):  # they agree if B = n
        gradient = reference.zeta_gradient(loop_scores, kept, values, tau_i.tolist(), tau, log_u, estimator, BATCH)
        assert_close(gradient, BATCH * count * zeta.grad, estimator)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sogclr", {}),
        ("nuclr", {"zeta_init": 0.05}),
        ("nuclr", {"zeta_init": -0.05, "use_xi": False}),
        ("nuclr", {"xi_init": math.inf}),
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [MASKS["no ids"], MASKS["a row without negatives"]], ids=["no ids", "masked"])
@pytest.mark.parametrize(("counts", "stored"), [((None, None), False), ((2, 3), False), ((2, 3), True)])
def test_temperature_gradient_is_the_derivative_of_the_value(name, options, mask, counts, stored) -> None:
    """At gamma = 1, u_i is phi_i and the compositional gradient is the derivative of the value."""
    if stored:
        options = options | {"x_views": 2, "y_views": 3, "zeta_step": "in tau", "zeta_estimator": "unbiased"}
    options = reference.settings(name, num_samples=SAMPLES, gamma=1.0, learn_temperature=True, **options)
    state = reference.initial_state(options)

    def step_at(tau: float, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> reference.Step:
        current = options.replace(temperature=tau)
        return reference.step(current, x.numpy(), y.numpy(), index, state, x_id=mask[0], y_id=mask[1])

    for batch in batches(steps=3, views=counts):
        difference = (step_at(0.1 + 1e-5, *batch).value - step_at(0.1 - 1e-5, *batch).value) / 2e-5
        step = step_at(0.1, *batch)
        assert step.grad_tau == pytest.approx(difference, rel=1e-6)
        state = step.state


@pytest.mark.parametrize("views_of_x", [1, 2])
def test_temperature_gradient_replaces_the_derivative_of_u_by_that_of_phi(views_of_x) -> None:
    """At gamma < 1 it is the derivative of the value with u_i + phi_i(tau) - phi_i(tau_0) in place of u_i."""
    options = reference.settings(
        "nuclr", num_samples=SAMPLES, temperature=0.1, gamma=0.3, learn_temperature=True, zeta_lr=0.02, sides="x"
    )
    state = reference.initial_state(options)
    for x, y, index in batches(views=(views_of_x, 3)):
        step = reference.step(options, x.numpy(), y.numpy(), index, state)
        s, kept = reference.scores(x.numpy(), y.numpy()), reference.kept_pairs(BATCH)
        zeta, xi, u = (
            state["zeta_y"][index][:, None].tolist(),
            float(state["xi_y"]),
            np.exp(step.state["log_u_x"][index]),
        )

        def value(tau: float, s=s, kept=kept, zeta=zeta, xi=xi, u=u) -> float:
            phi, phi_0 = (np.exp(reference.log_phi(s, kept, zeta, [t] * BATCH, t, SAMPLES)) for t in (tau, 0.1))
            d = u + phi - phi_0 + math.exp(-xi / tau)
            return float(np.mean(tau * (np.log(d) - math.log(SAMPLES - 1) + 8.0)))

        assert value(0.1) == pytest.approx(step.value)
        assert step.grad_tau == pytest.approx((value(0.1 + 1e-5) - value(0.1 - 1e-5)) / 2e-5, rel=1e-6)
        state = step.state


def test_temperature_pull_is_part_of_the_derivative_by_an_individual_temperature() -> None:
    """With zeta = 0, d/dtau_i of tau_i (log phi_i - log(n-1) + rho) is log phi_i - log(n-1) + rho - pull_i."""
    generator = torch.Generator().manual_seed(5)
    s = reference.scores(views(generator, 2), views(generator, 3))
    for kept in (KEPT["no ids"], KEPT["both"]):
        zeros = [[0.0]] * BATCH

        def term(tau: float, kept=kept, zeros=zeros) -> list[float]:
            phi = reference.log_phi(s, kept, zeros, [tau] * BATCH, 1.0, SAMPLES)
            return [tau * (value - math.log(SAMPLES - 1) + 8.0) for value in phi]

        tau_i = [0.1] * BATCH
        phi = reference.log_phi(s, kept, zeros, tau_i, 1.0, SAMPLES)
        w = reference.weights(s, kept, zeros, tau_i, 1.0, phi, SAMPLES)
        for i, pull in enumerate(reference.temperature_pull(s, w, tau_i)):
            difference = (term(0.1 + 1e-5)[i] - term(0.1 - 1e-5)[i]) / 2e-5
            assert phi[i] - math.log(SAMPLES - 1) + 8.0 - pull == pytest.approx(difference, rel=1e-6)


def test_proximal_average() -> None:
    """It is (u + alpha u' phi) / (1 + alpha u'), and the first visit stores phi."""
    options = reference.settings("sogclr", num_samples=SAMPLES, gamma_rule="proximal", alpha=3.0)
    for u, phi in ((0.2, 5.0), (40.0, 0.1), (7.0, 7.0)):
        ratio = 3.0 * u / (SAMPLES - 1)
        average = (u + ratio * phi) / (1 + ratio)
        assert reference.running_average(math.log(u), math.log(phi), options) == pytest.approx(math.log(average))
    assert reference.running_average(-math.inf, 1.5, options) == 1.5
