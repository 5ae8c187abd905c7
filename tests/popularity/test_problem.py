"""Arguments of `solve`: numpy arrays, norms, and messages that name what is wrong."""

import math

import numpy as np
import pytest
import torch

from nuclr.popularity import Solver, solve
from nuclr.popularity.problem import as_tensor, make_problem
from tests.popularity.reference import unit

X, Y = unit(10, 4, seed=0), unit(12, 4, seed=1)
S = X @ Y.T


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"x": X, "y": Y, "temperature": 0.0}, ["temperature=0.0", "above 0"]),
        ({"x": X, "y": Y, "temperature": -1.0}, ["temperature=-1.0"]),
        ({"x": X, "y": Y, "temperature": math.nan}, ["temperature=nan"]),
        ({"x": X, "y": Y, "temperature": math.inf}, ["temperature=inf"]),
        ({"x": X, "y": Y, "scores": S, "temperature": 1.0}, ["x and y and scores", "scores alone"]),
        ({"x": X, "temperature": 1.0}, ["got x;", "give x and y"]),
        ({"temperature": 1.0}, ["neither features nor scores"]),
        ({"x": X, "y": Y[:, :3], "temperature": 1.0}, ["x has 4 columns and y 3"]),
        ({"x": X[:1], "y": Y, "temperature": 1.0}, ["1 anchors and 12 candidates", "at least 2"]),
        ({"x": X, "y": Y[:1], "temperature": 1.0}, ["10 anchors and 1 candidates"]),
        ({"scores": S[:0], "temperature": 1.0}, ["0 anchors"]),
        ({"x": X[0], "y": Y, "temperature": 1.0}, ["x is float64 of shape (4,)", "two dimensions"]),
        ({"x": X.int(), "y": Y, "temperature": 1.0}, ["x is int32", "floating-point"]),
        ({"x": X.tolist(), "y": Y, "temperature": 1.0}, ["x is list", "torch tensor or a numpy array"]),
        ({"x": X * math.nan, "y": Y, "temperature": 1.0}, ["x[0, 0]=nan", "finite"]),
        ({"x": X, "y": Y.masked_fill(torch.eye(12, 4) > 0, math.inf), "temperature": 1.0}, ["y[0, 0]=inf"]),
        ({"scores": S - S * 1e400, "temperature": 1.0}, ["scores[0, 0]="]),
        ({"x": X, "y": Y, "temperature": "warm"}, ["temperature='warm'"]),
        ({"x": 2 * X, "y": Y, "temperature": 1.0}, ["x: row 0 has norm 2", "normalize(x, dim=1)", "normalize=True"]),
        ({"x": X, "y": 1.02 * Y, "temperature": 1.0}, ["y: row 0 has norm 1.02", "12 of 12 rows"]),
        ({"x": X, "y": 0 * Y, "temperature": 1.0, "normalize": True}, ["y: row 0 is all zeros"]),
        ({"x": X.numpy().astype(str), "y": Y, "temperature": 1.0}, ["x is a numpy array of <U"]),
        ({"scores": S, "temperature": 1.0, "method": "simplex"}, ["method='simplex'", "sinkhorn"]),
        ({"scores": S, "temperature": 1.0, "tolerance": 0.0}, ["tolerance=0.0"]),
        ({"scores": S, "temperature": 1.0, "tolerance": math.nan}, ["tolerance=nan"]),
        ({"scores": S, "temperature": 1.0, "max_iterations": 0}, ["max_iterations=0"]),
        ({"scores": S, "temperature": 1.0, "init": torch.zeros(10)}, ["init", "(10,)", "(12,)"]),
        ({"scores": S, "temperature": 1.0, "init": torch.full((12,), math.nan)}, ["init holds NaN"]),
        ({"scores": S, "temperature": 1.0, "x_weight": torch.ones(12)}, ["x_weight", "(12,)", "(10,)"]),
        ({"scores": S, "temperature": 1.0, "y_weight": -torch.ones(12)}, ["y_weight", "-1", ">= 0"]),
        ({"scores": S, "temperature": 1.0, "y_weight": torch.zeros(12)}, ["y_weight", "not all 0"]),
    ],
)
def test_wrong_input_is_refused_by_name(arguments: dict, names: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        solve(**arguments)
    for name in names:
        assert name in str(refusal.value)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_arrays_give_the_same_result(dtype: type) -> None:
    x, y = X.numpy().astype(dtype), Y.numpy().astype(dtype)
    arrays = solve(x, y, temperature=0.1, x_weight=np.arange(1, 11), y_weight=list(range(1, 13)), init=np.zeros(12))
    weights = {"x_weight": torch.arange(1, 11), "y_weight": torch.arange(1, 13)}
    tensors = solve(torch.from_numpy(x), torch.from_numpy(y), temperature=0.1, **weights)
    assert isinstance(arrays.zeta, torch.Tensor)
    assert torch.equal(arrays.zeta, tensors.zeta)
    assert torch.equal(arrays.extend(y[:3]), tensors.extend(torch.from_numpy(y[:3])))
    scores = S.numpy().astype(dtype)
    assert torch.equal(
        solve(scores=scores, temperature=0.1).zeta, solve(scores=as_tensor("", scores), temperature=0.1).zeta
    )


def test_numpy_arrays_of_any_layout_are_read() -> None:
    array = np.arange(12.0).reshape(3, 4)
    frozen = array.copy()
    frozen.flags.writeable = False
    for other in (array[::-1, ::2], array.T, array.astype(">f8"), frozen):
        assert np.array_equal(as_tensor("x", other).numpy(), other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_to_half_precision_passes_as_unit_norm(dtype: torch.dtype) -> None:
    x, y = (unit(50, 512, seed).to(dtype) for seed in (0, 1))
    assert solve(x, y, temperature=0.1).converged


def test_normalize_scales_features_and_those_of_extend() -> None:
    scale = torch.linspace(0.1, 7, 12, dtype=torch.float64)[:, None]
    plain = solve(X, Y, temperature=0.1, tolerance=1e-10)
    scaled = solve(5 * X, scale * Y, temperature=0.1, tolerance=1e-10, normalize=True)
    torch.testing.assert_close(scaled.zeta, plain.zeta, atol=1e-9, rtol=0)
    torch.testing.assert_close(scaled.extend(3 * Y[:4]), plain.extend(Y[:4]), atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match=r"y_new: row 0 has norm 3 .*normalize=True"):
        plain.extend(3 * Y[:4])


def test_a_problem_may_have_features_of_any_norm() -> None:
    result = Solver(tolerance=1e-10)(make_problem(2 * X, 3 * Y, temperature=0.6, norms="any"))
    torch.testing.assert_close(result.zeta, 6 * solve(X, Y, temperature=0.1, tolerance=1e-10).zeta, atol=1e-8, rtol=0)
    assert result.extend(100 * Y[:2]).isfinite().all()
    with pytest.raises(ValueError, match="norms='free'; allowed: 'unit', 'normalize', 'any'"):
        make_problem(X, Y, temperature=0.1, norms="free")


def test_repr_is_one_line() -> None:
    problem = make_problem(X, Y, temperature=0.1)
    assert repr(problem) == "Problem(features of 4 dimensions, anchors=10, candidates=12, temperature=0.1, float64)"
    line = repr(Solver()(problem))
    assert line.startswith("Result(candidates=12, anchors=10, temperature=0.1, residual=")
    assert "\n" not in line


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_normalize_scales_features_of_extreme_norm(scale: float) -> None:
    x, y = (torch.nn.functional.normalize(torch.randn(30, 8), dim=1) for _ in range(2))
    expected = solve(x=x, y=y, temperature=0.1)
    result = solve(x=x * scale, y=y * scale, temperature=0.1, normalize=True)
    assert expected.zeta.std() > 0.01
    torch.testing.assert_close(result.zeta, expected.zeta, rtol=1e-3, atol=1e-4)
