"""The extensions against float64 loops, over batches that revisit samples, and what they reduce to.

Temperatures (individual, learnt), proximal averages, one side, several views, networks in place of tables, and the
options of nuclr-authors.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch

from tests.objectives.comparison import (
    BATCH,
    SAMPLES,
    Stateful,
    assert_close,
    assert_same_training,
    batches,
    call,
    masked_in_few_ways,
    run,
    state_of,
)
from tests.objectives.extensions import INDIVIDUAL, NUCLR
from tests.objectives.make import make

SOGCLR = {"temperature": 0.1}
ISOGCLR = {"temperature": 0.03}
LEARNT = {"temperature": 0.1, "learn_temperature": True}
PROXIMAL = {"gamma_rule": "proximal"}
POPULARITY = {"temperature": 0.5, "popularity": "network"}
NORMALIZER = {"temperature": 0.5, "normalizer": "network"}
BOTH = POPULARITY | NORMALIZER
MARGIN = {"false_negative_margin": 0.02}
RELATIVE = {"false_negative_margin": 0.1, "margin_strategy": "relative"}
AUTHORS = [
    *({"zeta_estimator": estimator} for estimator in ("reference", "paper", "unbiased")),
    *({"zeta_estimator": e, "zeta_momentum": 0.9} for e in ("reference", "paper", "unbiased")),
    *({"zeta_velocity_init": "gradient", "zeta_momentum": 0.9} | more for more in ({}, {"zeta_lr_ratio_x": 2.0})),
]
ONE_VIEW = [
    # a temperature per anchor
    *(
        ("nuclr", NUCLR | INDIVIDUAL | {"zeta_estimator": estimator, "use_xi": use_xi})
        for estimator, use_xi in product(("paper", "unbiased"), (True, False))
    ),
    ("nuclr", NUCLR | INDIVIDUAL | {"rho": 0.3, "tau_lr": 0.01}),  # momentum of both signs
    ("nuclr", NUCLR | INDIVIDUAL | {"tau_lr": 0.05, "tau_min": 0.02, "tau_max": 0.12}),  # tau reaches its bounds
    ("nuclr", NUCLR | INDIVIDUAL | {"tau_beta": 0.5, "zeta_init": -0.2}),
    ("nuclr", NUCLR | INDIVIDUAL | {"zeta_momentum": 0.9, "xi_init": 0.15}),
    ("nuclr", NUCLR | INDIVIDUAL | {"xi_init": math.inf, "zeta_init": 0.1}),
    ("nuclr", NUCLR | INDIVIDUAL | PROXIMAL | {"sides": "y"}),
    # a learnt temperature
    ("sogclr", LEARNT),
    ("sogclr", LEARNT | {"rho": 2.0, "gamma": 1.0}),
    ("sogclr", LEARNT | PROXIMAL | {"sides": "y"}),
    ("nuclr", LEARNT | {"zeta_lr": 0.02}),
    ("nuclr", LEARNT | {"zeta_lr": 0.02, "use_xi": False}),
    ("nuclr", LEARNT | {"zeta_lr": 0.02, "zeta_init": -0.1, "gamma": 1.0, "rho": 0.0}),
    ("nuclr", LEARNT | {"zeta_lr": 0.02, "xi_init": math.inf, "zeta_init": 0.05}),
    ("nuclr", LEARNT | {"zeta_lr": 0.02, "sides": "x"}),
    # proximal averages
    *(("sogclr", SOGCLR | PROXIMAL | {"alpha": alpha}) for alpha in (4.0, 100.0)),
    *(("isogclr", ISOGCLR | PROXIMAL | {"alpha": alpha}) for alpha in (4.0, 100.0)),
    *(("nuclr", NUCLR | PROXIMAL | {"alpha": alpha}) for alpha in (4.0, 100.0)),
    # one side
    *(("sogclr", SOGCLR | {"sides": side}) for side in "xy"),
    *(("isogclr", ISOGCLR | {"sides": side}) for side in "xy"),
    *(("nuclr", NUCLR | {"zeta_momentum": 0.5, "sides": side}) for side in "xy"),
    *(("nuclr", NUCLR | INDIVIDUAL | {"sides": side}) for side in "xy"),
    # networks; gamma = 0 uses the prediction alone, gamma = 1 the batch alone
    *(("nuclr", POPULARITY | {"use_xi": use_xi}) for use_xi in (True, False)),
    *((name, NORMALIZER | {"gamma": gamma}) for name, gamma in product(("sogclr", "nuclr"), (0.8, 0.0, 1.0))),
    ("nuclr", NORMALIZER | {"zeta_lr": 0.02, "zeta_momentum": 0.5}),
    *(("nuclr", BOTH | {key: value}) for key, value in (("gamma", 0.0), ("zeta_init", -0.1), ("zeta_lr", 0.0))),
    ("nuclr", BOTH | {"zeta_estimator": "paper"}),  # a network's gradient is always the unbiased one
    ("nuclr", BOTH | PROXIMAL),
    ("nuclr", BOTH | {"learn_temperature": True}),
    ("nuclr", BOTH | {"sides": "x"}),
    ("nuclr", BOTH | INDIVIDUAL),
    # likely false negatives are dropped
    *(("sogclr", SOGCLR | {"false_negative_margin": margin}) for margin in (0.0, 0.1, 2.0)),
    *(("sogclr", SOGCLR | MARGIN | {"temperature": tau}) for tau in (0.001, 1.0)),
    ("sogclr", LEARNT | MARGIN),
    ("sogclr", SOGCLR | RELATIVE),
    ("sogclr", SOGCLR | RELATIVE | PROXIMAL),
    ("nuclr", NUCLR | RELATIVE | {"gamma": 1.0}),
    ("sogclr", NORMALIZER | MARGIN),
    ("isogclr", ISOGCLR | MARGIN),
    ("nuclr", NUCLR | MARGIN),
    ("nuclr", NUCLR | MARGIN | {"zeta_momentum": 0.5, "sides": "y"}),
    ("nuclr", NUCLR | MARGIN | {"zeta_estimator": "paper", "use_xi": False}),
    ("nuclr", NUCLR | MARGIN | INDIVIDUAL | PROXIMAL),
    ("nuclr", LEARNT | MARGIN | {"zeta_lr": 0.02}),
    ("nuclr", BOTH | MARGIN),
    ("nuclr-authors", NUCLR | MARGIN),
    # nuclr-authors
    *(("nuclr-authors", NUCLR | options) for options in AUTHORS),
]
STATEFUL = [
    ("sogclr", SOGCLR),
    ("isogclr", ISOGCLR),
    ("nuclr", NUCLR),
    ("nuclr", NUCLR | {"use_xi": False}),
    ("nuclr", NUCLR | INDIVIDUAL),
]
stateful = pytest.mark.parametrize(("name", "options"), STATEFUL, ids=str)
STORED = {"x_views": 2, "y_views": 3}
STORED_OPTIONS = [
    {},
    {"zeta_momentum": 0.9, "zeta_init": -0.05, "xi_init": 0.1},
    {"zeta_estimator": "paper", "gamma": 1.0},
    {"use_xi": False, "temperature": 0.01, "zeta_lr": 0.3},
    {"learn_temperature": True},
    {"learn_temperature": True, "use_xi": False},
    {"sides": "x", **PROXIMAL},
    {"sides": "y", "normalizer": "network", "temperature": 0.5},
    INDIVIDUAL,
    INDIVIDUAL | {"use_xi": False},
]
SEVERAL_VIEWS = [
    *((name, options, views) for (name, options), views in product(STATEFUL, [(2, 3), (None, 2)])),
    ("nuclr", NUCLR | {"zeta_estimator": "paper", "zeta_init": -0.05, "gamma": 1.0}, (2, 3)),
    ("nuclr", NUCLR | {"zeta_momentum": 0.9, "sides": "x"}, (2, 3)),
    ("nuclr", NUCLR | INDIVIDUAL | PROXIMAL | {"alpha": 10.0}, (2, 3)),
    ("nuclr", NUCLR | {"learn_temperature": True}, (2, 3)),
    ("nuclr", NUCLR | {"temperature": 0.01, "zeta_lr": 1e-3}, (2, 3)),
    ("nuclr", BOTH, (2, 3)),
    ("nuclr", POPULARITY, (None, 3)),
    ("nuclr", NORMALIZER | {"zeta_lr": 0.02}, (2, None)),
    ("nuclr", BOTH | {"sides": "y"}, (2, None)),
    ("nuclr", BOTH | INDIVIDUAL | {"use_xi": False}, (2, 3)),
    ("nuclr", BOTH | {"learn_temperature": True, "use_xi": False}, (2, 3)),
    # likely false negatives are dropped view by view
    ("sogclr", SOGCLR | RELATIVE, (2, 3)),
    ("nuclr", NUCLR | MARGIN, (2, 3)),
    ("nuclr", NUCLR | MARGIN | INDIVIDUAL, (None, 2)),
    ("nuclr", NUCLR | MARGIN | STORED | {"learn_temperature": True}, (2, 3)),
    ("nuclr", BOTH | MARGIN, (2, None)),
    # a popularity per stored view
    *(("nuclr", NUCLR | STORED | options, (2, 3)) for options in STORED_OPTIONS),
    ("nuclr", NUCLR | {"y_views": 3}, (None, 3)),
    ("nuclr", NUCLR | {"y_views": 3, "zeta_momentum": 0.5}, (2, 3)),  # the views of x share theirs
    ("nuclr", NUCLR | {"x_views": 2, "learn_temperature": True}, (2, None)),
]
AGAINST_LOOPS = [*((*case, (None, None)) for case in ONE_VIEW), *SEVERAL_VIEWS]


@masked_in_few_ways
@pytest.mark.parametrize(("name", "options", "views"), AGAINST_LOOPS, ids=str)
def test_against_loops(name, options, views, mask) -> None:
    pair = run(name, mask, views, **options)
    tables = set(state_of(pair.objective))
    unused = {"x": "y", "y": "x"}.get(options.get("sides"))  # a side has no tables if its anchors are not in use
    assert not tables & {f"log_u_{unused}", f"tau_{unused}"}
    if options.get("zeta_velocity_init") == "gradient":
        visited = np.isfinite(pair.state["log_u_x"])
        assert (np.isnan(pair.state["zeta_velocity_y"]) == ~visited).all(), "rows without an update hold nan"
    assert not (options.get("popularity") == "network" and "zeta_y" in tables)
    assert not (options.get("normalizer") == "network" and "log_u_x" in tables)


def assert_same_results(one, two, what: str) -> None:
    """Assert that two (output, gradient of x, gradient of y) agree."""
    assert_close(one[0].loss.item(), two[0].loss.item(), f"value, {what}")
    assert_close(one[1], two[1], f"gradient of x, {what}")
    assert_close(one[2], two[2], f"gradient of y, {what}")


def assert_same_tables(one: dict, two: dict) -> None:
    assert one.keys() == two.keys()
    for key, table in one.items():
        np.testing.assert_allclose(table, two[key], rtol=0, atol=1e-12, err_msg=key)


# Temperatures


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


@pytest.mark.parametrize("name", ["sogclr", "nuclr"])
def test_a_fixed_temperature_gives_the_same_gradients_and_state(name) -> None:
    """The value differs: it includes rho tau, and for NUCLR xi and -log(n-1)."""
    fixed = make(name, num_samples=SAMPLES, temperature=0.125).double()
    learnt = make(name, num_samples=SAMPLES, temperature=0.125, learn_temperature=True).double()
    assert learnt.current_temperature == pytest.approx(0.125) and not list(fixed.parameters())
    learnt.log_scale.data.fill_(-math.log(0.125))
    assert_same_training(learnt, fixed, value=False)


@pytest.mark.parametrize("name", ["sogclr", "nuclr"])
@pytest.mark.parametrize(("outside", "bound"), [(5e-5, 0.001), (3.0, 1.0)])
def test_a_learnt_temperature_is_clamped(name, outside, bound) -> None:
    pair = Stateful(name, learn_temperature=True)
    pair.objective.log_scale.data.fill_(-math.log(outside))
    x, y, index = next(batches())
    step = pair.expected(x, y, index, (None, None))  # at the bound
    out, grad_x, _ = call(pair.objective, x, y, index)
    assert pair.objective.current_temperature == pytest.approx(bound, rel=1e-6)
    assert_close(out.loss.item(), step.value, "value")
    assert_close(grad_x, step.grad_x, "gradient of x")
    assert_close(pair.objective.log_scale.grad.item(), -bound * step.grad_tau, "gradient of log_scale")


# Averages, sides, views


@pytest.mark.parametrize("log_u", [-30.0, 30.0])
def test_proximal_averages_far_from_the_batch(log_u) -> None:
    """A tiny u has gamma near 0 and keeps its value; a huge one has gamma near 1 and is replaced."""
    x, y, index = next(batches())
    objective = make("sogclr", num_samples=SAMPLES, gamma_rule="proximal", temperature=0.1).double()
    fresh = make("sogclr", num_samples=SAMPLES, temperature=0.1).double()
    fresh(x, y, index)
    objective.log_u_x.fill_(log_u)
    objective(x, y, index)
    phi = fresh.log_u_x[index]
    # at the limit gamma = 1e-8; and (1-gamma) u = (n-1)/alpha for a huge u
    kept = torch.logaddexp(phi + math.log(1e-8), torch.full_like(phi, log_u))
    replaced = torch.logaddexp(phi, torch.full((BATCH,), math.log((SAMPLES - 1) / 4.0), dtype=torch.float64))
    assert_close(objective.log_u_x[index], kept if log_u < 0 else replaced, "log_u_x")


@stateful
def test_the_sides_add_up(name, options) -> None:
    both, x_only, y_only = (
        make(name, num_samples=SAMPLES, **options, sides=sides).double() for sides in ("both", "x", "y")
    )
    for batch in batches():
        expected, *expected_gradients = call(both, *batch)
        on_x, *x_gradients = call(x_only, *batch)
        on_y, *y_gradients = call(y_only, *batch)
        assert_close(on_x.loss.item() + on_y.loss.item(), expected.loss.item(), "value")
        for gradient, one, two in zip(expected_gradients, x_gradients, y_gradients, strict=True):
            assert_close(one + two, gradient, "gradient")
    assert_same_tables(state_of(both), state_of(x_only) | state_of(y_only))


@stateful
def test_exchanging_x_and_y_exchanges_the_sides(name, options) -> None:
    x_only, y_only = (make(name, num_samples=SAMPLES, **options, sides=sides).double() for sides in ("x", "y"))
    for x, y, index in batches(views=(2, None)):
        out, grad_y, grad_x = call(y_only, y, x, index)
        assert_same_results(call(x_only, x, y, index), (out, grad_x, grad_y), "exchanged")


@pytest.mark.parametrize("count", [1, 3])
@stateful
def test_identical_views_are_one_view(name, options, count) -> None:
    """The gradient of a sample is divided equally among its views."""
    assert_identical_views_are_one_view(name, options, count, {})


@pytest.mark.parametrize(
    "options", [NUCLR, NUCLR | {"use_xi": False, "zeta_momentum": 0.5}, NUCLR | INDIVIDUAL], ids=str
)
@pytest.mark.parametrize("stored", [{"x_views": 3, "y_views": 3}, {"y_views": 3}], ids=str)
def test_identical_stored_views_are_one_view(options, stored) -> None:
    assert_identical_views_are_one_view("nuclr", options, 3, stored)


def assert_identical_views_are_one_view(name, options, count, stored) -> None:
    flat, viewed = make(name, num_samples=SAMPLES, **options), make(name, num_samples=SAMPLES, **options, **stored)
    flat.double(), viewed.double()
    for x, y, index in batches():
        repeated_x, repeated_y = (side[:, None].expand(-1, count, -1).contiguous() for side in (x, y))
        out, grad_x, grad_y = call(viewed, repeated_x, repeated_y, index)
        for gradient in (grad_x, grad_y):
            assert_close(gradient, gradient[:, :1].expand_as(gradient), "gradients of identical views")
        assert_same_results(call(flat, x, y, index), (out, grad_x.sum(dim=1), grad_y.sum(dim=1)), "identical views")
    expected = {key: np.broadcast_to(t.T, state_of(viewed)[key].T.shape).T for key, t in state_of(flat).items()}
    assert_same_tables(expected, state_of(viewed))
