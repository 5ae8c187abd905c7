"""Both sides against Sinkhorn's iteration over all pairs; lists of pairs to keep."""

import numpy as np
import pytest
import torch

from nuclr import files
from nuclr.errors import UserError
from nuclr.studies.items.popularity_report import PopularityReport, popularity_report

TAU = 0.2
Y_TO_X = np.array([0, 0, 0, 0, 1, 1, 2, 3, 3, 4, 5, 5])


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """Return six x and twelve y."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 5, dtype=torch.float64, generator=generator) for n in (6, 12))
    return {"x": x.numpy(), "y": y.numpy(), "y_to_x": Y_TO_X}


def report_of(tmp_path, **changed) -> PopularityReport:
    np.savez(tmp_path / "pairs.npz", **changed)
    return popularity_report(tmp_path / "pairs.npz", temperature=TAU)


def sinkhorn(anchors, candidates):
    """Return zeta of the candidates by fixed-point iteration; row i of both is pair i."""
    s = np.exp(anchors @ candidates.T / TAU)
    q = np.ones(len(s))
    for _ in range(2000):
        z = s @ (1 / q)
        q = s.T @ (1 / z)
    zeta = TAU * np.log(q)
    return zeta - zeta.mean()


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_both_sides_solve_the_problem_of_all_pairs(tmp_path, arrays):
    report = report_of(tmp_path, **arrays)
    x = unit(arrays["x"])[Y_TO_X]
    y = unit(arrays["y"])
    np.testing.assert_allclose(report.sides["y"].zeta, sinkhorn(x, y), atol=1e-4)
    np.testing.assert_allclose(report.sides["x"].zeta[Y_TO_X], sinkhorn(y, x), atol=1e-4)
    assert report.converged
    for side in report.sides.values():
        order = np.argsort(-side.zeta)
        assert [item.row for item in side.most_popular] == order[:10].tolist() and side.most_popular[0].rank == 1
        assert side.least_popular[0].rank == len(order)
        assert 1 < side.effective_number < len(order)
    first = report.sides["y"].most_popular[0]
    assert first.pair.row == Y_TO_X[first.row]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"y_to_x": np.full(12, 2)}, "5 rows of x"),
        ({"x": np.ones((1, 5)), "y_to_x": np.zeros(12, int)}, "same x"),
        ({"y_to_x": np.full(12, 6)}, "y_to_x"),
        ({"y_to_x": np.zeros(5, int)}, "y_to_x"),
        ({"x": np.ones((6, 4))}, "width 4 and y has width 5"),
        ({"y": np.zeros((12, 5))}, "pairs.npz:y: row 0"),
        ({"x": np.full((6, 5), np.nan)}, "pairs.npz:x"),
    ],
)
def test_wrong_embeddings_are_refused(tmp_path, arrays, changed, named):
    with pytest.raises(UserError, match=named):
        report_of(tmp_path, **(arrays | changed))


def test_likely_false_negatives(tmp_path):
    """x 0 is closest to y 1, and so on: all four are found, with both scores."""
    equal = report_of(tmp_path, x=np.eye(4), y=np.eye(4))
    assert equal.sides["y"].effective_number == pytest.approx(4)
    y = np.array([[0.6, 0.8, 0, 0], [0.8, 0.6, 0, 0], [0, 0, 0.6, 0.8], [0, 0, 0.8, 0.6]])
    found = report_of(tmp_path, x=np.eye(4), y=y).false_negatives
    assert {(row.x.row, row.y.row, row.own.row) for row in found.rows} == {(0, 1, 0), (1, 0, 1), (2, 3, 2), (3, 2, 3)}
    assert found.share == 1 and found.rows[0].score > found.rows[0].own_score


def test_a_report_is_read_back_from_its_json(tmp_path, arrays):
    report = report_of(tmp_path, **arrays)
    again = files.from_record(PopularityReport, report.to_json())
    assert again.sides == report.sides and again.false_negatives == report.false_negatives
    assert again.to_json() == report.to_json()
