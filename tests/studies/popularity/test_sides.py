"""Both sides against Sinkhorn's iteration over all pairs; the ridge regression against fits that leave out a row."""

import numpy as np
import pytest
import torch

from nuclr.data.formats.embeddings import Embeddings
from nuclr.errors import UserError
from nuclr.popularity import solve
from nuclr.studies.popularity.sides import PENALTIES, align_ridge, solve_sides, weigh_pairs

TAU = 0.2


@pytest.fixture
def file() -> Embeddings:
    """Return seven x, of which x[3] has no y, and twelve y."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 5, dtype=torch.float64, generator=generator) for n in (7, 12))
    return Embeddings(x=x, y=y, y_to_x=torch.tensor([0, 0, 0, 0, 1, 1, 2, 4, 4, 5, 6, 6]))


def sinkhorn(anchors, candidates, weight):
    """Return zeta of the candidates by fixed-point iteration; row i of both is pair i, with weight[i]."""
    s = (anchors @ candidates.T / TAU).exp()
    q = torch.ones(len(s), dtype=s.dtype)
    for _ in range(2000):
        z = s @ (weight / q)
        q = s.T @ (weight / z)
    zeta = TAU * q.log()
    return zeta - (weight * zeta).sum() / weight.sum()


def unit(rows):
    return rows / rows.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("weights", ["pairs", "x"])
def test_both_sides_solve_the_problem_of_the_weighted_pairs(file, weights):
    sides = solve_sides(weigh_pairs(file, weights, "none"), TAU, tolerance=1e-9, progress=False)
    x, y = unit(file.x)[file.y_to_x], unit(file.y)
    counts = file.y_to_x.bincount()
    weight = torch.ones(12, dtype=torch.float64) if weights == "pairs" else 1 / counts[file.y_to_x].double()
    weight = weight / weight.sum()

    np.testing.assert_allclose(sides["y"].zeta, sinkhorn(x, y, weight), atol=1e-6)
    of_pairs = sinkhorn(y, x, weight)
    assert sides["x"].row.tolist() == [0, 1, 2, 4, 5, 6]
    for row, number in enumerate(sides["x"].row):
        for pair in (file.y_to_x == number).nonzero().flatten():
            assert sides["x"].zeta[row] == pytest.approx(of_pairs[pair].item(), abs=1e-6)
    for side in sides.values():
        assert side.converged
        assert np.average(side.popularity, weights=side.weight) == pytest.approx(1)
        np.testing.assert_allclose(
            np.log(side.popularity) * TAU, side.zeta - side.zeta[0] + np.log(side.popularity[0]) * TAU
        )
        assert sorted(side.rank) == list(range(1, len(side.rank) + 1))
        assert side.zeta[side.order()].tolist() == sorted(side.zeta, reverse=True)
        assert 1 < side.effective_number() < len(side.zeta)


def test_the_effective_number_of_equally_popular_samples_is_their_number():
    same = torch.eye(4, dtype=torch.float64)
    sides = solve_sides(
        weigh_pairs(Embeddings(same, same, torch.arange(4)), "pairs", "none"), TAU, tolerance=1e-9, progress=False
    )
    assert sides["y"].effective_number() == pytest.approx(4)


def test_different_widths_need_ridge_regression(file):
    wide = Embeddings(torch.cat([file.x, file.x[:, :2]], dim=1), file.y, file.y_to_x)
    with pytest.raises(UserError, match=r"(?s)x has width 7 and y has width 5.*--align ridge") as refused:
        weigh_pairs(wide, "pairs", "none")
    assert len(str(refused.value).splitlines()) <= 2
    pairs = weigh_pairs(wide, "pairs", "ridge")
    assert pairs.x.shape == (6, 5)
    assert pairs.alignment is not None
    torch.testing.assert_close(pairs.x.norm(dim=1), torch.ones(6, dtype=torch.float64))


def test_wrong_embeddings_are_refused(file):
    with pytest.raises(UserError, match="all pairs have the same x, row 2"):
        weigh_pairs(Embeddings(file.x, file.y, torch.full((12,), 2)), "pairs", "none")
    with pytest.raises(UserError, match="y: row 4 is all zeros"):
        y = file.y.clone()
        y[4] = 0
        weigh_pairs(Embeddings(file.x, y, file.y_to_x), "pairs", "none")
    with pytest.raises(UserError, match="x: row 5 is all zeros"):  # its row in the file, although x[3] is left out
        x = file.x.clone()
        x[5] = 0
        weigh_pairs(Embeddings(x, file.y, file.y_to_x), "pairs", "none")
    with pytest.raises(UserError, match="--device nowhere"):
        solve_sides(weigh_pairs(file, "pairs", "none"), TAU, device="nowhere")


def test_python_and_the_command_line_agree_on_features_of_any_norm(file):
    """The command scales the rows of a file to unit norm; `solve` does the same with `normalize=True`."""
    pairs = Embeddings(x=3 * file.x, y=file.y[:7], y_to_x=torch.arange(7))
    sides = solve_sides(weigh_pairs(pairs, "pairs", "none"), TAU, tolerance=1e-10)
    result = solve(pairs.x, pairs.y, temperature=TAU, tolerance=1e-10, normalize=True)
    assert np.allclose(sides["y"].zeta, result.zeta.numpy(), atol=1e-8)
    with pytest.raises(ValueError, match="normalize=True"):
        solve(pairs.x, pairs.y, temperature=TAU)


def solve_without(row, x, targets, weight, penalty):
    """Return the prediction for a row by a ridge regression, with free intercept, on all other rows."""
    others = torch.arange(len(x)) != row
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    w = weight[others, None]
    gram = design[others].T @ (w * design[others])
    gram += len(x) * penalty * torch.diag(torch.tensor([1.0] * x.shape[1] + [0.0], dtype=x.dtype))
    return design[row] @ torch.linalg.solve(gram, design[others].T @ (w * targets[others]))


def test_each_row_is_predicted_by_the_fit_on_the_other_rows():
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


def test_noise_has_no_explained_variance_and_the_largest_penalty():
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
