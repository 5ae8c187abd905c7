"""The closed form for leaving one out, against really leaving one out."""

import torch

from nuclr.studies.popularity.sides import PENALTIES, align_ridge


def solve_without(row, x, targets, weight, penalty):
    """Ridge with a free intercept on all rows but one, then the prediction for that row."""
    others = torch.arange(len(x)) != row
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    w = weight[others, None]
    gram = design[others].T @ (w * design[others])
    gram += len(x) * penalty * torch.diag(torch.tensor([1.0] * x.shape[1] + [0.0], dtype=x.dtype))
    return design[row] @ torch.linalg.solve(gram, design[others].T @ (w * targets[others]))


def test_ridge_leaves_one_out():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, dtype=torch.float64, generator=generator)
    targets = x @ torch.randn(6, 3, dtype=torch.float64, generator=generator)
    targets += 0.5 * torch.randn(40, 3, dtype=torch.float64, generator=generator) + 2
    weight = torch.rand(40, dtype=torch.float64, generator=generator) + 0.5
    weight /= weight.mean()
    alignment = align_ridge(x, targets, weight)

    mean = weight @ x / 40
    scaled = (x - mean) / (weight @ (x - mean).square() / 40).sqrt()
    expected = torch.stack([solve_without(i, scaled, targets, weight, alignment.penalty) for i in range(40)])
    torch.testing.assert_close(alignment.x, expected)
    center = weight @ targets / 40
    error, spread = ((weight @ (targets - t).square()).sum() for t in (expected, center))
    assert abs(alignment.explained - (1 - error / spread)) < 1e-12
    assert alignment.explained > 0.7


def test_noise_explains_nothing():
    generator = torch.Generator().manual_seed(1)
    x, targets = (torch.randn(50, 10, generator=generator) for _ in range(2))
    alignment = align_ridge(x, targets, torch.ones(50))
    assert alignment.explained < 0.05
    assert alignment.penalty == max(PENALTIES)


def test_constant_columns_and_more_columns_than_rows():
    generator = torch.Generator().manual_seed(2)
    x = torch.cat([torch.randn(20, 50, generator=generator), torch.full((20, 1), 3.0)], dim=1)
    alignment = align_ridge(x, torch.randn(20, 4, generator=generator), torch.ones(20))
    assert alignment.x.isfinite().all()
