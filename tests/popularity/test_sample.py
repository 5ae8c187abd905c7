"""The estimate from a sample against the exact solution: how close it is, and whether it knows how close."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from nuclr import arrays
from nuclr.evaluation.ranks import rank_correlation
from nuclr.popularity import ConvergenceWarning, Result, solve
from nuclr.popularity import solver as solver_module
from nuclr.popularity.problem import make_problem
from nuclr.popularity.sample import Estimator
from nuclr.popularity.solver import Solver
from tests.popularity.reference import clustered


def estimate(x: Tensor, y: Tensor, temperature: float, seed: int = 0, size: int = 256, **weights: Tensor) -> Result:
    problem = make_problem(x, y, temperature=temperature, read_in_parts=True, **weights)
    return Estimator(Solver(tolerance=1e-3), size, seed)(problem)


def true_error(result: Result, exact: Result) -> float:
    """Return the root mean square error of zeta / tau, up to a constant."""
    return float((result.zeta - exact.zeta).std()) / result.temperature


def test_close_to_the_exact_solution():
    x, y = clustered(2000, 1800)
    exact = solve(x, y, temperature=0.5, tolerance=1e-3)
    result = solve(x, y, temperature=0.5, method="sample", sample=1024)
    assert result.method == "sample"
    assert rank_correlation(result.zeta, exact.zeta) > 0.9
    assert true_error(result, exact) / 2 < result.error < 2 * true_error(result, exact)
    assert abs(float(result.zeta.mean())) < 1e-5
    assert not result.converged


@pytest.mark.parametrize("temperature", [0.05, 0.1, 0.3])
def test_the_reported_error_is_within_a_factor_of_two(temperature: float):
    ratios = []
    for seed in range(4):
        x, y = clustered(1200, 1200, seed=seed)
        exact = solve(x, y, temperature=temperature, tolerance=1e-3)
        result = estimate(x, y, temperature, seed)
        ratios.append(math.log2(result.error / true_error(result, exact)))
    assert abs(sum(ratios) / len(ratios)) < 1, ratios


def test_everything_in_the_sample_gives_the_exact_solution():
    x, y = clustered(300, 400)
    exact = solve(x, y, temperature=0.05, tolerance=1e-4)
    result = solve(x, y, temperature=0.05, method="sample")
    assert result.converged
    assert true_error(result, exact) < 1e-2


def test_the_seed_decides():
    x, y = clustered(800, 800)
    first, again, other = (estimate(x, y, 0.05, seed) for seed in (1, 1, 2))
    assert torch.equal(first.zeta, again.zeta)
    assert first.error == again.error
    assert not torch.equal(first.zeta, other.zeta)


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_weights(temperature: float):
    x, y = clustered(1500, 1200)
    generator = torch.Generator().manual_seed(0)
    x_weight = torch.randint(0, 4, (1500,), generator=generator).double()
    y_weight = torch.rand(1200, generator=generator).double() + 0.1
    exact = solve(x, y, temperature=temperature, tolerance=1e-3, x_weight=x_weight, y_weight=y_weight)
    unweighted = solve(x, y, temperature=temperature, tolerance=1e-3)
    # The error is estimated from one draw of the noise, so in small problems it varies from seed to seed.
    results = [estimate(x, y, temperature, seed, x_weight=x_weight, y_weight=y_weight) for seed in range(4)]
    scaled = estimate(x, y, temperature, x_weight=3 * x_weight, y_weight=y_weight)
    errors = np.array([(result.error, true_error(result, exact)) for result in results])
    error, true = np.sqrt(np.square(errors).mean(axis=0))
    assert error / 2 < true < 2 * error
    assert true_error(results[0], exact) < true_error(results[0], unweighted)
    torch.testing.assert_close(scaled.zeta, results[0].zeta, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_extend_gives_zeta_of_the_same_candidates(temperature: float):
    x, y = clustered(1500, 1200)
    result = estimate(x, y, temperature)
    torch.testing.assert_close(result.extend(y[:200]), result.zeta[:200], atol=1e-4 * temperature, rtol=0)


def test_arrays_on_disk(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrays, "BLOCK", 100)
    features = clustered(1000, 900)
    on_disk = []
    for name, side in zip("xy", features, strict=True):
        np.save(tmp_path / f"{name}.npy", (3 * side).numpy().astype(np.float16))
        on_disk.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    options = {"temperature": 0.05, "normalize": True, "method": "sample", "sample": 256}
    result = solve(*on_disk, **options)
    assert np.shares_memory(result.problem.y.stored.numpy(), on_disk[1])
    in_memory = solve(*(torch.from_numpy(np.array(a)) for a in on_disk), **options)
    torch.testing.assert_close(result.zeta, in_memory.zeta)
    assert result.extend(features[1][:5]).shape == (5,)


def test_auto_estimates_above_a_number_of_scores_and_says_so(monkeypatch: pytest.MonkeyPatch):
    x, y = clustered(300, 300)
    assert solve(x, y, temperature=0.1).converged
    monkeypatch.setattr(solver_module, "EXACT_SCORES", 300 * 300 - 1)
    with pytest.warns(ConvergenceWarning, match="sample"):
        result = solve(x, y, temperature=0.1, sample=100)
    assert result.method == "sample" and not result.converged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert solve(scores=x @ y.T, temperature=0.1).converged
        assert solve(x, y, temperature=0.1, method="sparse").converged


def test_wrong_arguments():
    x, y = clustered(30, 30)
    with pytest.raises(ValueError, match="sample=1"):
        solve(x, y, temperature=0.1, method="sample", sample=1)
    with pytest.raises(ValueError, match=r"sample.*scores"):
        solve(scores=torch.eye(3), temperature=0.1, method="sample")
