"""Several views per sample: against loops, and what they reduce to."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import reference
from tests.objectives.comparison import (
    MASKS,
    SAMPLES,
    assert_close,
    batches,
    call,
    masked_in_few_ways,
    run,
    state_of,
)
from tests.objectives.extensions import INDIVIDUAL, NUCLR
from tests.objectives.make import make

STATEFUL = [
    ("sogclr", {"temperature": 0.1}),
    ("isogclr", {"temperature": 0.03}),
    ("nuclr", NUCLR),
    ("nuclr", NUCLR | {"zeta_estimator": "unbiased", "use_xi": False}),
    ("nuclr", NUCLR | INDIVIDUAL),
]
stateful = pytest.mark.parametrize(("name", "options"), STATEFUL, ids=str)


@masked_in_few_ways
@pytest.mark.parametrize("views", [(2, 3), (None, 2)], ids=str)
@stateful
def test_against_loops(name, options, views, mask) -> None:
    run(name, mask, views, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"zeta_estimator": "paper", "zeta_init": -0.05, "gamma": 1.0},
        {"zeta_momentum": 0.9, "sides": "x"},
        {"gamma_rule": "proximal", "alpha": 10.0, **INDIVIDUAL},
        {"learn_temperature": True, "zeta_estimator": "unbiased"},
        {"temperature": 0.01, "zeta_lr": 1e-3},
    ],
    ids=str,
)
def test_combined_with_other_options(options) -> None:
    run("nuclr", MASKS["both"], (2, 3), **(NUCLR | options))


def assert_same_results(one, two, what: str) -> None:
    """Assert that two (output, gradient of x, gradient of y) agree."""
    assert_close(one[0].loss.item(), two[0].loss.item(), f"value, {what}")
    assert_close(one[1], two[1], f"gradient of x, {what}")
    assert_close(one[2], two[2], f"gradient of y, {what}")


def assert_same_tables(one, two) -> None:
    assert state_of(one).keys() == state_of(two).keys()
    for key, table in state_of(one).items():
        np.testing.assert_allclose(table, state_of(two)[key], rtol=0, atol=1e-12, err_msg=key)


@stateful
def test_one_view_is_the_usual_form(name, options) -> None:
    flat, viewed = (make(name, num_samples=SAMPLES, **options).double() for _ in range(2))
    for x, y, index in batches():
        out, grad_x, grad_y = call(viewed, x[:, None], y[:, None], index)
        assert grad_x.shape == x[:, None].shape
        assert_same_results(call(flat, x, y, index), (out, grad_x[:, 0], grad_y[:, 0]), "one view")
    assert_same_tables(flat, viewed)


@stateful
def test_identical_views_are_one_view(name, options) -> None:
    """The gradient of a sample is divided equally among its views."""
    flat, viewed = (make(name, num_samples=SAMPLES, **options).double() for _ in range(2))
    for x, y, index in batches():
        repeated_x, repeated_y = (side[:, None].expand(-1, 3, -1).contiguous() for side in (x, y))
        out, grad_x, grad_y = call(viewed, repeated_x, repeated_y, index)
        for gradient in (grad_x, grad_y):
            assert_close(gradient, gradient[:, :1].expand_as(gradient), "gradients of identical views")
        assert_same_results(call(flat, x, y, index), (out, grad_x.sum(dim=1), grad_y.sum(dim=1)), "identical views")
    assert_same_tables(flat, viewed)


# ---------------------------------------------------------------------------------------------------------------------
# Objectives without state: the mean over pairs of views
# ---------------------------------------------------------------------------------------------------------------------


def loops_of(name: str, x: Tensor, y: Tensor, parameters: dict[str, Tensor], mask) -> Tensor:
    if name == "siglip":
        return reference.siglip(x, y, parameters["log_scale"], parameters["bias"], *mask)
    if name == "clip learnt":
        return reference.clip_learnable(x, y, parameters["log_scale"], *mask)
    return getattr(reference, name)(x, y, temperature=0.2, x_id=mask[0], y_id=mask[1])


@masked_in_few_ways
@pytest.mark.parametrize("views", [(2, 3), (3, None)], ids=str)
@pytest.mark.parametrize("name", ["clip", "clip learnt", "siglip", "dcl", "cyclip"])
def test_stateless_objectives_average_over_pairs_of_views(name, views, mask) -> None:
    options = {"learn_temperature": True} if name == "clip learnt" else {}
    objective = make(name.split()[0], num_samples=SAMPLES, temperature=0.2, **options).double()
    for x, y, index in batches(steps=1, views=views):
        out, grad_x, grad_y = call(objective, x, y, index, mask)
        leaf_x, leaf_y = x.clone().requires_grad_(), y.clone().requires_grad_()
        views_x = leaf_x.unbind(1) if views[0] else [leaf_x]
        views_y = leaf_y.unbind(1) if views[1] else [leaf_y]
        parameters = {key: p.detach().clone().requires_grad_() for key, p in objective.named_parameters()}
        losses = [loops_of(name, a, b, parameters, mask) for a, b in itertools.product(views_x, views_y)]
        value = torch.stack(losses).mean()
        value.backward()
        assert_close(out.loss.item(), value.item(), "value")
        assert_close(grad_x, leaf_x.grad, "gradient of x")
        assert_close(grad_y, leaf_y.grad, "gradient of y")
        for key, parameter in objective.named_parameters():
            assert_close(parameter.grad, parameters[key].grad, f"gradient of {key}")


@pytest.mark.parametrize("name", ["clip", "siglip", "dcl", "cyclip"])
def test_stateless_metrics_are_averaged_over_pairs_of_views(name) -> None:
    objective = make(name, num_samples=SAMPLES).double()
    x, y, index = next(batches(views=(2, 3)))
    metrics = objective(x, y, index).metrics
    single = [objective(a, b, index).metrics for a, b in itertools.product(x.unbind(1), y.unbind(1))]
    assert metrics.keys() == single[0].keys()
    for key, value in metrics.items():
        assert_close(float(value), np.mean([float(one[key]) for one in single]), key)
