"""What a trained model does with samples: queries with their best answers, and the popularity of training items.

The popularity of an item is how many queries would pick it, as a multiple of the mean of all items.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from nuclr.data.side import SideName
from nuclr.evaluation import rank_correlation
from nuclr.report import numbers
from nuclr.report.charts import Chart, scatter
from nuclr.report.page import Answer, Block, Example, Fold, Text
from nuclr.report.pages import popularity as popularity_page
from nuclr.report.pages.hubness import ItemView
from nuclr.report.training_run import Sample, TrainingRun
from nuclr.studies.items.popularity_report import (
    EmbeddedPairs,
    PopularityReport,
    find_false_negatives,
    pairs_of_features,
    solve_sides,
)

ANSWERS = 5
EXAMPLES = 4  # random queries, and worst mistakes, of each direction
TOLERANCE = 1e-3  # relative error of a popularity, far below what a page shows
PASSES = 150
MOST_POINTS = 600  # of a scatter plot


def retrieval_examples(run: TrainingRun) -> Iterator[Block]:
    """Show queries with their best answers, and the worst mistakes, on held-out pairs if there are any."""
    held_out = run.held_out_sample
    sample = held_out or run.train_sample
    source = sample.describe("held-out pairs" if held_out else "training pairs")
    seen = "" if held_out else " (which the model was trained on)"
    yield Text(f"Queries with their five best answers, best first, among {source}{seen}.")
    if run.views:
        yield from nearest_neighbors(sample)
    else:
        yield from _direction(sample, "x", "y", sample.features.links)
        yield from _direction(sample, "y", "x", sample.features.links.flip(1))


def nearest_neighbors(sample: Sample) -> Iterator[Example]:
    """Show random items with the items that are nearest to them, for a run on views of the same items."""
    features = sample.features.x
    for row in torch.randperm(len(features), generator=Generator().manual_seed(0))[:EXAMPLES].tolist():
        scores = (features @ features[row]).index_fill(0, torch.tensor([row]), -torch.inf)
        nearest = scores.topk(min(ANSWERS, len(features) - 1)).indices.tolist()
        answers = [Answer(sample.item("x", k), note=numbers.score(float(scores[k]))) for k in nearest]
        yield Example(sample.item("x", row), answers)


def _direction(
    sample: Sample,
    asks: SideName,
    searched: SideName,
    links: Tensor,
) -> Iterator[Block]:
    vectors = {"x": sample.features.x, "y": sample.features.y}
    ranked = rank_answers(vectors[asks], vectors[searched], links)

    def show(row: int) -> Example:
        rows = ranked.scores[row].topk(min(ANSWERS, ranked.scores.shape[1])).indices.tolist()
        rank = int(ranked.rank[row])
        if rank > len(rows):
            rows.append(int(ranked.right[row]))
        answers = [
            Answer(
                sample.item(searched, k),
                tag=f"rank {numbers.count(rank)}" if place > ANSWERS else "",
                note=numbers.score(float(ranked.scores[row, k])),
                right=bool(ranked.own[row, k]),
            )
            for place, k in enumerate(rows, start=1)
        ]
        note = "first answer is right" if rank == 1 else f"right answer at rank {numbers.count(rank)}"
        return Example(sample.item(asks, row), answers, note)

    words = sample.items.words
    name = f"{words[asks].name} to {words[searched].name}"
    asked = ranked.own.any(dim=1).nonzero().squeeze(1)
    drawn = asked[torch.randperm(len(asked), generator=Generator().manual_seed(0))[:EXAMPLES]]
    yield Text(name[0].upper() + name[1:], "heading")
    yield Text(
        f"{numbers.count(len(asked))} queries and {numbers.count(ranked.scores.shape[1])} candidates; the queries "
        "below are drawn at random.",
        "small",
    )
    yield from map(show, drawn.tolist())
    hardest = asked[
        ranked.margin[asked].argsort(
            descending=True,
            stable=True,
        )[:EXAMPLES]
    ]
    worst = hardest[ranked.margin[hardest] > 0].tolist()
    if worst:
        explained = "Queries whose best wrong answer outscores the best right answer by the largest margin."
        yield Fold(f"The worst mistakes, {name}", [Text(explained, "small"), *map(show, worst)])


@dataclass(frozen=True)
class Ranked:
    """Answers to n queries among m candidates.

    Attributes:
        scores: (n, m).
        own: (n, m), which candidates are right.
        right: (n,), the right candidate with the largest score.
        rank: (n,), its rank, 1 is first. Among equal scores, wrong answers count as first.
        margin: (n,), by how much the best wrong answer outscores it.

    """

    scores: Tensor
    own: Tensor
    right: Tensor
    rank: Tensor
    margin: Tensor


def rank_answers(
    queries: Tensor,
    gallery: Tensor,
    links: Tensor,
) -> Ranked:
    """Rank the candidates of all queries.

    Args:
        queries: (n, d) features.
        gallery: (m, d) features.
        links: (k, 2), row of a query and row of the gallery that belong together.

    """
    scores = queries @ gallery.T
    own = torch.zeros_like(scores, dtype=torch.bool)
    own[links[:, 0], links[:, 1]] = True
    best = scores.masked_fill(~own, -torch.inf).max(dim=1)
    wrong = scores.masked_fill(own, -torch.inf).amax(dim=1)
    rank = 1 + ((scores >= best.values[:, None]) & ~own).sum(dim=1)
    return Ranked(
        scores,
        own,
        best.indices,
        rank,
        wrong - best.values,
    )


def popularity(run: TrainingRun) -> Iterator[Block]:
    """Solve the popularity of a sample of the training pairs and show it."""
    sample = run.train_sample
    path = str(run.run.folder)
    pairs = pairs_of_features(
        path,
        sample.items.pairs,
        sample.features,
        run.run.temperature,
    )
    sides = solve_sides(
        pairs,
        tolerance=TOLERANCE,
        max_iterations=PASSES,
    )
    report = PopularityReport(
        file=path,
        temperature=pairs.temperature,
        pairs=len(pairs.rows["y"]),
        views=pairs.views,
        sides=sides,
        false_negatives=None if pairs.views else find_false_negatives(pairs, sides["y"].popularity),
    )
    view = ItemView(
        report,
        run.options.pictures,
        training=True,
        items={path: sample.items},
    )
    yield Text(
        f"Solved for the final model at temperature {numbers.number(pairs.temperature)}, on "
        f"{sample.describe('training pairs')}."
    )
    yield from popularity_page.summary(view)
    yield from _learned(run, pairs, report)
    yield Text("Most popular", "heading")
    yield from popularity_page.show_ranked("most_popular", view)
    yield Text("Least popular", "heading")
    yield from popularity_page.show_ranked("least_popular", view)
    if report.false_negatives and report.false_negatives.rows:
        yield Text("Likely false negatives", "heading")
        yield from popularity_page.likely_false_negatives(view)


def _learned(
    run: TrainingRun,
    pairs: EmbeddedPairs,
    report: PopularityReport,
) -> Iterator[Chart]:
    """Draw popularity against the zeta of training, if the objective has one that distinguishes the items."""
    state = run.run.objective_state or {}
    for side, solved in report.sides.items():
        of_pairs = state.get(f"zeta_{side}")
        if of_pairs is None:
            continue
        values = of_pairs.numpy()[run.train_sample.features.numbers].astype(np.float64)
        zeta = np.bincount(pairs.rows[side], weights=values) / solved.weight
        if np.ptp(zeta) > 0:
            # Each item counts as often as it occurs.
            correlation = rank_correlation(np.repeat(solved.popularity, solved.weight), np.repeat(zeta, solved.weight))
            shown = np.random.default_rng(0).permutation(len(zeta))[:MOST_POINTS]
            yield scatter(
                f"Popularity solved exactly, and learned in training (zeta), {solved.origin.words or side}",
                np.maximum(solved.popularity[shown], popularity_page.FLOOR).tolist(),
                zeta[shown].tolist(),
                "exact popularity under this model",
                "zeta at the end of training",
                log_x=True,
                color=4,
                note="Zeta is the logarithm of popularity that the objective learned in training; exact popularity is "
                f"solved afterwards for the final model. Rank correlation of all: {numbers.score(correlation)}.",
            )
