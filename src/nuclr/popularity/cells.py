"""Cells of similar rows, and for each cell the rows of the other side that matter to it.

Rows are grouped into cells by k-means. All rows of a cell share one sample of the other side, so that their scores form
a dense block. The sample is drawn with probabilities that follow the size of the terms in the sums of the cell's
rows: near rows are drawn with certainty, and far ones rarely, with a weight of 1 / probability. The sums are unbiased,
whatever the cells are. Good cells make their variance small.

Computing the size of all terms would be as expensive as the exact sums, so the rows are drawn in two steps. The first
predicts the size from the centers of a few parts of the cell and draws several times more rows than needed. The second
computes the terms of these and draws the sample from them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr.arrays import BLOCK, Rows
from nuclr.popularity.kernel import LOG2_E
from nuclr.popularity.sampling import draw_uniform, log_priority_weight, priority_sample

# Numbers per cell, on average
MOST_ROWS = 100
LEAST_ROWS = 8
DRAWN_PER_ROW = 20  # rows drawn per row of a cell: a small sample must not be shared by many
MOST_CENTERS = 8192  # of all cells of a side
MOST_PARTS = 8  # centers per cell
LARGEST_CELL = 512  # rows; a larger cell is cut
KMEANS_STEPS = 5
PART_STEPS = 3
KMEANS_POINTS = 2**17
UNIFORM = 0.05  # share of the sample drawn without regard to the centers, which bounds the weights
LEAST_TERM = 1e-3  # times the mean term: bounds the weights of the second step
SEARCHED = 4  # rows drawn in the first step per row of the sample
SCORES = 2**26  # scores held at a time
GUESS = 0.7  # times the threshold of the cell before, which is a guess of a lower bound of the next one


@dataclass(frozen=True)
class Cell:
    """Rows of a cell, (r,), the means of its parts, (parts, d), and the share of each part in the rows, (parts,)."""

    rows: Tensor
    centers: Tensor
    shares: Tensor


class Draws:
    """The samples of the other side for some cells, in order of priority: the first m rows are a sample of size m.

    All samples are in four matrices: thousands of small tensors among large temporary ones would fragment the
    memory.

    Attributes:
        index: Rows, (cells, k) int32.
        log_weight: Logarithm of their weight from the first step, (cells, k).
        size: Root mean square of their terms, (cells, k).
        priority: Size divided by a random number, decreasing, (cells, k).

    """

    def __init__(
        self,
        cells: int,
        count: int,
        like: Tensor,
    ) -> None:
        self.index = torch.empty(
            cells,
            count,
            dtype=torch.int32,
            device=like.device,
        )
        self.log_weight, self.size, self.priority = (like.new_empty(cells, count) for _ in range(3))

    def first(self, cell: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the first rows drawn for a cell, in ascending order, and the logarithms of their weights."""
        index, order = self.index[cell, :count].sort()
        weight = self.log_weight[cell, :count] + log_priority_weight(self.size[cell], self.priority[cell], count)
        return index, weight[order]


def make_cells(
    features: Rows,
    size: int,
    generator: torch.Generator,
) -> list[Cell]:
    """Group rows into cells of similar features, for each of which `size` rows will be drawn."""
    rows_per_cell = max(LEAST_ROWS, min(MOST_ROWS, size // DRAWN_PER_ROW))
    count = max(1, min(len(features) // rows_per_cell, MOST_CENTERS))
    parts = max(1, min(MOST_PARTS, MOST_CENTERS // count))
    points = torch.randperm(len(features), generator=generator)[: min(32 * count, KMEANS_POINTS)].sort().values
    centers = kmeans(features[points.to(features.device)], count, KMEANS_STEPS, generator)
    home = torch.cat([nearest_center(features[rows], centers) for rows in features.tiles(BLOCK)])
    members = torch.split(home.argsort(stable=True), torch.bincount(home, minlength=count).tolist())
    cut = [rows for cell in members for rows in torch.split(cell, LARGEST_CELL) if len(rows)]
    return [_make_cell(rows, features[rows], parts, generator) for rows in cut]


def draw_rows(
    cells: list[Cell],
    many: Rows,
    few: Rows,
    temperature: float,
    log_weight: Tensor,
    size: int,
    seed: int,
) -> Draws:
    """Draw rows of the other side for each cell.

    Args:
        cells: Cells of one side.
        many: Features of this side, (n, d).
        few: Features of the other side, (m, d).
        temperature: tau.
        log_weight: Logarithm of the factor of exp(score / tau) of each row of the other side in the sums, (m,).
        size: Number of rows to draw per cell.
        seed: Of the random numbers; the draws do not depend on which cells are drawn together.

    Returns:
        The samples.

    """
    shift = log_weight.to(few.dtype)
    present = shift.isfinite()
    uniform_share = UNIFORM / present.sum() * present
    generator = torch.Generator(shift.device)
    draws = Draws(len(cells), min(size + 1, len(few)), shift)
    largest = max((len(cell.rows) for cell in cells), default=0)
    searched = SEARCHED * size
    buffer = shift.new_empty(largest * min(searched, len(few)))
    # One long vector of random numbers, from which each cell takes a part at a random place: drawing new ones for each
    # cell would take longer than everything else.
    random = draw_uniform(2 * len(few), shift, generator.manual_seed(seed))
    parts = max((len(cell.centers) for cell in cells), default=1)
    together = max(1, SCORES // (parts * len(few)))
    threshold = 0.0
    for start in range(0, len(cells), together):
        group = cells[start : start + together]
        for number, predicted in enumerate(_predict(group, few, temperature, shift), start):
            cell = cells[number]
            predicted = predicted.mul_((1 - UNIFORM) / predicted.sum()).add_(uniform_share)
            generator.manual_seed(seed + int(cell.rows[0]))
            first = int(
                torch.randint(
                    len(few),
                    (),
                    generator=generator,
                    device=shift.device,
                )
            )
            index, sizes, priority = priority_sample(predicted, searched, random[first : first + len(few)], threshold)
            threshold = GUESS * float(priority[-1])
            index, order = index[:searched].sort()
            weight = log_priority_weight(sizes, priority, searched)[order]
            term = _terms(many[cell.rows], few[index], temperature, shift[index] + weight, buffer)
            uniform = draw_uniform(len(term), term, generator)
            chosen, draws.size[number], draws.priority[number] = priority_sample(term, size, uniform)
            draws.index[number] = index[chosen]
            draws.log_weight[number] = weight[chosen]
    return draws


def _predict(
    cells: list[Cell],
    few: Rows,
    temperature: float,
    shift: Tensor,
) -> Iterator[Tensor]:
    """Yield, per cell, the predicted share of each row of the other side in the sums of the cell's rows, (m,)."""
    centers = torch.cat([cell.centers for cell in cells]) / temperature
    block = centers.new_empty(len(centers), len(few))
    for rows in few.tiles(BLOCK):
        torch.addmm(
            shift[rows],
            centers,
            few[rows].T,
            out=block[:, rows],
        )
    block.sub_(block.amax(dim=1, keepdim=True)).exp_()
    factor = torch.cat([cell.shares for cell in cells]).sqrt_() / block.sum(dim=1)
    for own, scale in zip(
        *(torch.split(t, [len(cell.centers) for cell in cells]) for t in (block, factor)), strict=True
    ):
        yield own[0].mul_(scale) if len(own) == 1 else torch.linalg.vector_norm(own.mul_(scale[:, None]), dim=0)


def _terms(
    many: Tensor,
    few: Tensor,
    temperature: float,
    shift: Tensor,
    buffer: Tensor,
) -> Tensor:
    """Return the root mean square, over the rows of a cell, of each term's share in the sum, (len(few),)."""
    block = buffer[: len(many) * len(few)].view(len(many), len(few))
    torch.addmm(
        shift,
        many,
        few.T,
        alpha=1 / temperature,
        out=block,
    )
    block.sub_(block.amax(dim=1, keepdim=True)).mul_(LOG2_E).exp2_()
    factor = block.sum(dim=1).square_().mul_(len(many)).reciprocal_()
    return (factor @ block.square_()).sqrt_().clamp_min_(LEAST_TERM / len(few))


def _make_cell(
    rows: Tensor,
    features: Tensor,
    parts: int,
    generator: torch.Generator,
) -> Cell:
    centers = kmeans(features, min(parts, len(rows)), PART_STEPS, generator) if parts > 1 else features[:1]
    home = nearest_center(features, centers)
    count = torch.bincount(home, minlength=len(centers))
    sums = torch.zeros_like(centers).index_add_(0, home, features)
    kept = count > 0
    return Cell(rows, sums[kept] / count[kept, None], count[kept].to(features) / len(rows))


def kmeans(
    points: Tensor,
    count: int,
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    """Return centers of groups of similar unit vectors, as unit vectors, (count, d)."""
    centers = points[torch.randperm(len(points), generator=generator)[:count].to(points.device)]
    for _ in range(steps):
        home = nearest_center(points, centers)
        sums = torch.zeros_like(centers).index_add_(0, home, points)
        empty = torch.bincount(home, minlength=count) == 0
        centers = torch.nn.functional.normalize(torch.where(empty[:, None], centers, sums), dim=1)
    return centers


def nearest_center(features: Tensor, centers: Tensor) -> Tensor:
    """Return the center with the largest score for each row, (n,)."""
    height = max(1, SCORES // (16 * len(centers)))
    return torch.cat([(part @ centers.T).argmax(dim=1) for part in torch.split(features, height)])
