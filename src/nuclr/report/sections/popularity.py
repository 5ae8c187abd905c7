"""The section "popularity" of a training page, and its parts that the page of `nuclr popularity` shows as well.

The popularity of an item is how many queries would pick it, relative to the mean: 1 is the mean of all items. It is
solved on a sample of the training pairs within seconds. The parts: charts and a gallery of cards (`gallery`), likely
false negatives, and near-duplicate texts.
"""

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nuclr.data.builtin import BuiltinPairs
from nuclr.evaluation import hubness_change, popularity_agreement
from nuclr.popularity import ConvergenceWarning, Result, solve
from nuclr.popularity.false_negatives import false_negatives
from nuclr.report import numbers
from nuclr.report.charts.lines import Chart
from nuclr.report.items import Item, Items, shorten
from nuclr.report.render import Table
from nuclr.report.sections.conditional import Conditional, draw_conditional
from nuclr.report.sections.gallery import Gallery, GallerySide, make_cards, pair_face, popularity_charts
from nuclr.report.training_run import SAMPLES, Sample, TrainingRun
from nuclr.runs.side_words import SideWords

TOLERANCE = 1e-3  # relative error of a popularity, far below what a page shows
PASSES = 150
SHOWN = 12  # false negatives and groups of duplicates
HUBNESS_ROWS = (  # key, label of a table's row, whether it is a share
    ("never_found", "found by no query", True),
    ("skewness", "skewness of N_10", False),
    ("recall@1", "recall@1", True),
)
SMALL_WORDS = frozenset(("a", "an", "the", "is", "are", "of", "in", "on", "at", "to", "and", "with", "by", "its"))
FEWEST_WORDS = 3  # texts with fewer words are similar by chance if they share all words but one
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class FalseNegative:
    """A y that may belong to an x that it is not paired with, next to the x's own y.

    `fits` says whether it does, if the truth is known.
    """

    query: Item
    candidate: Item
    own: Item
    score: float
    own_score: float
    popularity: float
    fits: bool | None = None


@dataclass(frozen=True)
class FalseNegativeList:
    """The likeliest false negatives.

    Attributes:
        x: words for the queries.
        y: words for the candidates.
        share: share of the examined queries that have a likely false negative.
        anchors: number of examined queries.
        rows: the likeliest ones.
        fitting: number of `rows` whose y truly fits the x; None if the truth is not known.
        base_rate: share of all negatives that truly fit; None if the truth is not known.

    """

    x: SideWords
    y: SideWords
    share: float
    anchors: int
    rows: list[FalseNegative]
    fitting: int | None = None
    base_rate: float | None = None


@dataclass(frozen=True)
class SharedText:
    """One text of a group of near-duplicates."""

    text: str
    popularity: float
    copies: int


@dataclass(frozen=True)
class DuplicateGroup:
    """Texts that say the same, the first four of them; `more` is the number of the others."""

    rows: list[SharedText]
    more: int = 0


@dataclass(frozen=True)
class DuplicateList:
    """Near-duplicate texts of one side: how many occur in several pairs, and groups with similar words."""

    words: SideWords
    repeated: int
    repeated_pairs: int
    groups: int
    same: list[DuplicateGroup]
    near: list[DuplicateGroup]


@dataclass(frozen=True)
class Findings:
    """What to look at in the data: likely false negatives (None if not searched), near-duplicates by side."""

    negatives: FalseNegativeList | None
    duplicates: list[DuplicateList]


@dataclass(frozen=True)
class Popularity:
    """Content of the section. `hubness` compares plain and corrected search of the held-out pairs.

    `conditional` has y drawn given x; None if both sides are views of the same items.
    """

    x: SideWords
    y: SideWords
    views: bool
    pairs: int
    total: int
    temperature: float
    charts: list[Chart]
    gallery: Gallery
    findings: Findings
    hubness: Table | None
    conditional: Conditional | None


def training_popularity(context: TrainingRun) -> Popularity:
    """Solve the popularity of a sample of the training pairs."""
    context.require_model()
    source = context.train
    sample = context.sample(source, context.options.samples or context.affordable(source, SAMPLES))
    items, temperature = context.items(sample.pairs), context.temperature()
    sides = solve_sample(sample, temperature, context.run.objective_state, items, context.views)
    numbers_of = {"x": sample.features.x_number, "y": sample.features.y_number}
    cards = [
        card
        for key, side in sides.items()
        for card in make_cards(side, context.options.gallery, lambda number, key=key: pair_face(items, key, number))  # type: ignore[misc]
    ]
    two_sides = "y" in sides and not context.views
    return Popularity(
        x=items.x_words,
        y=items.y_words,
        views=context.views,
        pairs=len(sample.features.numbers),
        total=sample.total,
        temperature=temperature,
        charts=[chart for side in sides.values() for chart in popularity_charts(side)],
        gallery=Gallery(list(sides.values()), cards),
        findings=Findings(
            negatives=find_false_negatives(sample, sides["y"], items) if two_sides else None,
            duplicates=[
                list_duplicates([str(items.read(key, int(number))) for number in numbers_of[key]], side)
                for key, side in sides.items()
                if side.words.kind == "text"
            ],
        ),
        hubness=_hubness_table(context, sample, items),
        conditional=draw_conditional(sample, sides["y"], items, temperature) if two_sides else None,
    )


def _hubness_table(context: TrainingRun, sample: Sample, items: Items) -> Table | None:
    """Return the hubness of both sides of the held-out pairs before and after correction; None without such pairs."""
    if context.val is None or context.views:
        return None
    held = context.sample(context.val, context.options.samples or context.affordable(context.val, SAMPLES)).features
    bank, links = sample.features, held.links
    if min(len(bank.x), len(bank.y), len(held.x), len(held.y)) < 2:
        return None
    changes = {
        items.y_words: hubness_change((bank.x, bank.y), held.x, held.y, links),
        items.x_words: hubness_change((bank.y, bank.x), held.y, held.x, links.flip(1)),
    }
    columns = ["", *(f"{words.many}{suffix}" for words in changes for suffix in ("", ", corrected"))]
    rows = []
    for key, label, share in HUBNESS_ROWS:
        values = [change[f"{key}{suffix}"] for change in changes.values() for suffix in ("", "_corrected")]
        rows.append([label, *(numbers.percent(value) if share else numbers.number(value) for value in values)])
    gains = [
        f"{numbers.signed(100 * (change['recall@1_corrected'] - change['recall@1']))} ± "
        f"{100 * change['recall@1_error']:.2f}"
        for change in changes.values()
    ]
    rows.append(["gain in recall@1, points", *(cell for gain in gains for cell in ("", gain))])
    return Table(columns, rows)


# Solving


def solve_sample(
    sample: Sample, temperature: float, state: dict[str, Any] | None, items: Items, views: bool = False
) -> dict[str, GallerySide]:
    """Solve the popularity of both sides of a sample.

    Args:
        sample: pairs with features.
        temperature: of the scores.
        state: the objective's state, for the zeta of training.
        items: the items of the pairs.
        views: True if both sides are views of the same items; then only side x is solved.

    Returns:
        The sides "y" and "x", without those that have fewer than two samples.

    """
    features, pairs = sample.features, sample.pairs
    row_x, row_y = (rows.numpy() for rows in features.pair_rows.unbind(1))
    weight_x, weight_y = np.bincount(row_x), np.bincount(row_y)
    truth = None
    if isinstance(pairs, BuiltinPairs):
        q = pairs.truth.popularity(features.numbers)
        truth = _mean_by(row_y, q / q.mean(), weight_y)
    sides = {}
    for letter, anchors, candidates, anchor_weight, weight, row, number in (
        ("y", features.x, features.y, weight_x, weight_y, row_y, features.y_number),
        ("x", features.y, features.x, weight_y, weight_x, row_x, features.x_number),
    ):
        if len(anchors) < 2 or len(candidates) < 2 or (views and letter == "y"):
            continue
        result = _solve(anchors, candidates, temperature, anchor_weight, weight)
        popularity = result.popularity.double().numpy()
        table = (state or {}).get(f"zeta_{letter}")
        sides[letter] = GallerySide(
            words=items.words(letter),
            number=number,
            popularity=popularity / np.average(popularity, weights=weight),
            weight=weight,
            anchors=len(anchors),
            residual=result.residual,
            converged=result.converged,
            zeta=None if table is None else _mean_by(row, table.numpy()[features.numbers], weight),
            truth=truth if letter == "y" else None,
            agreement=math.nan if views else popularity_agreement(anchors, candidates, temperature),
        )
    return sides


def _solve(anchors: Any, candidates: Any, temperature: float, anchor_weight: Any, weight: Any) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the page shows the residual
        return solve(
            anchors,
            candidates,
            temperature=temperature,
            tolerance=TOLERANCE,
            max_iterations=PASSES,
            x_weight=torch.from_numpy(anchor_weight).float(),
            y_weight=torch.from_numpy(weight).float(),
        )


def _mean_by(row: np.ndarray, values: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.bincount(row, weights=values.astype(np.float64), minlength=len(count)) / count


# False negatives


def find_false_negatives(sample: Sample, side: GallerySide, items: Items) -> FalseNegativeList:
    """Return likely false negatives of a sample; for the built-in pairs, with the truth."""
    features = sample.features
    likely = false_negatives(features.x, features.y, features.links, torch.from_numpy(side.popularity), SHOWN)
    fits = None
    if isinstance(sample.pairs, BuiltinPairs):
        truth = sample.pairs.truth
        images, texts = features.x_number[likely.x.numpy()], features.y_number[likely.y.numpy()]
        fits = [bool(np.isfinite(truth.log_p(images[[k]], texts[[k]])[0, 0])) for k in range(len(images))]
    columns = (likely.x, likely.y, likely.own, likely.score, likely.own_score)
    rows = [
        FalseNegative(
            query=items.item("x", int(features.x_number[x])),
            candidate=items.item("y", int(features.y_number[y])),
            own=items.item("y", int(features.y_number[own])),
            score=score,
            own_score=own_score,
            popularity=float(side.popularity[y]),
            fits=None if fits is None else fits[k],
        )
        for k, (x, y, own, score, own_score) in enumerate(zip(*(c.tolist() for c in columns), strict=True))
    ]
    return FalseNegativeList(
        x=items.x_words,
        y=items.y_words,
        share=likely.share,
        anchors=likely.anchors,
        rows=rows,
        fitting=None if fits is None else sum(fits),
        base_rate=None if fits is None else _base_rate(sample),
    )


def _base_rate(sample: Sample) -> float:
    """Return the share of all negatives of the sample that truly fit."""
    assert isinstance(sample.pairs, BuiltinPairs)
    features = sample.features
    fits = np.isfinite(sample.pairs.truth.log_p(features.x_number, features.y_number))
    fits[features.links[:, 0].numpy(), features.links[:, 1].numpy()] = False
    return float(fits.sum() / (fits.size - len(features.links)))


# Near-duplicate texts


def find_duplicates(texts: Iterable[str], most: int = 20) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Find texts that have the same words, ignoring case, punctuation, articles and order, or all words but one.

    The time is linear in the number of texts: each is looked up by its set of words, and by this set without each
    of its words.

    Args:
        texts: of one side.
        most: the largest number of pairs that differ in one word.

    Returns:
        Groups of rows with the same words, the largest first; and pairs of rows that differ in one word, long texts
        first, no text twice.

    """
    by_words: dict[frozenset[str], list[int]] = defaultdict(list)
    for row, text in enumerate(texts):
        words = frozenset(_WORD.findall(text.casefold()))
        by_words[words - SMALL_WORDS or words].append(row)
    same = sorted((rows for rows in by_words.values() if len(rows) > 1), key=lambda rows: (-len(rows), rows[0]))
    without: dict[frozenset[str], list[frozenset[str]]] = defaultdict(list)
    for words in by_words:
        if len(words) >= FEWEST_WORDS:
            for word in words:
                without[words - {word}].append(words)
    near: list[tuple[int, int]] = []
    taken: set[frozenset[str]] = set()
    for _, group in sorted(without.items(), key=lambda item: (-len(item[0]), by_words[item[1][0]][0])):
        free = [words for words in group if words not in taken]
        if len(free) > 1 and len(near) < most:
            taken |= {free[0], free[1]}
            near.append((by_words[free[0]][0], by_words[free[1]][0]))
    return same, near


def list_duplicates(texts: list[str], side: GallerySide) -> DuplicateList:
    """Return near-duplicates of the texts with their popularity."""
    same, near = find_duplicates(texts, SHOWN)

    def group(rows: Iterable[int]) -> DuplicateGroup:
        listed = list(rows)
        shown = [
            SharedText(shorten(texts[row]), float(side.popularity[row]), round(float(side.weight[row])))
            for row in listed[:4]
        ]
        return DuplicateGroup(shown, max(0, len(listed) - 4))

    repeated = side.weight > 1
    return DuplicateList(
        words=side.words,
        repeated=int(repeated.sum()),
        repeated_pairs=round(float(side.weight[repeated].sum())),
        groups=len(same),
        same=[group(rows) for rows in same[:SHOWN]],
        near=[group(rows) for rows in near],
    )
