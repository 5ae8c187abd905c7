"""The step of zeta of nuclr: against loops, against Algorithm 1 as someone else wrote it, and at any n/B."""

import inspect
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.objectives import NUCLR, build, stateful
from nuclr.objectives.kernels import SharedKernel, make_kernel
from tests.objectives.comparison import (
    BATCH,
    SAMPLES,
    Stateful,
    assert_close,
    assert_same_training,
    batches,
    call,
    masked_in_few_ways,
)
from tests.paper_algorithm import PaperNuclr

STEPS = 6
TAU = 0.1
estimators = pytest.mark.parametrize("estimator", ["unbiased", "paper"])


@masked_in_few_ways
@estimators
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zeta_momentum": 0.9, "sides": "x"},
        {"zeta_init": -0.05, "zeta_lr": 2.0, "sides": "y"},  # many moves reach their bound
        {"use_xi": False, "temperature": 0.03},
        {"individual_temperature": True, "tau_max": 1.0, "zeta_momentum": 0.5},
    ],
    ids=str,
)
def test_six_batches_against_loops(options, estimator, mask) -> None:
    pair = Stateful("nuclr", **({"temperature": TAU, "zeta_estimator": estimator} | options))
    for batch in batches(steps=STEPS):
        pair.check(*batch, mask)
    moved = pair.state["zeta_x" if options.get("sides") == "y" else "zeta_y"]
    assert np.ptp(moved) > 1e-3, "this test needs a zeta that has moved"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("use_xi", [True, False])
@pytest.mark.parametrize("zeta_init", [0.0, -0.05])
def test_the_letter_is_algorithm_1(momentum, use_xi, zeta_init) -> None:
    """`PaperNuclr` was written from the paper's text by someone who had not seen this package."""
    zeta_lr = 0.3
    options = {"zeta_momentum": momentum, "use_xi": use_xi, "zeta_init": zeta_init, "zeta_estimator": "paper"}
    letter = NUCLR(SAMPLES, TAU, gamma=0.8, zeta_lr=zeta_lr, **options).double()
    paper = PaperNuclr(SAMPLES, TAU, 0.8, zeta_lr * TAU * BATCH, zeta_init, abs(zeta_init), momentum, use_xi=use_xi)
    for x, y, index in batches(steps=STEPS):
        out, grad_x, grad_y = call(letter, x, y, index)
        value, slope = paper.step((x @ y.T).numpy(), index.tolist())
        assert_close(out.loss.item(), value, "value")
        assert_close(grad_x, slope @ y.numpy(), "gradient of x")
        assert_close(grad_y, slope.T @ x.numpy(), "gradient of y")
    for anchors, candidates, side in (("x", "y", paper.sides[0]), ("y", "x", paper.sides[1])):
        u = letter.get_buffer(f"log_u_{anchors}").exp()
        assert_close(u, np.where(side.seen, side.u, 0.0), "u")
        assert_close(letter.get_buffer(f"zeta_{candidates}"), side.zeta, "zeta")
        if momentum > 0:
            assert_close(letter.get_buffer(f"zeta_velocity_{candidates}"), BATCH * side.v, "velocity")
        assert_close(letter.get_buffer(f"xi_{candidates}"), side.xi, "xi")
    assert np.ptp(paper.sides[0].zeta) > 0.01, "this test needs a zeta that has moved"


def test_the_default_follows_the_unbiased_gradient_of_algorithm_1() -> None:
    """One batch from zeta = 0: the default is the algorithm with 1/B for 1/n, minus the mean of the moves."""
    x, y, index = next(batches())
    default = build("nuclr", num_samples=SAMPLES, temperature=TAU).double()
    default(x, y, index)
    paper = PaperNuclr(SAMPLES, TAU, 0.8, default.zeta_lr * TAU * BATCH, 0.0, 0.0, constant="1/B")
    paper.step((x @ y.T).numpy(), index.tolist())
    moves = -default.zeta_lr * TAU * BATCH * paper.last[0]["G_zeta"]
    assert np.abs(moves).max() < TAU, "no move reaches its bound"
    assert_close(default.zeta_y[index], moves - moves.mean(), "zeta")


def clustered(count: int, tau_spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return pairs around one direction, so that a few candidates are close to most anchors."""
    generator = torch.Generator().manual_seed(seed)
    center = torch.ones(8, dtype=torch.float64)
    x = center + tau_spread * torch.randn(count, 8, dtype=torch.float64, generator=generator)
    y = x + tau_spread * torch.randn(count, 8, dtype=torch.float64, generator=generator)
    return normalize(x, dim=1), normalize(y, dim=1)


@pytest.mark.parametrize("tau", [0.1, 0.01])
@pytest.mark.parametrize("zeta_lr", [0.3, 50.0])
@pytest.mark.parametrize("num_samples", [20, 1_000_000])
def test_no_visit_moves_zeta_far(num_samples, zeta_lr, tau) -> None:
    x, y = clustered(16, tau_spread=1.0)
    y[1] = y[0]  # a candidate that is as close to other anchors as theirs
    objective = build("nuclr", num_samples=num_samples, temperature=tau, zeta_lr=zeta_lr).double()
    index = torch.arange(16)
    for _ in range(5):
        before = objective.zeta_y[index].clone()
        objective(x, y, index)
        move = (objective.zeta_y[index] - before).abs().max() / tau
        assert 0 < move < 2


def test_the_step_does_not_depend_on_the_temperature() -> None:
    """Scores and tau times the same factor: zeta/tau is the same."""
    x, y = clustered(16, tau_spread=1.0)
    index = torch.arange(16)
    zeta = []
    for factor in (1.0, 0.25):
        # rotating y towards new coordinates multiplies all scores by the factor
        rest = torch.full((16, 1), math.sqrt(1 - factor**2), dtype=torch.float64)
        wide_x = torch.cat([x, torch.zeros_like(rest)], dim=1)
        wide_y = torch.cat([factor * y, rest], dim=1)
        objective = build("nuclr", num_samples=20, temperature=0.4 * factor, sides="x").double()
        for _ in range(3):
            objective(wide_x, wide_y, index)
        zeta.append(objective.zeta_y / objective.temperature)
    torch.testing.assert_close(zeta[0], zeta[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("zeta_init", [0.0, -0.05])
def test_xi_does_not_follow_a_common_drift(zeta_init) -> None:
    """The mean of zeta stays, xi is the largest |zeta|; under the letter all zeta rise and xi with them."""
    x, y = clustered(200, tau_spread=0.7)
    objectives = {}
    for estimator in ("unbiased", "paper"):
        objectives[estimator] = build(
            "nuclr", num_samples=200, temperature=TAU, zeta_init=zeta_init, zeta_estimator=estimator
        ).double()
    generator = torch.Generator().manual_seed(1)
    epochs = 40
    for _ in range(epochs):
        for index in torch.randperm(200, generator=generator).split(10):
            for objective in objectives.values():
                objective(x[index], y[index], index)
    default, letter = objectives["unbiased"], objectives["paper"]
    for side in "xy":
        zeta = default.get_buffer(f"zeta_{side}")
        assert zeta.mean().item() == pytest.approx(zeta_init, abs=1e-12)
        xi = default.get_buffer(f"xi_{side}")
        drift = letter.get_buffer(f"zeta_{side}").mean().item() - zeta_init
        assert drift == pytest.approx(epochs * letter.zeta_lr * TAU * (1 - 10 / 200), rel=0.3)
        assert letter.get_buffer(f"xi_{side}") > drift + zeta_init
        assert xi < 5 * zeta.std() + abs(zeta_init) < drift


@masked_in_few_ways
@estimators
def test_without_zeta_and_xi_it_is_sogclr(estimator, mask) -> None:
    frozen = {"zeta_lr": 0.0, "zeta_init": 0.0, "xi_init": math.inf, "zeta_estimator": estimator}
    one = build("nuclr", num_samples=SAMPLES, **frozen).double()
    two = build("sogclr", num_samples=SAMPLES).double()
    assert_same_training(one, two, value=False, atol=0, mask=mask)  # the value has another constant


def test_the_constructor_has_at_most_16_arguments() -> None:
    assert len(inspect.signature(NUCLR).parameters) <= 16


@pytest.mark.parametrize("name", ["sogclr", "nuclr"])
def test_evaluation_without_an_index_takes_the_kernel_of_training(name, monkeypatch) -> None:
    kernels = []

    def record(*arguments, **options):
        kernels.append(make_kernel(*arguments, **options))
        return kernels[-1]

    monkeypatch.setattr(stateful, "make_kernel", record)
    objective = build(name, num_samples=SAMPLES)
    x, y, index = next(batches())
    objective(x.float(), y.float(), index)
    objective.eval()(x.float(), y.float())
    assert [type(kernel) for kernel in kernels] == [SharedKernel, SharedKernel]
