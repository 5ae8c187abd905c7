"""`extend`: zeta of new candidates."""

import math

import pytest
import torch

from nuclr.popularity import solve
from tests.popularity.reference import paired, unit


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tau", [0.2, 0.02])
def test_extension_to_the_candidates_themselves_gives_their_zeta(weighted: bool, tau: float) -> None:
    x, y = unit(60, 8, seed=0), unit(50, 8, seed=1)
    weights = {"x_weight": torch.arange(1, 61), "y_weight": torch.arange(1, 51)} if weighted else {}
    result = solve(x, y, temperature=tau, tolerance=1e-10, **weights)
    torch.testing.assert_close(result.extend(y), result.zeta, atol=1e-10, rtol=0)
    dense = solve(scores=x @ y.T, temperature=tau, tolerance=1e-10, **weights)
    torch.testing.assert_close(dense.extend(x @ y.T), dense.zeta, atol=1e-10, rtol=0)


def test_extension_agrees_with_its_formula() -> None:
    x, y, new = unit(30, 8, seed=0), unit(20, 8, seed=1), unit(7, 8, seed=2)
    tau = 0.1
    result = solve(x, y, temperature=tau, tolerance=1e-10)
    z = torch.exp((x @ y.T - result.zeta) / tau).sum(1)
    torch.testing.assert_close(result.log_z, z.log())
    expected = [
        tau * math.log(20 / 30 * sum(math.exp(float(x[i] @ t) / tau) / float(z[i]) for i in range(30))) for t in new
    ]
    torch.testing.assert_close(result.extend(new), torch.tensor(expected, dtype=torch.float64))


def test_extension_in_float32_follows_the_precision_of_the_solution() -> None:
    x, y = (t.float() for t in paired(50, 50))
    rough, fine = (solve(x, y, temperature=0.1, tolerance=t) for t in (1e-4, 1e-9))
    assert rough.extend(y).dtype == torch.float32
    torch.testing.assert_close(rough.extend(y), rough.zeta, atol=1.1e-5, rtol=0)
    torch.testing.assert_close(fine.extend(y), fine.zeta, atol=1e-9, rtol=0)


def test_far_away_candidates_get_a_finite_zeta_and_wrong_shapes_are_refused() -> None:
    x, y = unit(20, 8, seed=0), unit(15, 8, seed=1)
    result = solve(scores=x @ y.T, temperature=0.01)
    assert result.extend(-100 * x @ x[:2].T).isfinite().all()
    with pytest.raises(ValueError, match=r"y_new.*\(8, 5\)"):
        result.extend(torch.zeros(8, 5))
    for wrong, named in ((torch.zeros(5, 7), "y_new has 7 columns.* 8"), (torch.full((5, 8), math.nan), "y_new")):
        with pytest.raises(ValueError, match=named):
            solve(x, y, temperature=0.1).extend(wrong)
