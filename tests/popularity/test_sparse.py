"""The sparse method against the exact solver: how close it is, and whether it knows how close."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nuclr import arrays
from nuclr.evaluation.ranks import rank_correlation
from nuclr.popularity import ConvergenceWarning, Result, SparseOptions, solve
from nuclr.popularity import solver as solver_module
from tests.popularity.reference import unit

SMALL = SparseOptions(sample=256, neighbors=128)


def clustered(n_x: int, n_y: int, d: int = 24, clusters: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return float32 features in clusters of unequal sizes, with the same centers on both sides."""
    generator = torch.Generator().manual_seed(seed)
    centers = unit(clusters, d, seed).float()
    sizes = torch.arange(1.0, clusters + 1)

    def side(n: int) -> Tensor:
        members = torch.multinomial(sizes, n, replacement=True, generator=generator)
        noise = torch.randn(n, d, generator=generator) / math.sqrt(d)
        return torch.nn.functional.normalize(centers[members] + 0.8 * noise, dim=1)

    return side(n_x), side(n_y)


def sparse(x: Tensor, y: Tensor, seed: int = 0, **options: object) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return solve(x, y, method="sparse", sparse=replace(SMALL, seed=seed), **options)


def true_error(result: Result, exact: Result) -> float:
    """Return the root mean square error of zeta / tau, up to a constant."""
    return float((result.zeta - exact.zeta).std()) / result.temperature


@pytest.mark.parametrize(
    ("temperature", "method"),
    [(0.03, "near field"), (0.05, "near field"), (0.1, "near field"), (0.5, "sample")],
)
def test_close_to_the_exact_solution(temperature: float, method: str):
    x, y = clustered(2000, 1800)
    exact = solve(x, y, temperature=temperature, tolerance=1e-3)
    result = solve(x, y, temperature=temperature, method="sparse", sparse=SparseOptions(sample=1024, neighbors=200))
    assert result.method == f"sparse ({method})"
    assert result.converged
    assert rank_correlation(result.zeta, exact.zeta) > 0.99
    assert abs(float(result.zeta.mean())) < 1e-5


@pytest.mark.parametrize("temperature", [0.05, 0.1, 0.3])
def test_the_reported_error_is_within_a_factor_of_two(temperature: float):
    ratios = []
    for seed in range(4):
        x, y = clustered(1200, 1200, seed=seed)
        exact = solve(x, y, temperature=temperature, tolerance=1e-3)
        result = sparse(x, y, temperature=temperature, seed=seed)
        ratios.append(math.log2(result.error / true_error(result, exact)))
    assert abs(sum(ratios) / len(ratios)) < 1, ratios


def test_a_poor_estimate_is_not_called_converged():
    x, y = clustered(1500, 1500)
    exact = solve(x, y, temperature=0.02, tolerance=1e-3)
    with pytest.warns(ConvergenceWarning, match=r"sample.*neighbors"):
        result = solve(x, y, temperature=0.02, method="sparse", sparse=SparseOptions(sample=64, neighbors=2))
    assert not result.converged
    assert true_error(result, exact) > 0.1
    assert result.error > true_error(result, exact) / 2


def test_everything_in_the_sample_gives_the_exact_solution():
    x, y = clustered(300, 400)
    exact = solve(x, y, temperature=0.05, tolerance=1e-4)
    result = solve(x, y, temperature=0.05, method="sparse")
    assert result.converged
    assert result.error < 1e-3
    assert true_error(result, exact) < 1e-2


def test_the_same_seed_gives_the_same_result():
    x, y = clustered(800, 800)
    first, again, other = (sparse(x, y, temperature=0.05, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.zeta, again.zeta)
    assert first.error == again.error
    assert not torch.equal(first.zeta, other.zeta)


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_weights(temperature: float):
    x, y = clustered(1500, 1200)
    generator = torch.Generator().manual_seed(0)
    weights = {
        "x_weight": torch.randint(0, 4, (1500,), generator=generator).double(),
        "y_weight": torch.rand(1200, generator=generator).double() + 0.1,
    }
    exact = solve(x, y, temperature=temperature, tolerance=1e-3, **weights)
    unweighted = solve(x, y, temperature=temperature, tolerance=1e-3)
    # The error is estimated from one draw of the noise, so in small problems it varies from seed to seed.
    results = [sparse(x, y, temperature=temperature, seed=seed, **weights) for seed in range(4)]
    result = results[0]
    scaled = sparse(x, y, temperature=temperature, x_weight=3 * weights["x_weight"], y_weight=weights["y_weight"])
    error, true = (
        np.mean(np.square(e)) ** 0.5 for e in zip(*((r.error, true_error(r, exact)) for r in results), strict=True)
    )
    assert error / 2 < true < 2 * error
    assert true_error(result, exact) < true_error(result, unweighted)
    torch.testing.assert_close(scaled.zeta, result.zeta, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_extend_gives_zeta_of_the_same_candidates(temperature: float):
    x, y = clustered(1500, 1200)
    result = sparse(x, y, temperature=temperature)
    extended = result.extend(y[:200])
    assert float((extended - result.zeta[:200]).std()) / temperature < 2 * result.error + 0.01


def test_arrays_on_disk(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrays, "BLOCK", 100)
    features = clustered(1000, 900)
    on_disk = []
    for name, side in zip("xy", features, strict=True):
        np.save(tmp_path / f"{name}.npy", (3 * side).numpy().astype(np.float16))
        on_disk.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    result = sparse(*on_disk, temperature=0.05, normalize=True)
    assert np.shares_memory(result.problem.y.stored.numpy(), on_disk[1])
    in_memory = sparse(*(torch.from_numpy(np.array(a)) for a in on_disk), temperature=0.05, normalize=True)
    torch.testing.assert_close(result.zeta, in_memory.zeta)
    assert result.extend(features[1][:5]).shape == (5,)


def test_auto_is_sparse_above_a_number_of_scores(monkeypatch: pytest.MonkeyPatch):
    x, y = clustered(300, 300)
    assert solve(x, y, temperature=0.1).method == "anderson"
    monkeypatch.setattr(solver_module, "EXACT_SCORES", 300 * 300 - 1)
    assert solve(x, y, temperature=0.1).method.startswith("sparse")
    assert solve(scores=x @ y.T, temperature=0.1).method == "anderson"


@pytest.mark.parametrize(("name", "value"), [("sample", 1), ("neighbors", -1), ("max_error", 0.0)])
def test_wrong_arguments(name: str, value: float):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        SparseOptions(**{name: value})
    with pytest.raises(ValueError, match=r"sparse.*scores"):
        solve(scores=torch.eye(3), temperature=0.1, method="sparse")
