"""nuclr-authors: several steps of zeta per batch, and how the velocity starts; against loops, and relations."""

import numpy as np
import pytest

from tests.objectives.comparison import (
    SAMPLES,
    Stateful,
    assert_same_training,
    batches,
    masked_in_few_ways,
    run,
    state_of,
)
from tests.objectives.extensions import NUCLR
from tests.objectives.make import make

NAME = "nuclr-authors"


@masked_in_few_ways
@pytest.mark.parametrize(("momentum", "steps"), [(0.0, 2), (0.9, 5)])
@pytest.mark.parametrize("estimator", ["reference", "paper", "unbiased"])
def test_inner_steps_against_loops(estimator, momentum, steps, mask) -> None:
    run(NAME, mask, **NUCLR, zeta_estimator=estimator, zeta_momentum=momentum, zeta_steps=steps)


@masked_in_few_ways
@pytest.mark.parametrize("options", [{}, {"zeta_steps": 3}, {"zeta_lr_ratio_x": 2.0}], ids=str)
def test_first_gradient_as_velocity_against_loops(options, mask) -> None:
    pair = run(NAME, mask, **NUCLR, zeta_velocity_init="gradient", zeta_momentum=0.9, **options)
    visited = np.isfinite(pair.state["log_u_x"])
    assert (np.isnan(pair.state["zeta_velocity_y"]) == ~visited).all(), "rows without an update hold nan"


@pytest.mark.parametrize("options", [{}, {"zeta_steps": 2}, {"zeta_velocity_init": "gradient"}], ids=str)
def test_zeta_lr_0_freezes_everything_about_zeta(options) -> None:
    pair = Stateful(NAME, **(NUCLR | options | {"zeta_lr": 0.0}))
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


def test_without_momentum_the_first_velocity_does_not_matter() -> None:
    zero, gradient = (
        make(NAME, num_samples=SAMPLES, **NUCLR, zeta_velocity_init=init).double() for init in ("zero", "gradient")
    )
    for side in "xy":
        velocity = gradient.get_buffer(f"zeta_velocity_{side}")
        assert velocity.isnan().all()
        velocity.zero_()
    assert_same_training(gradient, zero, atol=0)
