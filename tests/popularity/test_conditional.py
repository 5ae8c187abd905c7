"""Draws of y given x: their probabilities against loops in float64, tiles, devices and wrong inputs."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.popularity import importance_sampling, sample_conditional, solve

TAU = 0.4


def features(n: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(n, 3, dtype=torch.float64, generator=generator), dim=1).to(dtype)


def probabilities(x: torch.Tensor, y: torch.Tensor, q: list[float]) -> list[float]:
    """Return exp(s/tau) / q, normalized, by a loop."""
    weights = [math.exp(sum(float(a * b) for a, b in zip(x, row, strict=True)) / TAU) / q[j] for j, row in enumerate(y)]
    return [w / sum(weights) for w in weights]


def test_draws_are_the_inverse_of_the_cumulative_probabilities():
    x, y = features(2, 3), features(9, 4)
    q = [1.0 + 0.3 * j for j in range(9)]
    zeta = TAU * torch.tensor(q, dtype=torch.float64).log() + 0.7  # a constant has no effect
    drawn = sample_conditional(x, y, zeta, temperature=TAU, count=50, generator=torch.Generator().manual_seed(5))
    uniform = torch.rand(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for i in range(2):
        cumulative = np.cumsum(probabilities(x[i], y, q))
        for k in range(50):
            assert drawn[i, k] == next(j for j in range(9) if cumulative[j] > float(uniform[i, k]))


def test_tiles_do_not_change_the_draws(monkeypatch):
    x, y = features(10, 6), features(8, 7)
    zeta = solve(x, y, temperature=TAU).zeta

    def draw() -> torch.Tensor:
        return sample_conditional(x, y, zeta, temperature=TAU, count=5, generator=torch.Generator().manual_seed(8))

    whole = draw()
    monkeypatch.setattr(importance_sampling, "ENTRIES", 1)  # one anchor at a time
    assert torch.equal(draw(), whole)


def test_an_item_of_probability_zero_is_never_drawn():
    x = torch.tensor([[1.0, 0.0]])
    y = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    drawn = sample_conditional(3 * x.numpy(), y, np.zeros(3), temperature=1e-3, count=1000, normalize=True)
    assert drawn.unique().tolist() == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zeta": torch.zeros(3)}, "zeta"),
        ({"count": 0}, "count=0"),
        ({"temperature": 0.0}, "temperature"),
        ({"y": torch.empty(0, 3), "zeta": []}, "y has no rows"),
    ],
)
def test_wrong_inputs_are_named(changes, message):
    arguments = {"x": torch.eye(3), "y": torch.eye(3)[:2], "zeta": torch.zeros(2), "temperature": TAU, "count": 1}
    with pytest.raises(ValueError, match=message):
        sample_conditional(**arguments | changes)
