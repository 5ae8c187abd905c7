"""Wrong input is refused with an error that names the argument and its value, and leaves the state unchanged.

Features without unit norm are in test_inputs.py.
"""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.objectives import entry, names
from tests.objectives.make import make

ALL = names()
STATEFUL = tuple(name for name in ALL if entry(name).needs_num_samples)
N = 10


def features(rows: int = 4, width: int = 3) -> torch.Tensor:
    return normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(0)), dim=1)


def assert_refused(objective, named: list[str], *arguments, error: type[Exception] = ValueError, **more) -> None:
    """Assert that a call raises, that the message has all of `named`, and that the state is unchanged."""
    with pytest.raises(error) as refused:
        objective(*arguments, **more)
    message = str(refused.value)
    assert all(part in message for part in named), message
    if hasattr(objective, "log_u_x"):
        assert objective.log_u_x.isneginf().all(), "refused input must not change the state"


@pytest.mark.parametrize(
    ("x", "y", "named"),
    [
        (features(4), features(5), ["x is (4, 3)", "y is (5, 3)"]),
        (features(4), features(4, 2), ["x is (4, 3)", "y is (4, 2)"]),
        (features(4)[0], features(4)[0], ["x is (3,)"]),
        (features(1), features(1), ["1 pair"]),
        (features(4).long(), features(4).long(), ["x is torch.int64"]),
        (features(4), features(4).double(), ["x is torch.float32", "y is torch.float64"]),
        (torch.ones(4, 3, device="meta"), features(4), ["meta", "cpu"]),
        (features(4), torch.ones(4, 2, 2, 3), ["(4, 2, 2, 3)"]),  # views in two dimensions
        (torch.ones(4, 0, 3), features(4), ["(4, 0, 3)"]),  # no views
        (features(4), torch.ones(5, 2, 3), ["(5, 2, 3)"]),  # views of another number of samples
        (torch.ones(4, 2, 2), features(4), ["(4, 2, 2)"]),  # another width
    ],
)
@pytest.mark.parametrize("name", ALL)
def test_shapes(name, x, y, named) -> None:
    assert_refused(make(name, num_samples=N), named, x, y, torch.arange(len(x)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": [[1.0, 0.0]]}, ["x ", "list"]),
        ({"y": None}, ["y ", "NoneType"]),
        ({"x": np.array([["a"]])}, ["x "]),
        ({"index": 3}, ["index", "3"]),
        ({"index": "all"}, ["index", "'all'"]),
        ({"index": ["a"] * 4}, ["index"]),
        ({"y_id": {1, 2}}, ["y_id", "set"]),
    ],
)
@pytest.mark.parametrize("name", ["clip", "nuclr"])
def test_types(name, changes, named) -> None:
    arguments = {"x": features(), "y": features(), "index": [0, 1, 2, 3]} | changes
    assert_refused(make(name, num_samples=N), named, error=TypeError, **arguments)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("side", ["x", "y"])
def test_values_of_views(name: str, side: str) -> None:
    """One view is nan, or no view has unit norm."""
    views = features(8).reshape(4, 2, 3)
    with_nan = views.clone()
    with_nan[2, 1] = math.nan
    for bad, named in ((with_nan, "nan"), (2 * views, "2")):
        both = {"x": views, "y": views} | {side: bad}
        assert_refused(make(name, num_samples=N), [f"{side} ", named], **both, index=torch.arange(4))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["x", "y"])
@pytest.mark.parametrize("rows", [4, 1500])  # one tile, and several
@pytest.mark.parametrize("alone", [False, True])
def test_features_that_are_not_finite(name: str, value: float, side: str, rows: int, alone: bool) -> None:
    both = {"x": features(rows), "y": features(rows)}
    both[side][rows - 2, 1] = value
    ids = torch.zeros(rows, dtype=torch.int64) if alone else None
    named = [f"{side} ", "nan or inf", f"row {rows - 2} "]
    assert_refused(make(name, num_samples=rows), named, **both, index=torch.arange(rows), x_id=ids)


@pytest.mark.parametrize("name", ALL)
def test_features_too_large(name: str) -> None:
    large = features() * 1e20
    assert_refused(make(name, num_samples=N), ["x ", "1e+20"], large, large, torch.arange(4))


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize(
    ("index", "named"),
    [
        ([0, 1, 2, 10], ["[0, 10)", "holds 10 outside"]),
        ([0, -1, 2, 3], ["[0, 10)", "holds -1"]),
        ([0, 1, 1, 3], ["holds 1 more than once"]),
        ([0, 1, 2], ["(3,)"]),
        ([[0], [1], [2], [3]], ["(4, 1)"]),
        ([0.0, 1.0, 2.0, 3.0], ["integers", "float32"]),
        (None, ["None", "eval()"]),
    ],
)
def test_index(name: str, index: list | None, named: list[str]) -> None:
    index = None if index is None else torch.tensor(index)
    assert_refused(make(name, num_samples=N), ["index", *named], features(), features(), index)


@pytest.mark.parametrize("name", ["clip", "nuclr"])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (4, 0), (4, 2, 1), ()])
def test_ids(name: str, shape: tuple[int, ...]) -> None:
    ids = torch.zeros(shape, dtype=torch.int64)
    named = ["y_id", "4", str(shape)]
    assert_refused(make(name, num_samples=N), named, features(), features(), torch.arange(4), y_id=ids)
    assert_refused(make(name, num_samples=N), ["x_id", "bool"], features(), features(), torch.arange(4), [True] * 4)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("temperature", value) for value in (0.0, -0.1, math.nan, math.inf)),
        *(("gamma", value) for value in (0.0, 1.1, -1.0, math.nan)),
    ],
)
@pytest.mark.parametrize("name", ALL)
def test_values_out_of_range(name: str, option: str, value: float) -> None:
    """In the constructor, and later, as a schedule sets them."""
    if option == "gamma" and name not in STATEFUL:
        return
    objective = make(name, num_samples=N)
    setattr(objective, option, value)
    assert_refused(objective, [option, str(value)], features(), features(), torch.arange(4))
    with pytest.raises(ValueError, match=option):
        make(name, num_samples=N, **{option: value})


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("nuclr", {"zeta_estimator": "exact"}, ["zeta_estimator", "unbiased, paper", "'exact'"]),
        ("nuclr", {"xi_rule": "max"}, ["'xi_rule'", "xi_init"]),
        ("nuclr", {"zeta_lr": -1.0}, ["zeta_lr", "[0, inf)", "-1.0"]),
        ("nuclr", {"zeta_momentum": 1.0}, ["zeta_momentum", "[0, 1)", "1.0"]),
        ("nuclr", {"zeta_init": math.inf}, ["zeta_init", "inf"]),
        ("nuclr", {"popularity": "mlp"}, ["popularity", "table, network", "'mlp'"]),
        ("nuclr", {"normalizer": "none"}, ["normalizer", "'none'"]),
        ("nuclr", {"sides": "left"}, ["sides", "both", "'left'"]),
        ("nuclr", {"individual_temperature": True, "learn_temperature": True}, ["temperatures.individual", "learnt"]),
        ("nuclr", {"individual_temperature": True, "tau_beta": 1.5}, ["temperatures.tau_beta", "1.5"]),
        ("nuclr", {"temperatures": 3}, ["temperatures", "rho", "3"]),
        ("nuclr", {"temperatures": {"roh": 3}}, ["temperatures", "'roh'", "rho"]),
        ("nuclr-authors", {"zeta_estimator": "exact"}, ["zeta_estimator", "reference, unbiased, paper", "'exact'"]),
        ("nuclr-authors", {"xi_rule": "mean"}, ["xi_rule", "norm, max", "'mean'"]),
        ("nuclr-authors", {"xi_update": "never"}, ["xi_update", "step, epoch", "'never'"]),
        ("nuclr-authors", {"zeta_velocity_init": "random"}, ["zeta_velocity_init", "'random'"]),
        ("isogclr", {"tau_min": 0.5, "tau_max": 0.1}, ["temperatures.tau_min", "0.5"]),
        ("isogclr", {"learn_temperature": True}, ["temperatures.learnt"]),
        ("clip", {"false_negative_margin": -0.1}, ["false_negative_margin", "[0, inf)", "-0.1"]),
        ("clip", {"margin_strategy": "half"}, ["margin_strategy", "absolute, relative", "'half'"]),
        ("nuclr", {"false_negative_margin": -0.1}, ["false_negative_margin", "[0, inf)", "-0.1"]),
        ("dcl", {"tau_plus": 1.0}, ["tau_plus", "[0, 1)", "1.0"]),
        ("sogclr", {"gamma_rule": "adaptive"}, ["average.gamma_rule", "constant, proximal", "'adaptive'"]),
        ("sogclr", {"gamma_rule": "proximal", "alpha": 0.0}, ["average.alpha", "0.0"]),
        ("sogclr", {"num_samples": 1}, ["num_samples", "1"]),
        ("sogclr", {"num_samples": None}, ["num_samples"]),
        ("sogclr", {"num_samples": [1, 2, 3]}, ["num_samples", "[1, 2, 3]"]),
        ("sogclr", {"temperature": "0.05"}, ["temperature", "'0.05'"]),
        ("clip", {"false_negative_margin": "0.1"}, ["false_negative_margin", "'0.1'"]),
    ],
)
def test_options(name: str, options: dict, named: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        make(name, **({"num_samples": N} | options))
    assert all(part in str(refused.value) for part in named), refused.value
