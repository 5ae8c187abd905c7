"""Arguments of `solve`: numpy arrays, norms, and messages that name what is wrong."""

import math

import numpy as np
import pytest
import torch

from nuclr.popularity import Solver, solve
from nuclr.popularity.problem import make_problem
from tests.popularity.reference import unit

X, Y = unit(10, 4, seed=0), unit(12, 4, seed=1)
S = X @ Y.T


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"x": X, "y": Y, "temperature": 0.0}, ["temperature=0.0"]),
        ({"x": X, "y": Y, "temperature": math.nan}, ["temperature=nan"]),
        ({"x": X, "y": Y, "scores": S, "temperature": 1.0}, ["x and y and scores"]),
        ({"x": X, "temperature": 1.0}, ["got x"]),
        ({"temperature": 1.0}, ["neither features nor scores"]),
        ({"x": X, "y": Y[:, :3], "temperature": 1.0}, ["y has 3 columns"]),
        ({"x": X[:1], "y": Y, "temperature": 1.0}, ["1 anchors and 12 candidates"]),
        ({"scores": S[:0], "temperature": 1.0}, ["0 anchors"]),
        ({"scores": S - S * 1e400, "temperature": 1.0}, ["scores[0, 0]="]),
        ({"x": X, "y": Y, "temperature": "warm"}, ["temperature='warm'"]),
        ({"x": 2 * X, "y": Y, "temperature": 1.0}, ["x: row 0 has norm 2", "normalize=True"]),
        ({"x": X, "y": 0 * Y, "temperature": 1.0, "normalize": True}, ["y: row 0 is all zeros"]),
        ({"scores": S, "temperature": 1.0, "method": "simplex"}, ["method='simplex'", "sinkhorn"]),
        ({"scores": S, "temperature": 1.0, "tolerance": 0.0}, ["tolerance=0.0"]),
        ({"scores": S, "temperature": 1.0, "max_iterations": 0}, ["max_iterations=0"]),
        ({"scores": S, "temperature": 1.0, "init": torch.zeros(10)}, ["init", "(10,)", "(12,)"]),
        ({"scores": S, "temperature": 1.0, "init": torch.full((12,), math.nan)}, ["init"]),
        ({"scores": S, "temperature": 1.0, "x_weight": torch.ones(12)}, ["x_weight", "(12,)", "(10,)"]),
        ({"scores": S, "temperature": 1.0, "y_weight": -torch.ones(12)}, ["y_weight", "-1"]),
        ({"scores": S, "temperature": 1.0, "y_weight": torch.zeros(12)}, ["y_weight"]),
    ],
)
def test_wrong_input_is_refused_by_name(arguments: dict, names: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        solve(**arguments)
    for name in names:
        assert name in str(refusal.value)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_weights_and_starts_may_be_arrays_and_lists(dtype: type) -> None:
    x, y = X.numpy().astype(dtype), Y.numpy().astype(dtype)
    arrays = solve(x, y, temperature=0.125, x_weight=np.arange(1, 11), y_weight=list(range(1, 13)), init=np.zeros(12))
    weights = {"x_weight": torch.arange(1, 11), "y_weight": torch.arange(1, 13)}
    tensors = solve(torch.from_numpy(x), torch.from_numpy(y), temperature=torch.tensor(0.125), **weights)
    assert torch.equal(arrays.zeta, tensors.zeta)


@pytest.mark.parametrize("extreme", [1.0, 1e180, 1e-180])
def test_normalize_scales_features_and_those_of_extend(extreme: float) -> None:
    scale = extreme * torch.linspace(0.1, 7, 12, dtype=torch.float64)[:, None]
    plain = solve(X, Y, temperature=0.1, tolerance=1e-10)
    scaled = solve(5 * extreme * X, scale * Y, temperature=0.1, tolerance=1e-10, normalize=True)
    torch.testing.assert_close(scaled.zeta, plain.zeta, atol=1e-9, rtol=0)
    torch.testing.assert_close(scaled.extend(3 * extreme * Y[:4]), plain.extend(Y[:4]), atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match=r"y_new: row 0 .*normalize=True"):
        plain.extend(3 * Y[:4])


def test_a_problem_may_have_features_of_any_norm() -> None:
    result = Solver(tolerance=1e-10)(make_problem(2 * X, 3 * Y, temperature=0.6, norms="any"))
    torch.testing.assert_close(result.zeta, 6 * solve(X, Y, temperature=0.1, tolerance=1e-10).zeta, atol=1e-8, rtol=0)
    assert result.extend(100 * Y[:2]).isfinite().all()
    with pytest.raises(ValueError, match="norms='free'"):
        make_problem(X, Y, temperature=0.1, norms="free")
