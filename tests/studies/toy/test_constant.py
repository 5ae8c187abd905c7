"""The constant of the global contrastive loss, and the minima of the losses with infinitely many pairs."""

import math

import pytest
import torch
from torch.quasirandom import SobolEngine

from nuclr.popularity import importance_sampling as sampling
from nuclr.studies.toy import constant, spaces


def test_the_constant_is_the_difference_of_the_risks_of_many_pairs():
    """The pairs are of low discrepancy; independent ones would need many more."""
    tau, n = 0.5, 2048
    u = SobolEngine(dimension=4, scramble=True, seed=0).draw(n, dtype=torch.float64)
    x = spaces.half_disc(u[:, :2])
    y = spaces.conditional_y(x, u[:, 2:], tau)
    log_z = sampling.log_partition_from_popularity(x @ y.T, torch.full((n,), math.log(n), dtype=torch.float64), tau)
    difference = (log_z - spaces.log_partition(x, tau)).mean().item()
    assert difference == pytest.approx(constant.gcl_log_constant(tau), abs=2e-3)


def test_gcl_has_its_minimum_at_another_model():
    losses = constant.risks_along_alpha(0.2)
    assert losses["minimum"]["mle"] == pytest.approx(1, abs=0.01)
    assert losses["minimum"]["nuclr"] == pytest.approx(1, abs=0.01)
    assert losses["minimum"]["gcl"] < 0.8
    assert all(min(losses[name]) == 0 for name in ("mle", "gcl", "nuclr"))
