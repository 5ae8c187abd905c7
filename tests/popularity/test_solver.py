"""`solve` against POT, against its own defining equations, and in cases that are hard for solvers."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from nuclr.popularity import ConvergenceWarning, solve
from nuclr.popularity.kernel import Kernel
from tests.popularity.reference import gauged, paired, popularity_of, pot_zeta, residual, unit

SHAPES = [(60, 60), (40, 90), (90, 40)]


def test_a_problem_without_a_solution_does_not_converge() -> None:
    """All anchors equal one candidate, and an anchor does not choose a copy of itself."""
    units = torch.eye(3)
    with pytest.warns(ConvergenceWarning, match="may not choose"):
        result = solve(units[[0, 0, 0]], units[:2], temperature=0.05, exclude_copies=True)
    assert not result.converged


@pytest.mark.parametrize(("n_x", "n_y"), SHAPES)
@pytest.mark.parametrize(("tau", "error"), [(0.1, 1e-6), (0.01, 1e-4)])
def test_agrees_with_pot(n_x: int, n_y: int, tau: float, error: float) -> None:
    x, y = unit(n_x, 128, seed=0), unit(n_y, 128, seed=1)
    judge = pot_zeta(x @ y.T, tau)
    from_features = solve(x=x, y=y, temperature=tau, tolerance=1e-9)
    tiled = solve(x=x, y=y, temperature=tau, tolerance=1e-9, memory=0)
    from_scores = solve(scores=x @ y.T, temperature=tau, tolerance=1e-9)
    for result in (from_features, tiled, from_scores):
        assert result.converged
        assert result.zeta.dtype == torch.float64
        torch.testing.assert_close(result.zeta, judge, atol=error, rtol=0)


@pytest.mark.parametrize(("n_x", "n_y"), SHAPES)
def test_weights_agree_with_pot_and_stand_for_copies(n_x: int, n_y: int) -> None:
    x, y, tau = unit(n_x, 64, seed=2), unit(n_y, 64, seed=3), 0.1
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randint(1, 4, (n,), generator=generator) for n in (n_x, n_y))
    result = solve(x=x, y=y, temperature=tau, tolerance=1e-10, x_weight=a, y_weight=b.double() * 7)
    torch.testing.assert_close(result.zeta, pot_zeta(x @ y.T, tau, a, b), atol=1e-8, rtol=0)
    copies = solve(x=x.repeat_interleave(a, 0), y=y.repeat_interleave(b, 0), temperature=tau, tolerance=1e-10)
    first = b.cumsum(0) - b
    torch.testing.assert_close(result.zeta, gauged(copies.zeta[first]), atol=1e-9, rtol=0)
    plan = a[:, None] * b * torch.exp((x @ y.T - result.zeta) / tau - result.log_z[:, None])
    share = plan.sum(0) / plan.sum() * b.sum() / b
    assert result.residual == pytest.approx(float((share - 1).abs().max()), abs=1e-12)


def test_zero_weight_removes_an_anchor_and_only_extends_to_a_candidate() -> None:
    x, y = unit(30, 16, seed=0), unit(20, 16, seed=1)
    a, b = torch.ones(30), torch.ones(20)
    a[3], b[5] = 0, 0
    result = solve(x, y, temperature=0.1, tolerance=1e-10, x_weight=a, y_weight=b)
    without = solve(x[a > 0], y[b > 0], temperature=0.1, tolerance=1e-10)
    torch.testing.assert_close(gauged(result.zeta[b > 0]), without.zeta, atol=1e-9, rtol=0)
    offset = (result.zeta[b > 0] - without.zeta).mean()
    torch.testing.assert_close(result.zeta[5] - offset, without.extend(y[5:6])[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", ["auto", "sparse", "anderson", "sinkhorn", "gradient"])
@pytest.mark.parametrize("memory", [0, 2**29])
def test_all_methods_agree(method: str, memory: int) -> None:
    x, y = paired(50, 70)
    result = solve(x, y, temperature=0.1, method=method, tolerance=1e-9, memory=memory)
    best = solve(x, y, temperature=0.1, tolerance=1e-12)
    assert result.converged
    torch.testing.assert_close(result.zeta, best.zeta, atol=1e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory", [0, 2**29])
@pytest.mark.parametrize("tau", [0.5, 0.05, 0.02])
def test_the_reported_residual_is_that_of_the_returned_zeta(dtype: torch.dtype, memory: int, tau: float) -> None:
    x, y = (t.to(dtype) for t in paired(300, 500, d=32))
    result = solve(x, y, temperature=tau, tolerance=1e-3, memory=memory)
    true = residual(x.double() @ y.double().T, result.zeta, tau)
    assert result.residual == pytest.approx(
        true, abs=4 * torch.finfo(dtype).eps / tau + 1e-6 * (dtype == torch.float32)
    )
    assert result.converged
    assert result.iterations == len(result.history)
    assert result.history[-1] == result.residual <= 1e-3
    assert result.zeta.dtype == dtype


def test_fixed_point_gauge_and_popularity() -> None:
    x, y, tau = unit(40, 8, seed=0), unit(25, 8, seed=1), 0.2
    result = solve(x, y, temperature=tau, tolerance=1e-12)
    scores = x @ y.T
    assert abs(float(result.zeta.mean())) < 1e-12
    torch.testing.assert_close(result.popularity, popularity_of(result.zeta, tau))
    assert float(result.popularity.mean()) == pytest.approx(1)
    # DESIGN's fixed point: q_j = (n_y/n_x) sum_i exp(s_ij/tau) / sum_k exp(s_ik/tau)/q_k, for any scale of q
    for scale in (1.0, 17.0):
        q = scale * result.popularity
        z = ((scores / tau).exp() / q).sum(1)
        torch.testing.assert_close(25 / 40 * ((scores / tau).exp() / z[:, None]).sum(0), q)
    # scores + tau c_j moves zeta by tau c_j and leaves the plan; a shift of rows changes nothing
    shift = torch.linspace(-1, 1, 25, dtype=torch.float64)
    shifted = solve(scores=scores + shift + torch.arange(40)[:, None] * 0.1, temperature=tau, tolerance=1e-12)
    torch.testing.assert_close(shifted.zeta, gauged(result.zeta + shift), atol=1e-10, rtol=0)
    order = torch.randperm(25, generator=torch.Generator().manual_seed(0))
    permuted = solve(x, y[order], temperature=tau, tolerance=1e-12)
    torch.testing.assert_close(permuted.zeta, result.zeta[order], atol=1e-10, rtol=0)
    # both scaled together: the same problem
    scaled = solve(scores=3 * scores, temperature=3 * tau, tolerance=1e-12)
    torch.testing.assert_close(scaled.zeta, 3 * result.zeta, atol=1e-10, rtol=0)


def test_a_candidate_near_to_many_anchors_is_popular() -> None:
    x, y = unit(200, 16, seed=0), unit(50, 16, seed=1)
    y[7] = torch.nn.functional.normalize(x.mean(0), dim=0)
    result = solve(x, y, temperature=0.05)
    assert result.ranks[7] == 1
    assert sorted(result.ranks.tolist()) == list(range(1, 51))


def test_float32_continues_in_float64_if_the_tolerance_needs_it() -> None:
    x, y = (t.float() for t in paired(60, 80))
    assert solve(x, y, temperature=0.1, tolerance=1e-4).zeta.dtype == torch.float32
    result = solve(x, y, temperature=0.1, tolerance=1e-8)
    assert result.zeta.dtype == torch.float64
    assert result.converged
    scores = x.double() @ y.double().T
    assert result.residual == pytest.approx(residual(scores, result.zeta, 0.1), abs=1e-12)
    dense = solve(scores=(x @ y.T), temperature=0.1, tolerance=1e-8)
    assert residual(x @ y.T, dense.zeta, 0.1) <= 1.0001e-8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x, y = (t.to(dtype) for t in paired(30, 30, d=512))  # rounding changes their norms
    result = solve(x, y, temperature=0.1)
    assert result.zeta.dtype == torch.float32
    assert residual(x.double() @ y.double().T, result.zeta, 0.1) < 1.1e-4
    scores = (x.float() @ y.float().T).to(dtype)
    assert residual(scores.double(), solve(scores=scores, temperature=0.1).zeta, 0.1) < 1.1e-4


def test_float32_does_not_claim_a_residual_that_it_cannot_resolve() -> None:
    x, y = (t.float() for t in paired(40, 40))
    exact = solve(x, y, temperature=0.1, tolerance=1e-12)
    with pytest.warns(ConvergenceWarning):
        result = solve(x, y, temperature=0.1, tolerance=1e-7, init=exact.zeta, max_iterations=1)
    assert not result.converged


def hard_cases() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(80, 80, generator=generator)
    dominating, unreached = noise.clone(), noise.clone()
    dominating[:, 0] += 1
    unreached[:, 5] -= 1
    x, y = (t.float() for t in paired(60, 60, d=32))
    return {
        "identical": torch.full((40, 40), 0.7),
        "identity": torch.eye(40),
        "dominating": dominating,
        "unreached": unreached,
        "paired": x @ y.T,
        "few anchors": (x @ y.T)[:4],
        "few candidates": (x @ y.T)[:, :3],
        "two": torch.tensor([[1.0, -1.0], [1.0, 1.0]]),
        "wide range": 3 * torch.randn(40, 30, generator=generator),
    }


@pytest.mark.parametrize("tau", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("name", hard_cases())
def test_hard_cases_converge_or_warn(name: str, tau: float) -> None:
    scores = hard_cases()[name]
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        result = solve(scores=scores, temperature=tau, max_iterations=3000)
    true = residual(scores, result.zeta, tau)
    assert result.zeta.isfinite().all()
    assert result.residual == pytest.approx(true, abs=2e-5)
    assert result.converged == (result.residual <= 1e-4) == (not issued)
    assert result.converged or name in ("paired", "wide range")
    assert result.residual <= residual(scores, torch.zeros_like(result.zeta), tau) + 1e-5


def test_a_warm_start_saves_passes() -> None:
    x, y = paired(200, 200, d=32)
    cold = solve(x, y, temperature=0.03, tolerance=1e-6)
    warm = solve(x, y, temperature=0.03, tolerance=1e-6, init=cold.zeta + 5)
    assert warm.iterations == 1
    nearby = solve(x, y, temperature=0.029, tolerance=1e-6, init=cold.zeta)
    assert nearby.iterations < solve(x, y, temperature=0.029, tolerance=1e-6).iterations


def test_acceleration_needs_far_fewer_passes_than_sinkhorn() -> None:
    x, y = paired(400, 400, d=32)
    fast, plain = (solve(x, y, temperature=0.03, tolerance=1e-3, method=method) for method in ("auto", "sinkhorn"))
    assert 3 * fast.iterations < plain.iterations


def test_inputs_are_not_modified() -> None:
    x, y = (t.requires_grad_() for t in paired(20, 20))
    scores = (x @ y.T).detach()
    before = [t.detach().clone() for t in (x, y, scores)]
    assert not solve(x, y, temperature=0.1).zeta.requires_grad
    solve(scores=scores, temperature=0.1)
    assert all(torch.equal(*both) for both in zip((x, y, scores), before, strict=True))


def test_an_interrupt_returns_the_best_zeta_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    once = Kernel.__call__

    def interrupted(self, zeta, collects=False):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return once(self, zeta, collects)

    monkeypatch.setattr(Kernel, "__call__", interrupted)
    x, y = paired(50, 50)
    with pytest.warns(ConvergenceWarning, match="interrupt"):
        result = solve(x, y, temperature=0.02)
    assert not result.converged
    assert result.iterations == 4
    assert result.residual == pytest.approx(residual(x @ y.T, result.zeta, 0.02), rel=1e-6)
    calls = 4
    with pytest.raises(KeyboardInterrupt):
        solve(x, y, temperature=0.02)


def test_progress_is_shown_on_stderr_only_if_requested(capfd: pytest.CaptureFixture[str]) -> None:
    x, y = paired(40, 40)
    solve(x, y, temperature=0.05)
    assert capfd.readouterr() == ("", "")
    solve(x, y, temperature=0.05, progress=True)
    out, err = capfd.readouterr()
    assert not out and "residual" in err


def test_copies_of_an_anchor_are_not_chosen() -> None:
    """Items that search one another: equal to solving with scores of -infinity on the diagonal, in float64 loops."""
    items = paired(40, 40)[1]
    tau = 0.2
    result = solve(items, items, temperature=tau, exclude_copies=True, tolerance=1e-8)
    scores = (items @ items.T).fill_diagonal_(-30.0)
    assert torch.allclose(result.zeta, gauged(solve(scores=scores, temperature=tau, tolerance=1e-8).zeta), atol=1e-8)
    assert residual(scores, result.zeta, tau) < 1e-7
    again = result.extend(items)
    for j in range(40):
        terms = [float(scores[i, j] / tau - result.log_z[i]) for i in range(40) if i != j]
        assert float(again[j]) == pytest.approx(tau * math.log(sum(map(math.exp, terms))), abs=1e-9)
    assert torch.allclose(gauged(again), result.zeta, atol=1e-6)


def test_copies_are_found_at_any_norm_that_is_accepted() -> None:
    x, y = paired(30, 30)
    scaled = torch.cat([0.992 * x[:5], y])
    exact = solve(torch.cat([x[:5], y]), torch.cat([x[:5], y]), temperature=0.3, exclude_copies=True).zeta
    assert torch.allclose(solve(scaled, scaled, temperature=0.3, exclude_copies=True).zeta, exact, atol=0.02)
    for wrong, named in (
        ({"scores": x @ y.T}, "scores"),
        ({"x": x, "y": y, "method": "sample", "sample": 20}, "sample"),
    ):
        with pytest.raises(ValueError, match=f"exclude_copies=True.*{named}"):
            solve(**wrong, temperature=0.3, exclude_copies=True)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        *((method, {"max_iterations": 3}, "max_iterations=3") for method in ("auto", "sinkhorn", "gradient")),
        ("auto", {"tolerance": 1e-18}, "rounding errors"),
    ],
)
def test_a_solution_that_is_not_reached_gives_a_warning(method: str, options: dict, words: str) -> None:
    x, y = paired(40, 40)
    with pytest.warns(ConvergenceWarning, match=words):
        result = solve(x, y, temperature=np.float32(0.0625), method=method, **options)
    assert not result.converged and result.temperature == 0.0625
    assert result.residual == min(result.history)
    assert result.residual == pytest.approx(residual(x @ y.T, result.zeta, 0.0625), rel=1e-6, abs=1e-12)
    assert result.iterations == 3 if words == "max_iterations=3" else result.residual < 1e-12
