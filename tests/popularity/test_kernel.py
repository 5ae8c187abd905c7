"""One pass over the scores against dense float64, for all tilings, with and without a kept matrix."""

import pytest
import torch
from torch import Tensor

from nuclr.popularity import kernel as module
from nuclr.popularity.kernel import Kernel, State
from nuclr.popularity.problem import Problem, make_problem
from tests.popularity.reference import paired


def dense(problem: Problem, zeta: Tensor) -> State:
    """Compute State densely from its definition."""
    assert problem.x is not None and problem.y is not None
    tau, a, b = problem.temperature, problem.a, problem.b
    logits = (problem.x.double() @ problem.y.double().T - zeta) / tau
    log_z = (logits + b.log()).logsumexp(1)
    log_A = logits - log_z[:, None]
    log_c = (log_A + a.log()[:, None]).logsumexp(0)
    curvature = 1 - b * (a @ (2 * log_A - log_c).exp())
    return State(zeta, log_c, log_z, curvature, float((tau * a @ log_z + b @ zeta) / len(b)))


def weighted_problem(dtype: torch.dtype, tau: float = 0.05) -> Problem:
    x, y = (t.to(dtype) for t in paired(150, 210))
    return make_problem(x, y, temperature=tau, x_weight=torch.arange(1, 151), y_weight=torch.arange(1, 211))


@pytest.mark.parametrize("memory", [0, 2**29])
@pytest.mark.parametrize("block", [(64, 64), (128, 192), (4096, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pass_agrees_with_the_dense_definition(
    monkeypatch: pytest.MonkeyPatch, memory: int, block: tuple, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(module, "CPU_BLOCK", block)
    problem = weighted_problem(dtype)
    kernel = Kernel(problem, memory)
    generator = torch.Generator().manual_seed(0)
    error = 1e-10 if dtype == torch.float64 else 2e-5
    for step in range(7):
        zeta = 0.04 * step * torch.randn(210, generator=generator, dtype=torch.float64)
        state, judge = kernel(zeta), dense(problem, zeta)
        torch.testing.assert_close(state.log_c, judge.log_c, atol=error, rtol=error)
        torch.testing.assert_close(state.log_z, judge.log_z, atol=error, rtol=error)
        assert state.objective == pytest.approx(judge.objective, rel=error, abs=error)
        if kernel.age % Kernel.RENEWAL == 0:
            torch.testing.assert_close(state.curvature, judge.curvature, atol=error, rtol=error)
    assert kernel.keep == (memory > 0)
    assert kernel.age == (6 if kernel.keep else 0)


def test_gradient_and_curvature_agree_with_autograd() -> None:
    problem = weighted_problem(torch.float64)
    zeta = (0.05 * torch.randn(210, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).requires_grad_()
    logits = (problem.x @ problem.y.T - zeta) / problem.temperature
    value = (problem.temperature * problem.a @ (logits + problem.b.log()).logsumexp(1) + problem.b @ zeta) / 210
    (gradient,) = torch.autograd.grad(value, zeta, create_graph=True)
    state = Kernel(problem, 0)(zeta.detach())
    c = state.log_c.exp()
    torch.testing.assert_close(gradient, problem.b * (1 - c) / 210)
    for j in (0, 17, 209):
        diagonal = torch.autograd.grad(gradient[j], zeta, retain_graph=True)[0][j]
        expected = problem.b[j] * c[j] * state.curvature[j] / (problem.temperature * 210)
        torch.testing.assert_close(diagonal, expected)


def test_the_reference_moves_when_zeta_drifts_far() -> None:
    problem = weighted_problem(torch.float32, tau=0.01)
    kernel = Kernel(problem, 2**29)
    ages = []
    for reach in (0.0, 0.1, 0.3, 0.5, 5.0):
        zeta = torch.linspace(-reach, reach, 210, dtype=torch.float64)
        state = kernel(zeta)
        ages.append(kernel.age)
        torch.testing.assert_close(state.log_c, dense(problem, zeta).log_c, atol=3e-4, rtol=1e-4)
    assert ages == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("memory", [0, 2**29])
def test_a_candidate_that_no_anchor_chooses_is_summed_in_logs(memory: int) -> None:
    problem = weighted_problem(torch.float32)
    zeta = torch.zeros(210, dtype=torch.float64)
    zeta[3] = 50.0  # exp(-1000)
    state = Kernel(problem, memory)(zeta)
    torch.testing.assert_close(state.log_c, dense(problem, zeta).log_c, atol=1e-4, rtol=1e-5)
    assert state.log_c[3] < -900


def test_sums_over_many_columns_keep_six_digits() -> None:
    """MKL's float32 product over a row of 100,000 numbers has an error of 2e-5; that over a block does not."""
    x = torch.nn.functional.normalize(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    y = torch.nn.functional.normalize(torch.randn(100_000, 4, generator=torch.Generator().manual_seed(1)), dim=1)
    problem = make_problem(x, y, temperature=0.5)
    zeta = torch.zeros(100_000, dtype=torch.float64)
    judge = dense(problem, zeta)
    state = Kernel(problem, 0)(zeta)
    assert float((state.log_z - judge.log_z).abs().max()) < 2e-6
    assert float((state.log_c - judge.log_c).abs().max()) < 4e-6


def test_a_matrix_for_which_there_is_no_memory_is_computed_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (torch.nn.functional.normalize(torch.randn(700, 8), dim=1) for _ in range(2))
    problem = make_problem(x, y, temperature=0.1)
    zeta = torch.randn(700, dtype=torch.float64) * 0.01
    expected = Kernel(problem, 2**29)
    assert expected.keep
    with monkeypatch.context() as patch:
        patch.setattr("nuclr.popularity.kernel.free_memory", lambda device: 2 * 700 * 700 * 4 - 1)
        assert not Kernel(problem, 2**29).keep
    empty = torch.empty

    def refuse(*size, **options):
        if len(size) == 4 and size[0] > 1:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    kernel = Kernel(problem, 2**29)
    assert not kernel.keep
    torch.testing.assert_close(kernel(zeta).log_c, expected(zeta).log_c)
