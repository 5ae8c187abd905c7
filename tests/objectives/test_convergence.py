"""The unbiased estimator finds the popularity: with fixed features, zeta converges to the exact solution."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.popularity import solve
from tests.objectives.make import make

SAMPLES, BATCH, DIM, TOPICS, TAU = 2000, 64, 16, 100, 0.1
EPOCHS, STEP, GAMMA = 200, 0.1, 0.3


def long_tailed_pairs() -> tuple[Tensor, Tensor]:
    """Return 2,000 pairs on 100 topics, the k-th with a share of 1/k: pairs on a common topic are popular."""
    generator = torch.Generator().manual_seed(0)
    share = 1 / torch.arange(1, TOPICS + 1, dtype=torch.float64)
    topic = torch.multinomial(share, SAMPLES, replacement=True, generator=generator)
    center = normalize(torch.randn(TOPICS, DIM, dtype=torch.float64, generator=generator), dim=1)[topic]
    noise = torch.randn(2, SAMPLES, DIM, dtype=torch.float64, generator=generator) * 0.7 / math.sqrt(DIM)
    x, y = normalize(center + noise, dim=2)
    return x, y


def sinkhorn(scores: Tensor) -> Tensor:
    """Return zeta of the columns with mean zero: q_j <- sum_i exp(s_ij/tau) / sum_k (exp(s_ik/tau)/q_k)."""
    kernel = torch.exp(scores / TAU)  # at most exp(10)
    zeta = torch.zeros(scores.shape[1], dtype=torch.float64)
    for _ in range(2000):
        update = TAU * torch.log(kernel.T @ (1 / (kernel @ torch.exp(-zeta / TAU))))
        update -= update.mean()
        if (update - zeta).abs().max() < 1e-9:
            return update
        zeta = update
    raise AssertionError("Sinkhorn's iteration did not converge")


def test_zeta_of_stored_views_converges_to_the_exact_solution() -> None:
    """With the whole data set as the batch and u = phi, the fixed point is that of all views as candidates."""
    x, y = (side[:120].view(30, 4, DIM) for side in long_tailed_pairs())
    exact = solve(x[:, 0], y.flatten(0, 1), temperature=TAU, tolerance=1e-9).zeta
    objective = make("nuclr", num_samples=30, temperature=TAU, gamma=1.0, zeta_lr=1.0, sides="x", y_views=4).double()
    for _ in range(500):
        objective(x[:, 0], y, torch.arange(30))
    zeta = objective.zeta_y.flatten()
    assert exact.std() > 0.3 * TAU, "a flat popularity would make this test easy"
    torch.testing.assert_close(zeta - zeta.mean(), exact - exact.mean(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_unbiased_zeta_converges_to_the_exact_solution() -> None:
    x, y = long_tailed_pairs()
    exact = {"y": sinkhorn(x @ y.T), "x": sinkhorn(y @ x.T)}
    assert exact["y"].std() > 0.3 * TAU, "a flat popularity would make this test easy"

    objective = make("nuclr", num_samples=SAMPLES, temperature=TAU, gamma=GAMMA, zeta_lr=STEP)
    x, y = x.float(), y.float()
    generator = torch.Generator().manual_seed(1)
    steps_per_epoch = SAMPLES // BATCH
    for step in range(EPOCHS * steps_per_epoch):
        if step % steps_per_epoch == 0:
            order = torch.randperm(SAMPLES, generator=generator)
        index = order[step % steps_per_epoch * BATCH :][:BATCH]
        objective.zeta_lr = STEP * 0.5 * (1 + math.cos(math.pi * step / (EPOCHS * steps_per_epoch)))
        objective(x[index], y[index], index)

    for side, zeta in (("x", objective.zeta_x), ("y", objective.zeta_y)):
        assert torch.corrcoef(torch.stack([zeta.double(), exact[side]]))[0, 1] >= 0.95
        # Not only the correlation but also the size must agree. Only the constant is free.
        centered = zeta.double() - zeta.double().mean()
        assert (centered - exact[side]).square().mean().sqrt() < 0.3 * exact[side].std()
