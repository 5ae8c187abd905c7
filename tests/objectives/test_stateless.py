"""The objectives without state against float64 loops, with one view and as the mean over pairs of views."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import reference
from tests.objectives.comparison import SAMPLES, Views, assert_close, batches, call, masked
from tests.objectives.make import make

CASES = [
    *(("clip", {"temperature": tau}) for tau in (0.01, 0.1, 1.0)),
    *(("clip", {"temperature": tau, "learn_temperature": True}) for tau in (0.03, 0.1)),
    ("siglip", {}),
    ("siglip", {"temperature": 0.3, "bias": -1.0}),
    ("siglip", {"temperature": 0.07, "learn_temperature": False}),
    # With the last options, debiased sums are negative, below the lower bound, and above it.
    *(("dcl", {"temperature": tau, "tau_plus": share}) for tau, share in ((0.1, 0.1), (1.0, 0.01), (1.0, 0.5))),
    *(("cyclip", {"temperature": tau}) for tau in (0.03, 0.5)),
    *((name, {"temperature": 0.1, "false_negative_margin": 0.02}) for name in ("clip", "siglip", "dcl", "cyclip")),
    ("dcl", {"temperature": 0.1, "false_negative_margin": 0.3, "margin_strategy": "relative"}),
    ("siglip", {"false_negative_margin": 0.3, "margin_strategy": "relative"}),
]
objectives = pytest.mark.parametrize(("name", "options"), CASES, ids=str)


def loops(name: str, options: dict, x: Tensor, y: Tensor, parameters: dict[str, Tensor], mask) -> Tensor:
    if name == "siglip":
        fixed = torch.tensor(-math.log(options.get("temperature", 0.1)), dtype=torch.float64)
        margin = {key: value for key, value in options.items() if "margin" in key}
        return reference.siglip(x, y, parameters.get("log_scale", fixed), parameters["bias"], *mask, **margin)
    if "learn_temperature" in options:
        return reference.clip_learnable(x, y, parameters["log_scale"], *mask)
    return getattr(reference, name)(x, y, x_id=mask[0], y_id=mask[1], **options)


def check(objective, name: str, options: dict, mask, views: Views, steps: int) -> None:
    """Compare value and gradients with the loops, and train the parameters."""
    for x, y, index in batches(steps=steps, views=views):
        out, grad_x, grad_y = call(objective, x, y, index, mask)
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        parameters = {key: p.detach().clone().requires_grad_() for key, p in objective.named_parameters()}
        views_x = x.unbind(1) if views[0] else [x]
        views_y = y.unbind(1) if views[1] else [y]
        values = [loops(name, options, a, b, parameters, mask) for a, b in itertools.product(views_x, views_y)]
        value = torch.stack(values).mean()
        value.backward()
        assert out.loss.dtype == torch.float64
        assert_close(out.loss.item(), value.item(), "value")
        assert_close(grad_x, x.grad, "gradient of x")
        assert_close(grad_y, y.grad, "gradient of y")
        for key, parameter in objective.named_parameters():
            assert_close(parameter.grad, parameters[key].grad, f"gradient of {key}")
            parameter.data -= 0.05 * parameter.grad


@masked
@objectives
def test_against_loops(name, options, mask) -> None:
    objective = make(name, num_samples=SAMPLES, **options).double()
    start = {key: parameter.item() for key, parameter in objective.named_parameters()}
    if start:
        tau = options.get("temperature", 0.1)
        expected = {"log_scale": -math.log(tau)} if options.get("learn_temperature", True) else {}
        expected |= {"bias": options.get("bias", -10.0)} if name == "siglip" else {}
        assert start == pytest.approx(expected)
    check(objective, name, options, mask, (None, None), steps=5)
    for views in ((2, 3), (3, None)):
        check(objective, name, options, mask, views, steps=1)


def test_clip_scale_stops_at_100() -> None:
    learnt = make("clip", temperature=0.05, learn_temperature=True).double()
    fixed = make("clip", temperature=0.01).double()
    learnt.log_scale.data.fill_(math.log(400.0))
    for batch in batches():
        one, two = call(learnt, *batch), call(fixed, *batch)
        assert_close(one[0].loss.item(), two[0].loss.item(), "value")
        assert_close(one[1], two[1], "gradient of x")


@pytest.mark.parametrize("name", ["clip", "siglip", "dcl", "cyclip"])
def test_metrics_are_averaged_over_pairs_of_views(name) -> None:
    objective = make(name, num_samples=SAMPLES).double()
    x, y, index = next(batches(views=(2, 3)))
    metrics = objective(x, y, index).metrics
    single = [objective(a, b, index).metrics for a, b in itertools.product(x.unbind(1), y.unbind(1))]
    assert metrics.keys() == single[0].keys()
    for key, value in metrics.items():
        assert_close(float(value), np.mean([float(one[key]) for one in single]), key)
