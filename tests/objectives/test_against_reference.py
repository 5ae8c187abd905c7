"""Every objective against float64 loops: value, gradients and state over five batches that revisit samples, to 1e-9."""

import math

import numpy as np
import pytest
import torch

from tests import reference
from tests.objectives.comparison import (
    BATCH,
    MASKS,
    SAMPLES,
    Stateful,
    assert_close,
    batches,
    call,
    masked,
    run,
    state_of,
)
from tests.objectives.make import make

# ---------------------------------------------------------------------------------------------------------------------
# SogCLR, iSogCLR
# ---------------------------------------------------------------------------------------------------------------------


@masked
@pytest.mark.parametrize("gamma", [0.8, 1.0])
def test_sogclr(gamma, mask) -> None:
    run("sogclr", mask, temperature=0.1, gamma=gamma)


@masked
@pytest.mark.parametrize("gamma", [0.8, 1.0])
def test_isogclr(gamma, mask) -> None:
    pair = run("isogclr", mask, temperature=0.1, gamma=gamma, tau_lr=2e-3, tau_max=1.0)
    if mask[0] != [0] * BATCH:
        assert pair.state["tau_x"].std() > 1e-3, "this test needs temperatures that have moved"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.03},
        {"rho": 0.3, "tau_lr": 0.01, "tau_max": 1.0},  # m_i of both signs
        {"tau_lr": 0.05, "tau_min": 0.02, "tau_max": 0.12},  # tau reaches its bounds
        {"tau_lr": 1e-5, "tau_beta": 0.5, "tau_max": 1.0},
    ],
    ids=str,
)
def test_isogclr_options(options) -> None:
    run("isogclr", **({"temperature": 0.1, "gamma": 0.8} | options))


# ---------------------------------------------------------------------------------------------------------------------
# NUCLR
# ---------------------------------------------------------------------------------------------------------------------

NUCLR = {"temperature": 0.1, "gamma": 0.8, "zeta_lr": 0.02}
estimators = pytest.mark.parametrize("estimator", ["reference", "paper", "unbiased"])
xi_rules = pytest.mark.parametrize("xi_rule", ["norm", "max"])


@masked
@estimators
@xi_rules
@pytest.mark.parametrize("use_xi", [True, False])
def test_nuclr(estimator, xi_rule, use_xi, mask) -> None:
    pair = run("nuclr-authors", mask, **NUCLR, zeta_estimator=estimator, xi_rule=xi_rule, use_xi=use_xi)
    if mask[0] != [0] * BATCH:
        assert np.abs(pair.state["zeta_y"]).max() > 1e-3, "this test needs a zeta that has moved"
        assert pair.state["xi_y"] > 0 or xi_rule == "max"


@estimators
@xi_rules
@pytest.mark.parametrize("gamma", [0.8, 1.0])
@pytest.mark.parametrize("mask", [MASKS["no ids"], MASKS["both"]], ids=["no ids", "both"])
@pytest.mark.parametrize(
    "options",
    [
        {"zeta_momentum": 0.9, "zeta_lr_ratio_x": 3.0},
        {"zeta_init": -0.2},
        {"zeta_init": 0.1, "xi_init": 0.15},
        {"xi_init": math.inf, "zeta_init": -0.1},
        {"xi_init": -0.5, "zeta_init": -0.2},
        {"temperature": 0.01, "zeta_lr": 1e-3},
    ],
    ids=str,
)
def test_nuclr_options(estimator, xi_rule, gamma, mask, options) -> None:
    options = NUCLR | options | {"gamma": gamma, "zeta_estimator": estimator}
    run("nuclr-authors", mask, **options, xi_rule=xi_rule)
    if estimator != "reference" and xi_rule == "norm" and "zeta_lr_ratio_x" not in options:
        run("nuclr", mask, **options)


@pytest.mark.parametrize("name", ["sogclr", "isogclr", "nuclr"])
def test_defaults_are_those_of_the_formulas(name) -> None:
    run(name)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@estimators
def test_zeta_lr_set_between_steps(momentum, estimator) -> None:
    """While zeta_lr is 0, zeta, its velocity and xi are frozen, but u is updated; gamma and temperature change too."""
    options = {"zeta_momentum": momentum, "zeta_estimator": estimator}
    pair = Stateful("nuclr-authors", temperature=0.1, gamma=0.8, zeta_lr=0.0, **options)
    schedule = [
        {"zeta_lr": 0.0},
        {"zeta_lr": 0.0, "gamma": 0.5},
        {"zeta_lr": 0.05},
        {"zeta_lr": 0.02, "temperature": 0.07},
        {"zeta_lr": 0.0, "gamma": 1.0},
        {"zeta_lr": 0.01, "gamma": 0.3},
    ]
    for settings, batch in zip(schedule, batches(steps=len(schedule)), strict=True):
        pair.set(**settings)
        before = state_of(pair.objective)
        pair.check(*batch)
        if settings["zeta_lr"] == 0:
            for name in ("zeta_x", "zeta_y", "zeta_velocity_x", "zeta_velocity_y", "xi_x", "xi_y"):
                np.testing.assert_array_equal(state_of(pair.objective)[name], before[name])


# ---------------------------------------------------------------------------------------------------------------------
# Stateless objectives
# ---------------------------------------------------------------------------------------------------------------------


def check_stateless(objective, loops, mask) -> None:
    """Compare with loops(x, y, parameters, x_id, y_id), where parameters maps names to the objective's parameters."""
    objective = objective.double()
    for x, y, index in batches():
        out, grad_x, grad_y = call(objective, x, y, index, mask)
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        parameters = {name: p.detach().clone().requires_grad_() for name, p in objective.named_parameters()}
        value = loops(x, y, parameters, *mask)
        value.backward()
        assert out.loss.dtype == torch.float64
        assert_close(out.loss.item(), value.item(), "value")
        assert_close(grad_x, x.grad, "gradient of x")
        assert_close(grad_y, y.grad, "gradient of y")
        for name, parameter in objective.named_parameters():
            assert_close(parameter.grad, parameters[name].grad, f"gradient of {name}")
        with torch.no_grad():
            for parameter in objective.parameters():
                parameter -= 0.05 * parameter.grad


@masked
@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0])
def test_clip(tau, mask) -> None:
    objective = make("clip", num_samples=SAMPLES, temperature=tau)
    assert not list(objective.parameters())
    check_stateless(objective, lambda x, y, p, i, j: reference.clip(x, y, temperature=tau, x_id=i, y_id=j), mask)


@masked
@pytest.mark.parametrize("tau", [0.03, 0.1])
def test_clip_learns_its_temperature(tau, mask) -> None:
    objective = make("clip", num_samples=SAMPLES, temperature=tau, learn_temperature=True)
    ((name, log_scale),) = objective.named_parameters()
    assert log_scale.item() == pytest.approx(math.log(1 / tau))
    check_stateless(objective, lambda x, y, p, i, j: reference.clip_learnable(x, y, p[name], i, j), mask)


def test_clip_scale_stops_at_100() -> None:
    learnable = make("clip", num_samples=SAMPLES, temperature=0.05, learn_temperature=True).double()
    log_scale = torch.tensor(math.log(400.0), dtype=torch.float64)
    with torch.no_grad():
        next(learnable.parameters()).copy_(log_scale)
    for x, y, index in batches():
        out, grad_x, grad_y = call(learnable, x, y, index)
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        value = reference.clip_learnable(x, y, log_scale)
        value.backward()
        assert_close(out.loss.item(), value.item(), "value")
        assert_close(grad_x, x.grad, "gradient of x")
        assert_close(grad_y, y.grad, "gradient of y")


@masked
@pytest.mark.parametrize("options", [{}, {"temperature": 0.3, "bias": -1.0}], ids=str)
def test_siglip(options, mask) -> None:
    objective = make("siglip", num_samples=SAMPLES, **options)
    named = dict(objective.named_parameters())
    (bias,) = [name for name in named if "bias" in name]
    (log_scale,) = [name for name in named if "bias" not in name]
    assert named[bias].item() == pytest.approx(options.get("bias", -10.0))
    assert named[log_scale].item() == pytest.approx(-math.log(options.get("temperature", 0.1)))
    check_stateless(objective, lambda x, y, p, i, j: reference.siglip(x, y, p[log_scale], p[bias], i, j), mask)


@masked
@pytest.mark.parametrize(
    "options",
    # With the last options, debiased sums are negative, below the lower bound, and above it.
    [{"temperature": 0.1}, {"temperature": 1.0, "tau_plus": 0.01}, {"temperature": 1.0, "tau_plus": 0.5}],
    ids=str,
)
def test_dcl(options, mask) -> None:
    objective = make("dcl", num_samples=SAMPLES, **options)
    check_stateless(objective, lambda x, y, p, i, j: reference.dcl(x, y, x_id=i, y_id=j, **options), mask)


@masked
@pytest.mark.parametrize("tau", [0.03, 0.5])
def test_cyclip(tau, mask) -> None:
    objective = make("cyclip", num_samples=SAMPLES, temperature=tau)
    check_stateless(objective, lambda x, y, p, i, j: reference.cyclip(x, y, temperature=tau, x_id=i, y_id=j), mask)
