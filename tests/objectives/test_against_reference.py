"""The stateful objectives against float64 loops: value, gradients and state over batches that revisit samples."""

import math

import numpy as np
import pytest

from tests.objectives.comparison import (
    BATCH,
    MASKS,
    Stateful,
    batches,
    masked,
    run,
    state_of,
)

# SogCLR, iSogCLR


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


# NUCLR

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


@pytest.mark.parametrize(
    "options",
    [{}, {"zeta_momentum": 0.9}, {"zeta_momentum": 0.9, "zeta_velocity_init": "gradient"}],
    ids=str,
)
@estimators
def test_zeta_lr_set_between_steps(options, estimator) -> None:
    """While zeta_lr is 0, zeta, its velocity and xi are frozen, but u is updated; gamma and temperature change too."""
    pair = Stateful("nuclr-authors", temperature=0.1, zeta_lr=0.0, zeta_estimator=estimator, **options)
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
            for name in before.keys() - {"log_u_x", "log_u_y"}:
                np.testing.assert_array_equal(state_of(pair.objective)[name], before[name])
