"""The near field: pairs (i, j) with a large share of the plan, found without computing all scores.

Anchors and candidates are grouped into cells of similar features by k-means. For each cell of anchors the most similar
cells of candidates are searched, and for each cell of candidates the most similar cells of anchors: nearest neighbors
in both directions, as an inverted-file index finds them. With sqrt(n) cells per side, the cost grows as n sqrt(n). A
pair is near if its A_ij = exp((s_ij - zeta_j)/tau) / Z_i, at an estimate of zeta and Z, is above a threshold: the
neighbors under the score s_ij - zeta_j - tau log Z_i, as many per row and column as matter there.

Near pairs that the search misses stay in the far field, which is estimated from a sample.
"""

import math

import torch
from torch import Tensor

from nuclr.popularity.problem import Problem
from nuclr.popularity.rows import READ, Rows
from nuclr.popularity.sampled_kernel import TILE, Near

PROBES = 16  # cells searched per cell, in each direction
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
        The pairs.

    """
    assert problem.x is not None and problem.y is not None
    tau = problem.temperature
    cell_x, cell_y = (assign(t, c) for t, c in zip((problem.x, problem.y), centers, strict=True))
    order_x, starts_x = _by_cell(cell_x, len(centers[0]))
    order_y, starts_y = _by_cell(cell_y, len(centers[1]))
    searched = search_list(centers, _cell_means(zeta / tau, cell_y, len(centers[1])), tau)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    total = 0
    for cell, (start, stop) in enumerate(zip(starts_x, starts_x[1:], strict=False)):
        near_cells = searched[cell].nonzero().flatten().tolist()
        anchors = order_x[start:stop]
        if not len(anchors):
            continue
        candidates = torch.cat([order_y[starts_y[c] : starts_y[c + 1]] for c in near_cells])
        y = problem.y[candidates] / tau
        shift = (zeta[candidates] / -tau - threshold).to(y)
        for rows in anchors.split(max(1, TILE // max(1, len(candidates)))):
            logit = problem.x[rows] @ y.T
            above = logit + shift > log_z[rows, None].to(y)
            i, j = above.nonzero(as_tuple=True)
            found.append((rows[i].int(), candidates[j].int(), logit[i, j]))
            total += len(i)
        if total > most:
            break
    if not found:
        empty = torch.empty(0, dtype=torch.int32, device=zeta.device)
        return Near(empty, empty, torch.empty(0, dtype=problem.dtype, device=zeta.device))
    return Near(*(torch.cat(parts)[:most] for parts in zip(*found, strict=True)))


def search_list(centers: tuple[Tensor, Tensor], zeta: Tensor, temperature: float) -> Tensor:
    """Return which cells of candidates to search for which cells of anchors, (cells, cells) bool."""
    scores = centers[0] @ centers[1].T - (zeta * temperature).to(centers[0])
    searched = torch.zeros_like(scores, dtype=torch.bool)
    for dim in (0, 1):
        best = scores.topk(min(PROBES, scores.shape[dim]), dim=dim).indices
        searched.scatter_(dim, best, torch.ones_like(best, dtype=torch.bool))
    return searched


def make_cells(features: Rows | Tensor, mass: Tensor, generator: torch.Generator) -> Tensor:
    """Return the centers of about sqrt(n) cells of similar features, by k-means on some of them, (cells, d)."""
    count = max(1, math.isqrt(len(mass)))
    some = torch.randperm(len(mass), generator=generator)[: 32 * count].sort().values.to(mass.device)
    points = features[some]
    centers = points[torch.randperm(len(points), generator=generator)[:count].to(mass.device)]
    for _ in range(KMEANS_STEPS):
        cell = assign(points, centers)
        sums = torch.zeros_like(centers).index_add_(0, cell, points)
        empty = torch.bincount(cell, minlength=len(centers)) == 0
        centers = torch.nn.functional.normalize(torch.where(empty[:, None], centers, sums), dim=1)
    return centers


def assign(features: Rows | Tensor, centers: Tensor) -> Tensor:
    """Return the cell of each row, (n,)."""
    height = min(READ, max(1, TILE // len(centers)))
    parts = [(features[start : start + height] @ centers.T).argmax(dim=1) for start in range(0, len(features), height)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=centers.device)


def _by_cell(cell: Tensor, cells: int) -> tuple[Tensor, list[int]]:
    """Return the rows in the order of their cells, and where each cell starts."""
    counts = torch.bincount(cell, minlength=cells)
    return cell.argsort(stable=True), [0, *counts.cumsum(0).tolist()]


def _cell_means(values: Tensor, cell: Tensor, cells: int) -> Tensor:
    sums = values.new_zeros(cells).index_add_(0, cell, values)
    return sums / torch.bincount(cell, minlength=cells).clamp_min(1)
