"""The block "drawn given x" of a training page: the discriminative model used generatively.

For a few x, items y are drawn from the data with probabilities proportional to exp(s/tau) / q (`sample_conditional`),
and shown next to the items with the highest scores. A y that occurs in several pairs is drawn in proportion to them.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from nuclr.popularity import sample_conditional
from nuclr.report.items import Item, Items
from nuclr.report.sections.gallery import GallerySide
from nuclr.report.training_run import Sample
from nuclr.runs.side_words import SideWords

QUERIES, DRAWS, TOP = 4, 6, 6


@dataclass(frozen=True)
class Choice:
    """An item with its probability given the query, and how many draws it got; 0 in the list of the top-ranked."""

    item: Item
    probability: float
    times: int = 0


@dataclass(frozen=True)
class ConditionalDraws:
    """One query: what was drawn, what ranks highest, and how many items share the probability, exp(entropy)."""

    query: Item
    drawn: list[Choice]
    top: list[Choice]
    effective: float


@dataclass(frozen=True)
class Conditional:
    """Content of the block."""

    x: SideWords
    y: SideWords
    candidates: int
    rows: list[ConditionalDraws]


def draw_conditional(sample: Sample, side: GallerySide, items: Items, temperature: float) -> Conditional:
    """Draw y given some x of a sample.

    Args:
        sample: pairs with features.
        side: the popularity of the y of the sample.
        items: the items of the pairs.
        temperature: of the scores.

    """
    features = sample.features
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(features.x), generator=generator)[:QUERIES]
    log_q = np.log(np.maximum(side.popularity, 1e-30) / side.weight)
    zeta = temperature * torch.from_numpy(log_q)
    x = features.x[chosen]
    drawn = sample_conditional(
        x, features.y, zeta, temperature=temperature, count=DRAWS, generator=generator, normalize=True
    )
    scores = x.double() @ features.y.double().T
    probability = ((scores - zeta) / temperature).softmax(dim=1)
    effective = torch.special.entr(probability).sum(dim=1).exp()
    top = scores.topk(min(TOP, scores.shape[1]), dim=1).indices

    def choice(k: int, row: int, times: int = 0) -> Choice:
        return Choice(items.item("y", int(features.y_number[row])), float(probability[k, row]), times)

    rows = [
        ConditionalDraws(
            query=items.item("x", int(features.x_number[number])),
            drawn=[choice(k, row, times) for row, times in Counter(drawn[k].tolist()).most_common()],
            top=[choice(k, row) for row in top[k].tolist()],
            effective=float(effective[k]),
        )
        for k, number in enumerate(chosen.tolist())
    ]
    return Conditional(items.x_words, items.y_words, len(features.y), rows)
