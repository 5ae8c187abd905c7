"""The near field: pairs (i, j) with a large share of the plan, found without computing all scores.

Anchors and candidates are grouped into cells of similar features by k-means. Each anchor searches the cells of
candidates whose centers are nearest to it, and each candidate the cells of anchors: nearest neighbors in both
directions, as an inverted-file index finds them. With sqrt(n) cells per side, the cost grows as n sqrt(n). A
pair is near if its A_ij = exp((s_ij - zeta_j)/tau) / Z_i, at an estimate of zeta and Z, is above a threshold: the
neighbors under the score s_ij - zeta_j - tau log Z_i, as many per row and column as matter there.

Near pairs that the search misses stay in the far field, which is estimated from a sample.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from nuclr.popularity.problem import Problem
from nuclr.popularity.rows import READ, Rows
from nuclr.popularity.sampled_kernel import TILE, Near

MOST_PROBES, LEAST_PROBES = 32, 8  # cells that each anchor and each candidate searches
SEARCHED = 12_000  # rows in these cells, unless there are fewer or more probes
KMEANS_STEPS = 5


def find_near(
    problem: Problem, zeta: Tensor, log_z: Tensor, threshold: float, centers: tuple[Tensor, Tensor], most: int
) -> Near:
    """Return pairs with log A_ij above a threshold.

    Args:
        problem: The problem with the anchors of this process.
        zeta: Estimate of zeta, (n_y,).
        log_z: Estimate of log Z of these anchors, (n_x,).
        threshold: Least log A_ij.
        centers: Cells of the anchors and of the candidates, see `make_cells`.
        most: Largest number of pairs; the search stops there.

    Returns:
        The pairs, each once.

    """
    x, y, tau = problem.x, problem.y, problem.temperature
    assert x is not None and y is not None
    probed_y, probed_x = (nearest_cells(t, c, probes(len(c))) for t, c in ((x, centers[1]), (y, centers[0])))
    home_x, home_y = (nearest_cells(t, c, 1)[:, 0] for t, c in ((x, centers[0]), (y, centers[1])))
    height = (zeta / tau + threshold).to(problem.dtype)
    log_z = log_z.to(problem.dtype)
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def search(anchors: Tensor, candidates: Tensor, again: bool) -> None:
        right = y[candidates] / tau
        for rows in torch.split(anchors, max(1, TILE // max(1, len(candidates)))):
            logit = x[rows] @ right.T
            i, j = (logit - height[candidates] > log_z[rows, None]).nonzero(as_tuple=True)
            logit, i, j = logit[i, j], rows[i], candidates[j]
            if again:  # leave out what the anchors have found in their own search
                new = (probed_y[i] != home_y[j, None]).all(dim=1)
                logit, i, j = logit[new], i[new], j[new]
            found.append((i.int(), j.int(), logit))

    for anchors, candidates in zip(_visitors(probed_y, centers[1]), _members(home_y, centers[1]), strict=True):
        search(anchors, candidates, again=False)
    for candidates, anchors in zip(_visitors(probed_x, centers[0]), _members(home_x, centers[0]), strict=True):
        search(anchors, candidates, again=True)
    return Near(*(torch.cat(parts)[:most] for parts in zip(*found, strict=True)))


def probes(cells: int) -> int:
    """Return how many cells to search if there are so many, each with about as many rows."""
    return min(MOST_PROBES, max(LEAST_PROBES, SEARCHED // cells))


def nearest_cells(features: Rows | Tensor, centers: Tensor, count: int) -> Tensor:
    """Return the cells whose centers have the largest scores for each row, (n, count)."""
    height, count = min(READ, max(1, TILE // len(centers))), min(count, len(centers))
    out = torch.empty(len(features), count, dtype=torch.int32, device=centers.device)
    for start in range(0, len(features), height):
        out[start : start + height] = (features[start : start + height] @ centers.T).topk(count, dim=1).indices
    return out


def _visitors(probed: Tensor, centers: Tensor) -> Iterable[Tensor]:
    """Return, per cell, the rows that search it; `probed` is (n, probes)."""
    order = probed.flatten().argsort(stable=True) // probed.shape[1]
    return torch.split(order, torch.bincount(probed.flatten(), minlength=len(centers)).tolist())


def _members(home: Tensor, centers: Tensor) -> Iterable[Tensor]:
    """Return, per cell, the rows in it; `home` is (n,)."""
    return _visitors(home[:, None], centers)


def make_cells(features: Rows | Tensor, mass: Tensor, generator: torch.Generator) -> Tensor:
    """Return the centers of about sqrt(n) cells of similar features, by k-means on some of them, (cells, d)."""
    count = max(1, math.isqrt(len(mass)))
    some = torch.randperm(len(mass), generator=generator)[: 32 * count].sort().values.to(mass.device)
    points = features[some]
    centers = points[torch.randperm(len(points), generator=generator)[:count].to(mass.device)]
    for _ in range(KMEANS_STEPS):
        cell = nearest_cells(points, centers, 1)[:, 0]
        sums = torch.zeros_like(centers).index_add_(0, cell, points)
        empty = torch.bincount(cell, minlength=len(centers)) == 0
        centers = torch.nn.functional.normalize(torch.where(empty[:, None], centers, sums), dim=1)
    return centers
