"""Single steps of the methods."""

import pytest
import torch

from nuclr.popularity.kernel import Kernel, State
from nuclr.popularity.methods import Anderson, Gradient, Sinkhorn, improves
from nuclr.popularity.problem import make_problem
from tests.popularity.reference import paired

TAU = 0.05


@pytest.fixture
def kernel() -> Kernel:
    return Kernel(make_problem(*paired(60, 80), temperature=TAU), 2**29)


def start(kernel: Kernel) -> State:
    return kernel(torch.zeros(80, dtype=torch.float64))


def test_sinkhorn_never_raises_the_objective(kernel: Kernel) -> None:
    state, method = start(kernel), Sinkhorn(TAU)
    for _ in range(20):
        after = kernel(method.propose(state))
        assert after.objective < state.objective
        state = after


def test_gradient_step_is_the_papers_and_is_halved_if_too_long(kernel: Kernel) -> None:
    state, method = start(kernel), Gradient(TAU)
    torch.testing.assert_close(method.propose(state), TAU * (state.log_c.exp() - 1))
    worse = kernel(state.zeta - 10 * TAU * state.log_c)
    assert not improves(state, worse)
    assert not method.accepts(state, worse)
    assert method.step == TAU / 2


def test_a_bad_extrapolation_is_followed_by_a_sinkhorn_step(kernel: Kernel) -> None:
    method = Anderson(TAU)
    state = kernel(Sinkhorn(TAU).propose(start(kernel)))
    method.propose(state)
    worse = kernel(state.zeta + torch.linspace(-1, 1, 80, dtype=torch.float64))
    floor = method.floor
    assert not method.accepts(state, worse)
    assert method.floor > floor
    torch.testing.assert_close(method.propose(state), Sinkhorn(TAU).propose(state))
    assert method.accepts(state, worse)
    assert method.past == []


def test_anderson_is_bounded_and_stable_with_a_history_of_equal_points(kernel: Kernel) -> None:
    state, method = start(kernel), Anderson(TAU)
    reach = TAU * state.log_c.abs().clamp_min(Anderson.REACH)
    for _ in range(4):
        step = method.propose(state) - state.zeta
        assert step.isfinite().all()
        assert (step.abs() <= reach * (1 + 1e-12)).all()
    assert len(method.past) == 4
    for _ in range(30):
        state = kernel(method.propose(state))
    assert len(method.past) == Anderson.MEMORY + 1
