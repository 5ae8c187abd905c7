"""Retrieval that one can look at: queries with their five best answers, some at random, and the worst mistakes."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

ANSWERS = 5
TILE = 2**24  # scores at a time


@dataclass(frozen=True)
class Answer:
    """A row of the gallery, its score, and whether it is right."""

    row: int
    score: float
    right: bool


@dataclass(frozen=True)
class Example:
    """A query's row, its best answers, the place of its best right one (1 is first) with row and score."""

    query: int
    answers: list[Answer]
    rank: int
    right: int
    right_score: float


@dataclass(frozen=True)
class Examples:
    """Of `queries` queries in a gallery of `gallery`: some at random, and those with the surest wrong answers."""

    random: list[Example]
    worst: list[Example]
    queries: int
    gallery: int


def examples(queries: Tensor, gallery: Tensor, links: Tensor, count: int = 4, seed: int = 0) -> Examples:
    """Examples of retrieving from `gallery` (m, d) with `queries` (n, d); links: (k, 2), rows that belong together.

    The worst mistake is the one whose best wrong answer lies furthest above the best right one. Queries without a right
    answer in the gallery are left out.
    """
    asked = torch.unique(links[:, 0])
    order = torch.randperm(len(asked), generator=Generator().manual_seed(seed))
    chosen = asked[order[:count]].tolist()
    margins = torch.cat([_margin(queries, gallery, links, rows) for rows in asked.split(max(1, TILE // len(gallery)))])
    hardest = torch.argsort(margins, descending=True, stable=True)
    worst = [int(asked[k]) for k in hardest[: 4 * count].tolist() if margins[k] > 0]
    return Examples(
        random=[example(queries, gallery, links, row) for row in chosen],
        worst=[example(queries, gallery, links, row) for row in worst[:count]],
        queries=len(asked),
        gallery=len(gallery),
    )


def example(queries: Tensor, gallery: Tensor, links: Tensor, row: int) -> Example:
    """What this query finds; equal scores are counted as if the wrong ones came first."""
    scores = gallery @ queries[row]
    own = torch.zeros(len(gallery), dtype=torch.bool)
    own[links[links[:, 0] == row, 1]] = True
    best = scores.masked_fill(~own, -torch.inf)
    right = int(best.argmax())
    rank = 1 + int(((scores >= scores[right]) & ~own).sum())
    top = scores.topk(min(ANSWERS, len(gallery)))
    answers = [Answer(k, s, bool(own[k])) for k, s in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
    return Example(row, answers, rank, right, float(scores[right]))


def _margin(queries: Tensor, gallery: Tensor, links: Tensor, rows: Tensor) -> Tensor:
    """By how much the best wrong answer is above the best right one, for these queries (ascending rows)."""
    scores = queries[rows] @ gallery.T
    here = links[torch.isin(links[:, 0], rows)]
    own = torch.zeros_like(scores, dtype=torch.bool)
    own[torch.searchsorted(rows, here[:, 0].contiguous()), here[:, 1]] = True
    wrong = scores.masked_fill(own, -torch.inf).amax(dim=1)
    return wrong - scores.masked_fill(~own, -torch.inf).amax(dim=1)
