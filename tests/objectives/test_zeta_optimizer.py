"""Steps of zeta: adam, several inner steps per batch, and how the velocity starts; against loops, and relations."""

import math

import numpy as np
import pytest

from nuclr.objectives import build
from tests.objectives.comparison import (
    BATCH,
    SAMPLES,
    Stateful,
    assert_close,
    batches,
    call,
    masked_in_few_ways,
    run,
    state_of,
)
from tests.objectives.extensions import NUCLR

ADAM = {"zeta_optimizer": "adam", "zeta_momentum": 0.9}


@masked_in_few_ways
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("estimator", ["reference", "unbiased"])
def test_adam_against_loops(estimator, steps, mask) -> None:
    pair = run("nuclr", mask, **NUCLR, **ADAM, zeta_estimator=estimator, zeta_steps=steps)
    assert pair.state["zeta_updates_y"].max() >= 2 * steps, "this test needs rows that are updated again"


@masked_in_few_ways
@pytest.mark.parametrize(
    "options",
    [
        {"zeta_momentum": 0.0},
        {"zeta_beta2": 0.9, "zeta_lr_ratio_x": 3.0},
        {"zeta_steps": 2, "sides": "x"},
        {"zeta_steps": 2, "sides": "y", "xi_rule": "max", "zeta_init": -0.1},
        {"use_xi": False, "gamma_rule": "proximal"},
    ],
    ids=str,
)
def test_adam_with_other_options(options, mask) -> None:
    run("nuclr", mask, **(NUCLR | ADAM | options))


@masked_in_few_ways
@pytest.mark.parametrize(("momentum", "steps"), [(0.0, 2), (0.9, 5)])
@pytest.mark.parametrize("estimator", ["reference", "paper", "unbiased"])
def test_inner_steps_against_loops(estimator, momentum, steps, mask) -> None:
    run("nuclr", mask, **NUCLR, zeta_estimator=estimator, zeta_momentum=momentum, zeta_steps=steps)


@masked_in_few_ways
@pytest.mark.parametrize("options", [{}, {"zeta_steps": 3}, {"sides": "x", "zeta_lr_ratio_x": 2.0}], ids=str)
def test_first_gradient_as_velocity_against_loops(options, mask) -> None:
    pair = run("nuclr", mask, **NUCLR, zeta_velocity_init="gradient", zeta_momentum=0.9, **options)
    velocity = pair.state["zeta_velocity_y"]
    visited = np.isfinite(pair.state["log_u_x"])
    assert (np.isnan(velocity) == ~visited).all(), "rows without an update hold nan"


@pytest.mark.parametrize(
    "options", [ADAM, ADAM | {"zeta_steps": 2}, {"zeta_steps": 2}, {"zeta_velocity_init": "gradient"}], ids=str
)
def test_zeta_lr_0_freezes_everything_about_zeta(options) -> None:
    pair = Stateful("nuclr", **(NUCLR | options | {"zeta_lr": 0.0}))
    start = state_of(pair.objective)
    for batch in batches(steps=3):
        pair.check(*batch)
    for key, table in state_of(pair.objective).items():
        if not key.startswith("log_u"):
            np.testing.assert_array_equal(table, start[key], err_msg=key)
    pair.set(zeta_lr=0.02)
    for batch in batches(seed=1, steps=3):
        pair.check(*batch)
    assert np.abs(pair.state["zeta_y"]).max() > 1e-3


def assert_same_training(one, two, skip: tuple[str, ...] = ()) -> None:
    """Train both on the same batches and assert that values, gradients and tables agree."""
    for x, y, index in batches():
        expected, *expected_gradients = call(one, x, y, index)
        out, *gradients = call(two, x, y, index)
        assert_close(out.loss.item(), expected.loss.item(), "value")
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            assert_close(gradient, expected_gradient, "gradient")
    for key, table in state_of(one).items():
        if not key.startswith(skip):
            assert_close(state_of(two)[key], table, key)


def test_one_inner_step_is_the_usual_form() -> None:
    options = NUCLR | {"zeta_momentum": 0.9}
    usual = build("nuclr", num_samples=SAMPLES, **options).double()
    assert_same_training(usual, build("nuclr", num_samples=SAMPLES, **options, zeta_steps=1).double())


def test_without_momentum_the_first_velocity_does_not_matter() -> None:
    zero, gradient = (
        build("nuclr", num_samples=SAMPLES, **NUCLR, zeta_momentum=0.0, zeta_velocity_init=init).double()
        for init in ("zero", "gradient")
    )
    assert_same_training(zero, gradient, skip=("zeta_velocity",))
    for side in "xy":
        velocity, table = gradient.get_buffer(f"zeta_velocity_{side}"), zero.get_buffer(f"zeta_velocity_{side}")
        visited = ~velocity.isnan()
        assert_close(velocity[visited], table[visited], f"zeta_velocity_{side}")
        assert (table[~visited] == 0).all() and 0 < int(visited.sum()) < SAMPLES


def test_zeta_velocity_init_has_no_effect_on_adam() -> None:
    zero, gradient = (
        build("nuclr", num_samples=SAMPLES, **NUCLR, **ADAM, zeta_velocity_init=init).double()
        for init in ("zero", "gradient")
    )
    assert_same_training(zero, gradient)


def test_inner_steps_change_only_zeta_and_xi_in_the_first_batch() -> None:
    """The model's gradient uses zeta and xi from before the first inner step; xi follows zeta after the last one."""
    once, twice = (build("nuclr", num_samples=SAMPLES, **NUCLR, zeta_steps=steps).double() for steps in (1, 2))
    x, y, index = next(batches())
    expected, *expected_gradients = call(once, x, y, index)
    out, *gradients = call(twice, x, y, index)
    assert_close(out.loss.item(), expected.loss.item(), "value")
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_close(gradient, expected_gradient, "gradient")
    for side in "xy":
        assert_close(twice.get_buffer(f"log_u_{side}"), once.get_buffer(f"log_u_{side}"), f"log_u_{side}")
        zeta = twice.get_buffer(f"zeta_{side}")
        assert (zeta - once.get_buffer(f"zeta_{side}")).abs().max() > 1e-3
        assert twice.get_buffer(f"xi_{side}").item() == zeta.abs().max().item()


def test_the_first_adam_step_has_the_size_of_the_learning_rate() -> None:
    objective = build("nuclr", num_samples=SAMPLES, **NUCLR, **ADAM, zeta_lr_ratio_x=2.0).double()
    x, y, index = next(batches())
    call(objective, x, y, index)
    np.testing.assert_allclose(objective.zeta_y[index].abs(), 0.02, rtol=1e-5)
    np.testing.assert_allclose(objective.zeta_x[index].abs(), 0.04, rtol=1e-5)
    assert (objective.zeta_updates_y[index] == 1).all() and objective.zeta_updates_y.sum() == BATCH
    assert not math.isnan(objective.zeta_square_y.sum().item())
