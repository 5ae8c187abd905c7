"""The section "examples" of a training page: queries with their five best answers, and the worst mistakes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from nuclr.data.pairs import Pairs
from nuclr.report import numbers
from nuclr.report.pictures import Label, Pictures
from nuclr.report.training_run import MOST_HELD_OUT, Sample, TrainingRun

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
class Item:
    """An image or a text as the page shows it. `picture` is a data URI."""

    kind: str
    number: int
    text: str
    picture: str | None = None


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
    """Examples of one direction, such as "Image to text"."""

    title: str
    random: list[ShownExample]
    worst: list[ShownExample]
    queries: int
    gallery: int


@dataclass(frozen=True)
class RetrievalExamples:
    """Content of the section; `source` says which pairs the examples are from."""

    source: str
    directions: list[Direction]


def retrieval_examples(context: TrainingRun) -> RetrievalExamples:
    """Return examples from the held-out pairs, or from the training pairs if the run has no others."""
    context.require_model()
    if not context.run.finished:
        context.note(f"Examples and popularity are those of the model after step {numbers.count(context.run.step)}.")
    held_out = context.val
    source = held_out or context.train
    sample = context.sample(source, context.affordable(source, MOST_HELD_OUT))
    described = "held-out pairs" if held_out else "training pairs (which the model was trained on)"
    if len(sample.features.numbers) < sample.total:
        drawn = numbers.count(len(sample.features.numbers))
        described += f" ({drawn} of {numbers.count(sample.total)}, drawn at random)"
    return RetrievalExamples(described, directions(sample, context.pictures(source.pairs)))


def directions(sample: Sample, picture: Pictures) -> list[Direction]:
    """Return the examples of both directions, with pictures and captions."""
    caption = caption_of(sample.pairs)
    features = sample.features

    def image(row: int) -> Item:
        number = int(features.x_number[row])
        return Item("image", number, sample.pairs.name(number), picture(number))

    def text(row: int) -> Item:
        number = int(features.y_number[row])
        return Item("text", number, caption(number) or f"caption {number}")

    to_text = find_examples(features.x, features.y, features.links)
    to_image = find_examples(features.y, features.x, features.links.flip(1))
    return [_show("Image to text", to_text, image, text), _show("Text to image", to_image, text, image)]


def caption_of(pairs: Pairs) -> Label:
    """Return a function from the number of a pair to its caption, or None if the data holds vectors."""
    return lambda number: str(pairs.y(number)) if pairs.y_kind == "text" else None


def _show(title: str, examples: Examples, query: Callable[[int], Item], answer: Callable[[int], Item]) -> Direction:
    def show(example: Example) -> ShownExample:
        return ShownExample(
            query=query(example.query),
            rank=example.rank,
            answers=[ShownAnswer(answer(a.row), a.score, a.right) for a in example.answers],
            right=ShownAnswer(answer(example.right), example.right_score, True),
        )

    return Direction(
        title=title,
        random=[show(example) for example in examples.random],
        worst=[show(example) for example in examples.worst],
        queries=examples.queries,
        gallery=examples.gallery,
    )
