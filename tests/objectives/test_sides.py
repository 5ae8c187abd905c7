"""sides="x" or "y": the value, gradients and state of one side alone; the two add up to both."""

import pytest

from tests.objectives.comparison import SAMPLES, assert_close, batches, call, masked_in_few_ways, run, state_of
from tests.objectives.extensions import INDIVIDUAL, NUCLR
from tests.objectives.make import make

OBJECTIVES = {
    "sogclr": ("sogclr", {"temperature": 0.1}),
    "isogclr": ("isogclr", {"temperature": 0.03}),
    "nuclr": ("nuclr", NUCLR | {"zeta_momentum": 0.5}),
    "nuclr individual": ("nuclr", NUCLR | INDIVIDUAL),
}
objectives = pytest.mark.parametrize(("name", "options"), OBJECTIVES.values(), ids=OBJECTIVES.keys())
TABLES = {
    "x": {"log_u_x", "tau_x", "tau_momentum_x", "zeta_y", "zeta_velocity_y", "xi_y"},
    "y": {"log_u_y", "tau_y", "tau_momentum_y", "zeta_x", "zeta_velocity_x", "xi_x"},
}


@masked_in_few_ways
@pytest.mark.parametrize("sides", ["x", "y"])
@objectives
def test_against_loops(name, options, sides, mask) -> None:
    pair = run(name, mask, **options, sides=sides)
    other = TABLES["y" if sides == "x" else "x"]
    assert not other & set(state_of(pair.objective)), "tables of the other side must not be registered"
    assert not other & set(pair.objective.state_dict())


@objectives
def test_the_sides_add_up(name, options) -> None:
    both, x_only, y_only = (
        make(name, num_samples=SAMPLES, **options, sides=sides).double() for sides in ("both", "x", "y")
    )
    for batch in batches():
        expected, *expected_gradients = call(both, *batch)
        on_x, *x_gradients = call(x_only, *batch)
        on_y, *y_gradients = call(y_only, *batch)
        assert_close(on_x.loss.item() + on_y.loss.item(), expected.loss.item(), "value")
        assert_close(float(on_x.metrics["objective_x"]), float(expected.metrics["objective_x"]), "objective_x")
        assert_close(float(on_y.metrics["objective_y"]), float(expected.metrics["objective_y"]), "objective_y")
        for gradient, one, two in zip(expected_gradients, x_gradients, y_gradients, strict=True):
            assert_close(one + two, gradient, "gradient")
    united = state_of(x_only) | state_of(y_only)
    assert united.keys() == state_of(both).keys()
    for key, table in state_of(both).items():
        assert_close(united[key], table, key)


@objectives
def test_exchanging_x_and_y_exchanges_the_sides(name, options) -> None:
    x_only, y_only = (make(name, num_samples=SAMPLES, **options, sides=sides).double() for sides in ("x", "y"))
    for x, y, index in batches(views=(2, None)):
        on_x, grad_x, grad_y = call(x_only, x, y, index)
        on_y, other_y, other_x = call(y_only, y, x, index)
        assert_close(on_x.loss.item(), on_y.loss.item(), "value")
        assert_close(grad_x, other_x, "gradient of x")
        assert_close(grad_y, other_y, "gradient of y")
