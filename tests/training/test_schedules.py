"""Learning rate, step sizes and weights of the objective at known points of a run."""

import math

import pytest

from nuclr.runs.settings import Schedule
from nuclr.training import schedules


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    rates = [schedules.learning_rate(step, 100, 10, 1e-5, 2e-4, 1e-6) for step in range(101)]
    assert rates[0] == 1e-5
    assert rates[5] == pytest.approx((1e-5 + 2e-4) / 2)
    assert rates[10] == max(rates) == 2e-4
    assert rates[55] == pytest.approx((2e-4 + 1e-6) / 2)
    assert rates[100] == pytest.approx(1e-6)
    assert schedules.learning_rate(0, 1, 0, 1e-5, 1e-3, 0.0) == 1e-3
    assert schedules.learning_rate(5, 6, 10, 0.0, 1.0, 0.0) == 0.5, "warmup may be longer than the run"


def rate(t: float, epochs: int = 30, **plan) -> float:
    return schedules.step_size(t, Schedule(epochs=epochs, zeta_frozen_epochs=5, **plan), 1.0)


def test_a_step_size_is_zero_while_frozen_and_then_falls():
    assert rate(4.99) == 0
    assert rate(5) == 1
    assert rate(17.5) == pytest.approx(0.5)
    assert rate(30) == pytest.approx(0)
    assert rate(29, zeta="constant") == 1
    assert rate(14.9, zeta="constant", zeta_steps=True) == 1
    assert rate(15, zeta="constant", zeta_steps=True) == pytest.approx(0.1)
    assert rate(22.5, zeta="constant", zeta_steps=True) == pytest.approx(0.01)
    assert rate(22.5, zeta_steps=True) == pytest.approx(rate(22.5) / 100)
    assert rate(4.5, epochs=5) == 0 and math.isfinite(rate(5, epochs=5)), "frozen to the end of the run"


@pytest.mark.parametrize(("epochs", "frozen"), [(30, 5), (10, 1), (5, 0)])
def test_zeta_is_frozen_for_a_sixth_of_the_epochs_by_default(epochs, frozen):
    default = Schedule(epochs=epochs)
    assert schedules.step_size(frozen, default, 1.0) == 1
    assert frozen == 0 or schedules.step_size(frozen - 0.01, default, 1.0) == 0
    assert schedules.step_size(0, Schedule(epochs=epochs, zeta_frozen_epochs=0), 1.0) == 1


def test_schedules_per_epoch_are_those_of_the_published_log():
    rates = [schedules.learning_rate_per_epoch(epoch, 5000, 30, 500, 1e-5, 2e-4, 1e-6) for epoch in range(30)]
    logged = {0: 2.0e-4, 1: 1.99e-4, 4: 1.91e-4, 10: 1.50e-4, 15: 1.01e-4, 22: 3.4e-5, 29: 2e-6}  # to 6 digits
    assert {epoch: round(rates[epoch], 6) for epoch in logged} == logged
    assert schedules.learning_rate_per_epoch(0, 0, 30, 500, 1e-5, 2e-4, 1e-6) == 1e-5
    assert schedules.learning_rate_per_epoch(0, 250, 30, 500, 1e-5, 2e-4, 1e-6) == pytest.approx(1.05e-4)
    published = {"zeta_steps": True, "per_epoch": True}
    constant = published | {"zeta": "constant"}
    assert rate(4.99, **published) == 0 and rate(5.0, **published) == rate(5.99, **published) == 1
    assert rate(17, per_epoch=True) == pytest.approx(0.5)
    assert rate(14.9, **constant) == 1 and rate(15, **constant) == pytest.approx(0.1)
    assert rate(21.9, **constant) == pytest.approx(0.1) and rate(22, **constant) == pytest.approx(0.01)
    assert rate(29.5, **published) == pytest.approx(0)
    assert rate(5, epochs=6, per_epoch=True) == 1, "no division by zero in a single epoch"


def test_a_weight_is_constant_or_falls_from_one():
    assert schedules.weight(7, Schedule(epochs=10), 0.3) == 0.3
    falling = [schedules.weight(t, Schedule(epochs=10, gamma="cosine"), 0.2) for t in (0, 5, 10)]
    assert falling == pytest.approx([1, 0.6, 0.2])
