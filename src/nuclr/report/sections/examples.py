"""The section "examples" of a training page: queries with their five best answers, and the worst mistakes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from nuclr.report import numbers
from nuclr.report.items import Item, Items
from nuclr.report.training_run import MOST_HELD_OUT, Sample, TrainingRun
from nuclr.runs.side_words import direction, heading

ANSWERS = 5
TILE = 2**24  # scores that are computed at a time


@dataclass(frozen=True)
class Answer:
    """A row of the gallery with its score; `right` if it belongs to the query."""

    row: int
    score: float
    right: bool


@dataclass(frozen=True)
class Example:
    """The row of a query, its best answers, and its best right answer: rank (1 is first), row and score."""

    query: int
    answers: list[Answer]
    rank: int
    right: int
    right_score: float


@dataclass(frozen=True)
class Examples:
    """Random queries, and those with the worst mistakes. `queries` and `gallery` are the numbers of rows."""

    random: list[Example]
    worst: list[Example]
    queries: int
    gallery: int


def find_examples(queries: Tensor, gallery: Tensor, links: Tensor, count: int = 4, seed: int = 0) -> Examples:
    """Return examples of retrieval.

    Args:
        queries: (n, d) features.
        gallery: (m, d) features.
        links: (k, 2), row of a query and row of the gallery that belong together. Queries without a right answer are
            left out.
        count: number of random queries, and of mistakes. The worst mistakes are the queries whose best
            wrong answer outscores their best right answer by the largest margin.
        seed: of the random choice.

    """
    asked = torch.unique(links[:, 0])
    order = torch.randperm(len(asked), generator=Generator().manual_seed(seed))
    chosen = asked[order[:count]].tolist()
    margins = torch.cat([_margin(queries, gallery, links, rows) for rows in asked.split(max(1, TILE // len(gallery)))])
    hardest = torch.argsort(margins, descending=True, stable=True)
    worst = [int(asked[k]) for k in hardest[:count].tolist() if margins[k] > 0]
    return Examples(
        random=[find_answers(queries, gallery, links, row) for row in chosen],
        worst=[find_answers(queries, gallery, links, row) for row in worst],
        queries=len(asked),
        gallery=len(gallery),
    )


def find_answers(queries: Tensor, gallery: Tensor, links: Tensor, row: int) -> Example:
    """Return the best answers to one query. Among equal scores, wrong answers count as first."""
    scores = gallery @ queries[row]
    own = torch.zeros(len(gallery), dtype=torch.bool)
    own[links[links[:, 0] == row, 1]] = True
    right = int(scores.masked_fill(~own, -torch.inf).argmax())
    rank = 1 + int(((scores >= scores[right]) & ~own).sum())
    top = scores.topk(min(ANSWERS, len(gallery)))
    answers = [Answer(k, s, bool(own[k])) for k, s in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
    return Example(row, answers, rank, right, float(scores[right]))


def _margin(queries: Tensor, gallery: Tensor, links: Tensor, rows: Tensor) -> Tensor:
    """Return score of the best wrong minus score of the best right answer, for these queries (ascending rows)."""
    scores = queries[rows] @ gallery.T
    own_links = links[torch.isin(links[:, 0], rows)]
    own = torch.zeros_like(scores, dtype=torch.bool)
    own[torch.searchsorted(rows, own_links[:, 0].contiguous()), own_links[:, 1]] = True
    wrong = scores.masked_fill(own, -torch.inf).amax(dim=1)
    return wrong - scores.masked_fill(~own, -torch.inf).amax(dim=1)


@dataclass(frozen=True)
class ShownAnswer:
    """An answer as the page shows it."""

    item: Item
    score: float
    right: bool


@dataclass(frozen=True)
class ShownExample:
    """A query with its answers as the page shows them."""

    query: Item
    rank: int
    answers: list[ShownAnswer]
    right: ShownAnswer


@dataclass(frozen=True)
class Direction:
    """Examples of one direction, such as "Image to text"; `name` is how a sentence names it."""

    name: str
    title: str
    random: list[ShownExample]
    worst: list[ShownExample]
    queries: int
    gallery: int


@dataclass(frozen=True)
class RetrievalExamples:
    """Content of the section.

    Attributes:
        source: which pairs the examples are from.
        directions: examples of both directions.
        views: True if both sides are views of the same items. Each query is then left out of its own answers, and
            there are no right answers.

    """

    source: str
    directions: list[Direction]
    views: bool


def retrieval_examples(context: TrainingRun) -> RetrievalExamples:
    """Return examples from the held-out pairs, or from the training pairs if the run has no others."""
    context.require_model()
    if not context.run.finished:
        context.note(f"Examples and popularity are those of the model after step {numbers.count(context.run.step)}.")
    held_out = context.val
    source = held_out or context.train
    sample = context.sample(source, context.affordable(source, MOST_HELD_OUT))
    items = context.items(source.pairs)
    things = items.x_words.many if context.views else "pairs"
    described = f"held-out {things}" if held_out else f"training {things} (which the model was trained on)"
    if len(sample.features.numbers) < sample.total:
        drawn = numbers.count(len(sample.features.numbers))
        described += f" ({drawn} of {numbers.count(sample.total)}, drawn at random)"
    shown = [nearest_neighbors(sample, items)] if context.views else directions(sample, items)
    return RetrievalExamples(described, shown, context.views)


def directions(sample: Sample, items: Items) -> list[Direction]:
    """Return the examples of both directions."""
    features = sample.features

    def x(row: int) -> Item:
        return items.item("x", int(features.x_number[row]))

    def y(row: int) -> Item:
        return items.item("y", int(features.y_number[row]))

    x_to_y = find_examples(features.x, features.y, features.links)
    y_to_x = find_examples(features.y, features.x, features.links.flip(1))
    names = items.x_words.name, items.y_words.name
    return [_show(direction(*names), x_to_y, x, y), _show(direction(*names[::-1]), y_to_x, y, x)]


def nearest_neighbors(sample: Sample, items: Items, count: int = 6, seed: int = 0) -> Direction:
    """Return random items with the items that are nearest to them, for a run on views of the same items."""
    features = sample.features
    shown = []
    for row in torch.randperm(len(features.x), generator=Generator().manual_seed(seed))[:count].tolist():
        scores = (features.x @ features.x[row]).index_fill(0, torch.tensor([row]), -torch.inf)
        top = scores.topk(min(ANSWERS, len(features.x) - 1))
        answers = [
            ShownAnswer(items.item("x", int(features.x_number[k])), score, False)
            for k, score in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        shown.append(ShownExample(items.item("x", int(features.x_number[row])), 1, answers, answers[0]))
    title = f"Nearest {items.x_words.many}"
    return Direction(title, title, shown, [], len(features.x), len(features.x) - 1)


def _show(name: str, examples: Examples, query: Callable[[int], Item], answer: Callable[[int], Item]) -> Direction:
    def show(example: Example) -> ShownExample:
        return ShownExample(
            query=query(example.query),
            rank=example.rank,
            answers=[ShownAnswer(answer(a.row), a.score, a.right) for a in example.answers],
            right=ShownAnswer(answer(example.right), example.right_score, True),
        )

    return Direction(
        name=name,
        title=heading(name),
        random=[show(example) for example in examples.random],
        worst=[show(example) for example in examples.worst],
        queries=examples.queries,
        gallery=examples.gallery,
    )
