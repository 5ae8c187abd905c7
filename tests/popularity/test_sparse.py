"""The sparse model, the method that solves it between passes, and the promise of `converged`."""

import warnings

import pytest
import torch

from nuclr.popularity import ConvergenceWarning, near, solve
from nuclr.popularity.kernel import Kernel
from nuclr.popularity.problem import make_problem
from nuclr.popularity.sparse import Model
from tests.popularity.reference import clustered, paired, residual

TAU = 0.05


@pytest.fixture(params=[0, 2**29], ids=["tiles", "kept"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    weights = {"x_weight": torch.arange(1, 61), "y_weight": torch.arange(80)}
    return Kernel(make_problem(*paired(60, 80), temperature=TAU, **weights), request.param)


def test_large_entries_are_collected(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "LARGE", 0.02)
    p = kernel.problem
    first = kernel(torch.zeros(80, dtype=torch.float64))
    assert first.near is None
    state = kernel(first.zeta + 2 * TAU * torch.linspace(-1, 1, 80, dtype=torch.float64), collects=True)
    entries = torch.exp((p.x @ p.y.T - state.zeta) / TAU - state.log_z[:, None])
    limit = 0.02 / max(1.0, float(p.a.mean()))
    expected = torch.where(entries > limit, entries, 0)
    torch.testing.assert_close(state.near.by_row.to_dense(), expected, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(state.near.by_column.to_dense(), expected.T, atol=1e-12, rtol=1e-9)
    assert 0 < int((expected > 0).sum()) < expected.numel() / 2


def test_the_number_of_entries_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "LARGE", 1e-6)
    monkeypatch.setattr(near, "LEAST_PER_ROW", 3)
    kernel = Kernel(make_problem(*paired(60, 80), temperature=TAU), 0)
    state = kernel(torch.zeros(80, dtype=torch.float64), collects=True)
    entries = torch.exp((kernel.problem.x @ kernel.problem.y.T) / TAU - state.log_z[:, None])
    kept = state.near.by_row.to_dense()
    assert int((kept > 0).sum()) == 3 * 60
    assert float(kept.sum()) > 0.8 * float(entries.topk(3, dim=1).values.sum())


def test_the_model_is_the_problem_at_its_state(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "LARGE", 0.02)
    for scale in (0.0, 0.3, 0.5):  # the entries are those of the pass before
        state = kernel(scale * TAU * torch.linspace(-1, 1, 80, dtype=torch.float64), collects=scale == 0.3)
    model = Model(kernel.problem, state, state.near)
    here = model(state.zeta)
    torch.testing.assert_close(here.log_z, state.log_z, atol=1e-9, rtol=0)
    torch.testing.assert_close(here.log_c, state.log_c, atol=1e-9, rtol=0)
    # With all entries it is the problem everywhere.
    monkeypatch.setattr(near, "LARGE", 0.0)
    everything = Kernel(kernel.problem, 2**29)
    state = everything(state.zeta, collects=True)
    away = state.zeta + TAU * torch.linspace(1, -1, 80, dtype=torch.float64)
    expected = everything(away)
    found = Model(kernel.problem, state, state.near)(away)
    torch.testing.assert_close(found.log_c, expected.log_c, atol=1e-9, rtol=0)
    assert found.objective == pytest.approx(expected.objective, abs=1e-9)


@pytest.mark.parametrize("temperature", [0.01, 0.03])
def test_needs_fewer_passes(temperature: float) -> None:
    x, y = clustered(1000, 1000)
    passes = {}
    for method in ("sparse", "anderson"):
        passes[method] = solve(x, y, temperature=temperature, method=method, tolerance=1e-3).iterations
    assert passes["sparse"] <= 0.7 * passes["anderson"], passes


def test_converged_is_a_promise() -> None:
    """On problems of several kinds and for all methods, the exact residual is within the tolerance."""
    converged = 0
    good = 0
    for number in range(16):
        n_x = 100 + 40 * number
        x, y = (paired if number % 2 else clustered)(n_x, 500, d=24, seed=number)
        x, y = x.float(), y.float()
        tau = (0.007, 0.02, 0.05, 0.3)[number % 4]
        tolerance = (1e-4, 1e-2, 1e-1)[number % 3]
        method = ("sparse", "sinkhorn", "sample", "sparse", "anderson")[number % 5]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            result = solve(
                x, y, temperature=tau, tolerance=tolerance, method=method, sample=100, max_iterations=30 + 3 * number
            )
        true = residual(x.double() @ y.double().T, result.zeta, tau)
        good += true <= tolerance
        converged += result.converged
        assert true <= tolerance or not result.converged, (number, true)
    assert 0.8 * good <= converged < 16
