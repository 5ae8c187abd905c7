"""Individual temperatures in NUCLR and a learnt global temperature: against loops, and what they reduce to."""

import math

import numpy as np
import pytest
import torch

from tests.objectives.comparison import (
    SAMPLES,
    Stateful,
    assert_close,
    assert_same_training,
    batches,
    call,
    masked_in_few_ways,
    run,
)
from tests.objectives.extensions import INDIVIDUAL, NUCLR
from tests.objectives.make import make

# ---------------------------------------------------------------------------------------------------------------------
# Individual temperatures
# ---------------------------------------------------------------------------------------------------------------------


@masked_in_few_ways
@pytest.mark.parametrize("estimator", ["paper", "unbiased"])
@pytest.mark.parametrize("use_xi", [True, False])
def test_individual_against_loops(estimator, use_xi, mask) -> None:
    pair = run("nuclr", mask, **NUCLR, **INDIVIDUAL, zeta_estimator=estimator, use_xi=use_xi)
    assert pair.state["tau_x"].std() > 1e-3, "this test needs temperatures that have moved"
    assert np.abs(pair.state["zeta_y"]).max() > 1e-3, "this test needs a zeta that has moved"


@masked_in_few_ways
@pytest.mark.parametrize(
    "options",
    [
        {"rho": 0.3, "tau_lr": 0.01},  # momentum of both signs
        {"tau_lr": 0.05, "tau_min": 0.02, "tau_max": 0.12},  # tau reaches its bounds
        {"tau_beta": 0.5, "zeta_init": -0.2},
        {"zeta_momentum": 0.9, "xi_init": 0.15},
        {"xi_init": math.inf, "zeta_init": 0.1},
        {"gamma_rule": "proximal", "sides": "y"},
    ],
    ids=str,
)
def test_individual_with_other_options(options, mask) -> None:
    run("nuclr", mask, **(NUCLR | INDIVIDUAL | options))


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_popularity_belongs_to_the_candidate(gamma) -> None:
    """Adding c to all zeta divides every phi_i by exp(c/tau), whatever the anchor's own temperature."""
    one, two = (make("nuclr", num_samples=SAMPLES, gamma=gamma, **NUCLR, **INDIVIDUAL).double() for _ in range(2))
    for objective in (one, two):
        for tau in (objective.tau_x, objective.tau_y):
            tau.copy_(torch.linspace(0.03, 0.3, SAMPLES))
    for zeta in (two.zeta_x, two.zeta_y):
        zeta.fill_(0.05)
    x, y, index = next(batches())
    for objective in (one, two):
        objective(x, y, index)
    for side in "xy":
        shift = two.get_buffer(f"log_u_{side}")[index] - one.get_buffer(f"log_u_{side}")[index]
        assert_close(shift, torch.full_like(shift, -0.05 / 0.1), f"log_u_{side}")


# ---------------------------------------------------------------------------------------------------------------------
# A learnt temperature
# ---------------------------------------------------------------------------------------------------------------------

LEARNT = [
    ("sogclr", {}),
    ("sogclr", {"rho": 2.0, "gamma": 1.0}),
    ("sogclr", {"gamma_rule": "proximal", "sides": "y"}),
    ("nuclr", {"zeta_lr": 0.02}),
    ("nuclr", {"zeta_lr": 0.02, "use_xi": False, "zeta_estimator": "unbiased"}),
    ("nuclr", {"zeta_lr": 0.02, "zeta_init": -0.1, "gamma": 1.0, "rho": 0.0}),
    ("nuclr", {"zeta_lr": 0.02, "xi_init": math.inf, "zeta_init": 0.05}),
    ("nuclr", {"zeta_lr": 0.02, "sides": "x"}),
]
learnt = pytest.mark.parametrize(("name", "options"), LEARNT, ids=str)


@masked_in_few_ways
@learnt
def test_learnt_against_loops(name, options, mask) -> None:
    """The gradient of log_scale is -tau times that of tau; the temperature moves between the batches."""
    pair = run(name, mask, temperature=0.1, learn_temperature=True, **options)
    assert abs(math.exp(-pair.objective.log_scale.item()) - 0.1) > 1e-4, "this test needs a temperature that has moved"


@pytest.mark.parametrize("name", ["sogclr", "nuclr"])
def test_a_fixed_temperature_gives_the_same_gradients_and_state(name) -> None:
    """The value differs: it includes rho tau, and for NUCLR xi and -log(n-1)."""
    fixed = make(name, num_samples=SAMPLES, temperature=0.125).double()
    learnt = make(name, num_samples=SAMPLES, temperature=0.125, learn_temperature=True).double()
    with torch.no_grad():
        learnt.log_scale.fill_(-math.log(0.125))
    assert_same_training(learnt, fixed, value=False)


@pytest.mark.parametrize("name", ["sogclr", "nuclr"])
@pytest.mark.parametrize(("outside", "bound"), [(5e-5, 0.001), (3.0, 1.0)])
def test_temperature_is_clamped(name, outside, bound) -> None:
    pair = Stateful(name, learn_temperature=True)
    with torch.no_grad():
        pair.objective.log_scale.fill_(-math.log(outside))
    x, y, index = next(batches())
    step = pair.expected(x, y, index, (None, None))  # at the bound
    out, grad_x, _ = call(pair.objective, x, y, index)
    assert math.exp(-pair.objective.log_scale.item()) == pytest.approx(bound, rel=1e-6)
    assert_close(out.loss.item(), step.value, "value")
    assert_close(grad_x, step.grad_x, "gradient of x")
    assert_close(pair.objective.log_scale.grad.item(), -bound * step.grad_tau, "gradient of log_scale")


@pytest.mark.parametrize("name", ["sogclr", "nuclr"])
def test_current_temperature_is_the_learnt_one(name) -> None:
    objective = make(name, num_samples=SAMPLES, temperature=0.1, learn_temperature=True).double()
    assert objective.current_temperature == pytest.approx(0.1)
    with torch.no_grad():
        objective.log_scale.fill_(-math.log(0.25))
    assert objective.current_temperature == pytest.approx(0.25)
    fixed = make(name, num_samples=SAMPLES, temperature=0.1)
    assert not list(fixed.parameters())
