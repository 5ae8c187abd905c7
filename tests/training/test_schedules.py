"""Learning rate, step size of zeta and gamma at known points of a run."""

import math

import pytest

from nuclr.training import schedules


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    rates = [schedules.learning_rate(step, 100, 10, 1e-5, 2e-4, 1e-6) for step in range(101)]
    assert rates[0] == 1e-5
    assert rates[5] == pytest.approx((1e-5 + 2e-4) / 2)
    assert rates[10] == max(rates) == 2e-4
    assert rates[55] == pytest.approx((2e-4 + 1e-6) / 2)
    assert rates[100] == pytest.approx(1e-6)
    assert schedules.learning_rate(0, 1, 0, 1e-5, 1e-3, 0.0) == 1e-3


def test_warmup_may_be_longer_than_the_run():
    assert schedules.learning_rate(5, 6, 10, 0.0, 1.0, 0.0) == 0.5


def test_zeta_rate_is_zero_while_frozen_and_then_falls():
    def rate(t, shape="cosine", steps=False):
        return schedules.zeta_rate(t, 30, 1.0, 5, shape, steps)

    assert rate(4.99) == 0
    assert rate(5) == 1
    assert rate(17.5) == pytest.approx(0.5)
    assert rate(30) == pytest.approx(0)
    assert rate(29, "constant") == 1
    assert rate(14.9, "constant", True) == 1
    assert rate(15, "constant", True) == pytest.approx(0.1)
    assert rate(22.5, "constant", True) == pytest.approx(0.01)
    assert rate(22.5, "cosine", True) == pytest.approx(rate(22.5) / 100)


def test_zeta_frozen_to_the_end_of_the_run():
    assert schedules.zeta_rate(2.5, 3, 1.0, 3, "cosine", False) == 0, "no division by zero"
    assert math.isfinite(schedules.zeta_rate(3, 3, 1.0, 3, "cosine", False))


def test_schedules_per_epoch_are_those_of_the_published_log():
    rates = [schedules.learning_rate_per_epoch(epoch, 5000, 30, 500, 1e-5, 2e-4, 1e-6) for epoch in range(30)]
    logged = {0: 2.0e-4, 1: 1.99e-4, 4: 1.91e-4, 10: 1.50e-4, 15: 1.01e-4, 22: 3.4e-5, 29: 2e-6}  # to 6 digits
    assert {epoch: round(rates[epoch], 6) for epoch in logged} == logged
    assert schedules.learning_rate_per_epoch(0, 0, 30, 500, 1e-5, 2e-4, 1e-6) == 1e-5
    assert schedules.learning_rate_per_epoch(0, 250, 30, 500, 1e-5, 2e-4, 1e-6) == pytest.approx(1.05e-4)

    def rate(t, epochs=30, shape="cosine", steps=True):
        return schedules.zeta_rate(t, epochs, 1.0, 5, shape, steps, per_epoch=True)

    assert rate(4.99) == 0 and rate(5.0) == rate(5.99) == 1
    assert rate(17, steps=False) == pytest.approx(0.5)
    assert rate(14.9, shape="constant") == 1 and rate(15, shape="constant") == pytest.approx(0.1)
    assert rate(21.9, shape="constant") == pytest.approx(0.1) and rate(22, shape="constant") == pytest.approx(0.01)
    assert rate(29.5) == pytest.approx(0)
    assert rate(5, epochs=6, steps=False) == 1, "no division by zero in a single epoch"


def test_gamma_is_constant_or_falls_from_one():
    assert schedules.gamma(7, 10, 0.3, "constant") == 0.3
    assert schedules.gamma(0, 10, 0.2, "cosine") == 1
    assert schedules.gamma(5, 10, 0.2, "cosine") == pytest.approx(0.6)
    assert schedules.gamma(10, 10, 0.2, "cosine") == pytest.approx(0.2)
