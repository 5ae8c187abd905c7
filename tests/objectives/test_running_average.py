"""gamma_rule="proximal": gamma_i = alpha u_i' / (1 + alpha u_i') with u' = u/(n-1), in place of a constant gamma."""

import math

import pytest
import torch

from tests.objectives.comparison import BATCH, SAMPLES, assert_close, batches, call, masked_in_few_ways, run
from tests.objectives.extensions import NUCLR
from tests.objectives.make import make


@masked_in_few_ways
@pytest.mark.parametrize("alpha", [4.0, 100.0])
@pytest.mark.parametrize(
    ("name", "options"),
    [("sogclr", {"temperature": 0.1}), ("isogclr", {"temperature": 0.03}), ("nuclr", NUCLR)],
    ids=["sogclr", "isogclr", "nuclr"],
)
def test_against_loops(name, options, alpha, mask) -> None:
    run(name, mask, **options, gamma_rule="proximal", alpha=alpha)


@pytest.mark.parametrize("log_u", [-30.0, 30.0])
def test_averages_far_from_the_batch(log_u) -> None:
    """A tiny u has gamma near 0 and keeps its value; a huge one has gamma near 1 and is replaced."""
    x, y, index = next(batches())
    objective = make("sogclr", num_samples=SAMPLES, gamma_rule="proximal", temperature=0.1).double()
    fresh = make("sogclr", num_samples=SAMPLES, temperature=0.1).double()
    fresh(x, y, index)
    objective.log_u_x.fill_(log_u)
    objective.log_u_y.fill_(log_u)
    call(objective, x, y, index)
    for side in "xy":
        after, phi = objective.get_buffer(f"log_u_{side}")[index], fresh.get_buffer(f"log_u_{side}")[index]
        assert after.isfinite().all()
        # at the limit gamma = 1e-8; and (1-gamma) u = (n-1)/alpha for a huge u
        kept = torch.logaddexp(phi + math.log(1e-8), torch.full_like(phi, log_u))
        replaced = torch.logaddexp(phi, torch.full((BATCH,), math.log((SAMPLES - 1) / 4.0), dtype=torch.float64))
        assert_close(after, kept if log_u < 0 else replaced, f"log_u_{side}")
