"""Samples per cell: sums are exact if everything is drawn, and unbiased otherwise."""

import pytest
import torch
from torch import Tensor

from nuclr.arrays import Rows
from nuclr.popularity import SparseOptions, solve
from nuclr.popularity.cell_kernel import CellSums
from nuclr.popularity.cells import draw_rows, make_cells
from nuclr.popularity.sampling import draw_uniform, log_priority_weight, priority_sample
from tests.popularity.test_sparse import clustered

TAU = 0.1


def cell_sums(x: Tensor, y: Tensor, log_weight: Tensor, size: int, *, keep: bool, seed: int = 0) -> Tensor:
    many, few = Rows(y, y.dtype), Rows(x, x.dtype)
    cells = make_cells(many, size, torch.Generator().manual_seed(seed))
    draws = draw_rows(cells, many, few, TAU, log_weight, size, seed)
    return CellSums(many, few, TAU, cells, draws, size, keep).log_sums(log_weight)


def exact_sums(x: Tensor, y: Tensor, log_weight: Tensor) -> Tensor:
    return (y.double() @ x.double().T / TAU + log_weight).logsumexp(dim=1)


def test_priority_samples_are_unbiased():
    size, value = torch.tensor([5.0, 1.0, 0.2, 0.1, 0.0]), torch.tensor([3.0, 2.0, 1.0, 4.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    sums = []
    for _ in range(5_000):
        rows, drawn, priority = priority_sample(size, 2, draw_uniform(5, size, generator))
        sums.append(value[rows[:2]] @ log_priority_weight(drawn, priority, 2).exp())
    mean, error = torch.stack(sums).mean(), torch.stack(sums).std() / len(sums) ** 0.5
    assert abs(float(mean) - 10) < 5 * float(error)


def test_priority_samples_do_not_depend_on_the_guess():
    generator = torch.Generator().manual_seed(0)
    size, uniform = (draw_uniform(1000, torch.zeros(()), generator) for _ in range(2))
    expected = priority_sample(size, 50, uniform)
    smallest = float(expected[2][-1])
    for guess in (0.7 * smallest, smallest, 2 * smallest):
        for drawn, same in zip(priority_sample(size, 50, uniform, guess), expected, strict=True):
            torch.testing.assert_close(drawn, same, atol=0, rtol=0)


@pytest.mark.parametrize(("keep", "tolerance"), [(False, 1e-5), (True, 2e-3)])
def test_drawing_everything_gives_exact_sums(keep: bool, tolerance: float):
    x, y = clustered(300, 200)
    log_weight = torch.randn(300, generator=torch.Generator().manual_seed(0)).double()
    sums = cell_sums(x, y, log_weight, 300, keep=keep)
    torch.testing.assert_close(sums, exact_sums(x, y, log_weight), atol=tolerance, rtol=0)


def test_sums_are_unbiased():
    x, y = clustered(600, 100)
    log_weight = torch.randn(600, generator=torch.Generator().manual_seed(0)).double()
    exact = exact_sums(x, y, log_weight)
    ratios = torch.stack([(cell_sums(x, y, log_weight, 60, keep=False, seed=s) - exact).exp() for s in range(60)])
    error = ratios.mean(dim=1).std() / len(ratios) ** 0.5
    assert abs(float(ratios.mean()) - 1) < 5 * float(error)


@pytest.mark.parametrize("size", [30, 100, 200, 399])
def test_rows_without_weight_do_not_count(size: int):
    x, y = clustered(400, 150)
    log_weight = torch.full((400,), -torch.inf).double()
    log_weight[::4] = 0
    sums = cell_sums(x, y, log_weight, size, keep=True)
    expected = exact_sums(x[::4], y, log_weight[::4])
    torch.testing.assert_close(sums, expected, atol=2e-3 if size >= 100 else 1.0, rtol=0)


def test_equal_rows():
    x, y = clustered(1000, 1)
    result = solve(
        x, y.expand(1500, -1), temperature=0.05, method="sparse", sparse=SparseOptions(sample=64, neighbors=64)
    )
    assert float(result.zeta.std()) < 1e-3
