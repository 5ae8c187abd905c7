"""The popularity of one side as the page shows it: charts of its distribution, and a gallery of cards.

The training page and the page of `nuclr popularity` both show them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from nuclr.evaluation import rank_correlation
from nuclr.report import numbers
from nuclr.report.charts import spreads
from nuclr.report.charts.lines import Chart
from nuclr.report.items import Item, Items
from nuclr.runs.side_words import SideWords

FLOOR = 1e-6  # the smallest popularity on an axis
MOST_POINTS = 600  # of a scatter plot
EXTREMES = 6  # samples at each end of the lists by exact popularity and by zeta


@dataclass(frozen=True)
class GallerySide:
    """Popularity of the n samples of one side.

    Args:
        words: what the samples are called.
        number: (n,) numbers in the data.
        popularity: (n,), with weighted mean one.
        weight: (n,), how often each sample occurs.
        anchors: number of samples of the other side.
        residual: largest relative error of the solution.
        converged: whether the residual is below the tolerance.
        zeta: (n,) at the end of training, if the objective has it.
        truth: (n,) true popularity, if it is known.
        agreement: rank correlation of popularity with N_10 of held-out queries; NaN if it was not measured.

    """

    words: SideWords
    number: np.ndarray
    popularity: np.ndarray
    weight: np.ndarray
    anchors: int
    residual: float
    converged: bool
    zeta: np.ndarray | None = None
    truth: np.ndarray | None = None
    agreement: float = math.nan

    @property
    def name(self) -> str:
        """What several samples are called: "captions"."""
        return self.words.many

    @property
    def checked(self) -> bool:
        """Whether popularity was compared with what held-out queries find."""
        return math.isfinite(self.agreement)

    def effective_number(self) -> float:
        """Return (sum q)^2 / sum q^2: n if all samples are equally popular, 1 if one has all popularity."""
        share = self.weight / self.weight.sum()
        return float(len(share) / (share @ self.popularity**2))

    def correlation(self, other: np.ndarray) -> float:
        """Return the rank correlation with other values (n,), each sample counted as often as it occurs."""
        times = np.maximum(1, np.round(self.weight)).astype(np.int64)
        return rank_correlation(np.repeat(self.popularity, times), np.repeat(other, times))

    @property
    def has_zeta(self) -> bool:
        """Whether training has learned a zeta that distinguishes the samples."""
        return self.zeta is not None and bool(np.ptp(self.zeta) > 0)

    def top_share(self, part: float = 0.01) -> float:
        """Return the share of all popularity that the most popular `part` of the samples has."""
        mass = np.sort(self.popularity * self.weight)[::-1]
        return float(mass[: max(1, round(part * len(mass)))].sum() / mass.sum())


@dataclass(frozen=True)
class Face:
    """What a card shows of its sample.

    Attributes:
        text: the sample's text, that of its pair, its file, or its label.
        second: the text on the other side of its pair, if both sides are texts.
        picture: a data URI of the sample or of the other side of its pair.
        curve: the sample's numbers.
        file: the file name of the picture, if the card has a text as well.
        labels: columns of the download.

    """

    text: str
    second: str = ""
    picture: str | None = None
    curve: Markup | None = None
    file: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Card:
    """One sample in the gallery. `position` and `mean` are positions on the card's logarithmic scale, 0 to 1.

    `group` says why it is shown: "most", "middle" or "least" by exact popularity, "zeta-most" or "zeta-least" by the
    zeta of training, or one of each, separated by a space.
    """

    side: str
    group: str
    number: int
    face: Face
    popularity: float
    position: float
    mean: float
    rank: int
    of: int
    copies: int
    zeta: float | None = None
    zeta_rank: int | None = None
    truth: float | None = None
    truth_rank: int | None = None


@dataclass(frozen=True)
class Gallery:
    """Cards of both sides."""

    sides: list[GallerySide]
    cards: list[Card]

    @property
    def by_zeta(self) -> "list[ZetaComparison]":
        """Per side whose zeta was learned in training: its extreme samples by exact popularity and by zeta."""
        return [compare_zeta(side, self.cards) for side in self.sides if side.has_zeta]

    @property
    def columns(self) -> list[str]:
        """The columns of the download that hold file names and texts."""
        return list(dict.fromkeys(column for card in self.cards for column in card.face.labels))

    @property
    def text_columns(self) -> list[str]:
        """The columns of texts that cards can be sorted by."""
        texts = {side.words.column for side in self.sides if side.words.kind != "image"}
        return [column for column in self.columns if column in texts]

    @property
    def hint(self) -> str:
        """What the search field asks for."""
        texts = [side.words for side in self.sides if side.words.column in self.text_columns]
        return f"words of {texts[0].a if len(texts) == 1 else 'a text'}" if texts else "a number or name"

    def data(self) -> list[dict[str, Any]]:
        """Return what the page's script sorts, filters and downloads: the cards without pictures."""
        optional = ("zeta", "zeta_rank", "truth", "truth_rank")
        return [
            {key: getattr(card, key) for key in ("side", "group", "number")}
            | {column: card.face.labels.get(column) for column in self.columns}
            | {key: getattr(card, key) for key in ("popularity", "rank", "of", "copies")}
            | {key: getattr(card, key) for key in optional if getattr(card, key) is not None}
            for card in self.cards
        ]


@dataclass(frozen=True)
class ZetaComparison:
    """The most and least popular samples of a side by exact popularity and by the zeta of training.

    Attributes:
        words: what the samples are called.
        correlation: rank correlation of exact popularity and zeta over all samples.
        ends: per end of the order its title, the cards by exact popularity, those by zeta, and how many are in both.

    """

    words: SideWords
    correlation: float
    ends: list[tuple[str, list[Card], list[Card], int]]


def compare_zeta(side: GallerySide, cards: list[Card]) -> ZetaComparison:
    """Return the extreme cards of a side by exact popularity and by zeta; the side must have a zeta."""
    assert side.zeta is not None
    own = [card for card in cards if card.side == side.name]
    ends = []
    for title, group, sign in (("Most popular", "most", 1), ("Least popular", "least", -1)):
        exact = [card for card in own if group in card.group.split()]
        exact = sorted(exact, key=lambda card: sign * card.rank)[:EXTREMES]
        learned = [card for card in own if f"zeta-{group}" in card.group.split()]
        learned = sorted(learned, key=lambda card: sign * (card.zeta_rank or 0))
        ends.append((title, exact, learned, len({card.number for card in exact} & {card.number for card in learned})))
    return ZetaComparison(side.words, side.correlation(side.zeta), ends)


def make_face(own: Item, other: Item | None, file: str = "", labels: dict[str, str] | None = None) -> Face:
    """Return what a card shows of a sample: itself, and the other side of its pair if it is a picture or a text."""
    shown = [item for item in (own, other) if item is not None]
    texts = [item.text for item in shown if item.text]
    return Face(
        text=texts[0] if texts else file if own.kind == "picture" and file else own.label,
        second=texts[1] if len(texts) > 1 else "",
        picture=next((item.picture for item in shown if item.picture), None),
        curve=own.curve,
        file=file if texts else "",
        labels=labels or {},
    )


def pair_face(items: Items, side: str, number: int) -> Face:
    """Return what a card shows of the x or the y of a pair."""
    x, y = items.item("x", number), items.item("y", number)
    file = items.file(side, number)
    labels = {"name": file} if file else {}
    labels |= {words.column: item.text for words, item in ((items.x_words, x), (items.y_words, y)) if item.text}
    return make_face(*((x, y) if side == "x" else (y, x)), file, labels)


def rank_values(values: np.ndarray) -> np.ndarray:
    """Return the ranks (n,) of values, 1 for the largest."""
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(-values, kind="stable")] = np.arange(1, len(values) + 1)
    return ranks


def choose_cards(popularity: np.ndarray, count: int) -> list[tuple[int, str]]:
    """Return about `count` rows with their group: two fifths "most", two fifths "least", the rest "middle"."""
    order = np.argsort(-popularity, kind="stable").tolist()
    if len(order) <= count:
        third, rest = math.ceil(len(order) / 3), len(order) - math.ceil(len(order) / 3)
        return [(r, "most" if k < third else "least" if k >= rest else "middle") for k, r in enumerate(order)]
    ends = (2 * count) // 5
    middle = count - 2 * ends
    begin = (len(order) - middle) // 2
    groups = (("most", order[:ends]), ("middle", order[begin : begin + middle]), ("least", order[len(order) - ends :]))
    return [(row, group) for group, rows in groups for row in rows]


def make_cards(side: GallerySide, count: int, face: Callable[[int], Face]) -> list[Card]:
    """Return about `count` cards of one side; `face` says what the card of a number shows."""
    rank = rank_values(side.popularity)
    zeta_rank = None if side.zeta is None else rank_values(side.zeta)
    truth_rank = None if side.truth is None else rank_values(side.truth)
    low, high = (math.log10(max(float(v), FLOOR)) for v in (side.popularity.min(), side.popularity.max()))
    span = (high - low) or 1
    cards = []
    for row, group in _choose_by_both(side, count).items():
        number, popularity = int(side.number[row]), float(side.popularity[row])
        cards.append(
            Card(
                side=side.name,
                group=group,
                number=number,
                face=face(number),
                popularity=popularity,
                position=round((math.log10(max(popularity, FLOOR)) - low) / span, 4),
                mean=round(min(max(-low / span, 0), 1), 4),
                rank=int(rank[row]),
                of=len(rank),
                copies=round(float(side.weight[row])),
                zeta=None if side.zeta is None else float(side.zeta[row]),
                zeta_rank=None if zeta_rank is None else int(zeta_rank[row]),
                truth=None if side.truth is None else float(side.truth[row]),
                truth_rank=None if truth_rank is None else int(truth_rank[row]),
            )
        )
    return cards


def _choose_by_both(side: GallerySide, count: int) -> dict[int, str]:
    """Return the rows to show with their groups: those of `choose_cards`, then the extreme ones by zeta."""
    chosen = dict(choose_cards(side.popularity, count))
    if side.has_zeta and side.zeta is not None:
        order = np.argsort(-side.zeta, kind="stable").tolist()
        ends = min(EXTREMES, len(order) // 2)
        for group, rows in (("zeta-most", order[:ends]), ("zeta-least", order[len(order) - ends :])):
            for row in rows:
                chosen[row] = f"{chosen[row]} {group}" if row in chosen else group
    return chosen


def popularity_charts(side: GallerySide) -> list[Chart]:
    """Return a histogram, and a scatter plot against the zeta of training if it is known."""
    median = float(np.median(side.popularity))
    markers = [
        spreads.Marker(1.0, f"mean {numbers.times(1)}", 2),
        spreads.Marker(max(median, FLOOR), f"median {numbers.times(median)}", 8),
    ]
    title = f"Popularity of the {side.name}"
    charts = [spreads.log_histogram(title, side.popularity.tolist(), "popularity, logarithmic", markers, floor=FLOOR)]
    shown = np.random.default_rng(0).permutation(len(side.popularity))[:MOST_POINTS]
    exact = np.maximum(side.popularity[shown], FLOOR).tolist()
    drawn = ""
    if len(shown) < len(side.popularity):
        drawn = f"{numbers.count(len(shown))} of {numbers.count(len(side.popularity))} drawn at random. "
    if side.has_zeta and side.zeta is not None:
        note = (
            f"{drawn}Zeta is the logarithm of popularity that the objective learned in training; exact popularity is "
            "solved afterwards for the final model. If both agree, the points rise from left to right: rank "
            f"correlation {numbers.score(side.correlation(side.zeta))}."
        )
        zeta = side.zeta[shown].tolist()
        labels = (
            f"Popularity solved exactly, and learned in training (zeta), {side.name}",
            exact,
            zeta,
            "exact popularity under this model",
        )
        charts.append(spreads.scatter(*labels, "zeta at the end of training", log_x=True, color=4, note=note))
    return charts
