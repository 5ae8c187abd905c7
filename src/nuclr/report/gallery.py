"""The popularity gallery: which samples are popular and which are rare, as cards, histograms and comparisons."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nuclr.evaluation import rank_correlation
from nuclr.report import charts, numbers, spreads
from nuclr.report.pictures import Pictures

FLOOR = 1e-6  # popularity that the page's axes still tell apart
MOST_POINTS = 600  # of a scatter

Label = Callable[[int], str | None]


@dataclass(frozen=True)
class Side:
    """Popularity of the n samples of one side, "captions" or "images".

    `number` (n,) in the data, `popularity` (n,) of weighted mean one, `weight` (n,), how often each occurs; `zeta` (n,)
    as training left it and `truth` (n,), the true popularity, where there are such.
    """

    name: str
    number: np.ndarray
    popularity: np.ndarray
    weight: np.ndarray
    anchors: int
    residual: float
    converged: bool
    zeta: np.ndarray | None = None
    truth: np.ndarray | None = None

    def rank(self) -> np.ndarray:
        """(n,), 1 for the most popular."""
        return ranks(self.popularity)

    def effective_number(self) -> float:
        """(sum q)^2 / sum q^2: n where all are equally popular, 1 where one takes it all."""
        share = self.weight / self.weight.sum()
        return float(len(share) / (share @ self.popularity**2))

    def agreement(self, other: np.ndarray) -> float:
        """Rank correlation with other values of the samples (n,), over pairs: each counts as often as it occurs."""
        times = np.maximum(1, np.round(self.weight)).astype(np.int64)
        return rank_correlation(np.repeat(self.popularity, times), np.repeat(other, times))

    def top_share(self, part: float = 0.01) -> float:
        """How much of all popularity the most popular `part` of the samples has."""
        mass = np.sort(self.popularity * self.weight)[::-1]
        return float(mass[: max(1, round(part * len(mass)))].sum() / mass.sum())


def ranks(values: np.ndarray) -> np.ndarray:
    """(n,), 1 for the largest."""
    found = np.empty(len(values), dtype=np.int64)
    found[np.argsort(-values, kind="stable")] = np.arange(1, len(values) + 1)
    return found


def pick(popularity: np.ndarray, count: int) -> list[tuple[int, str]]:
    """About `count` rows with their group: two fifths most popular, two fifths least, the rest around the median."""
    order = np.argsort(-popularity, kind="stable").tolist()
    if len(order) <= count:
        third, rest = math.ceil(len(order) / 3), len(order) - math.ceil(len(order) / 3)
        return [(r, "most" if k < third else "least" if k >= rest else "middle") for k, r in enumerate(order)]
    ends = (2 * count) // 5
    middle = count - 2 * ends
    begin = (len(order) - middle) // 2
    groups = (("most", order[:ends]), ("middle", order[begin : begin + middle]), ("least", order[len(order) - ends :]))
    return [(row, group) for group, rows in groups for row in rows]


def cards(side: Side, count: int, caption: Label, name: Label, picture: Pictures) -> list[dict[str, Any]]:
    """The gallery's entries, plain values that go to the page and to its CSV."""
    rank = side.rank()
    zeta_rank = None if side.zeta is None else ranks(side.zeta)
    truth_rank = None if side.truth is None else ranks(side.truth)
    low, high = (math.log10(max(float(v), FLOOR)) for v in (side.popularity.min(), side.popularity.max()))
    found = []
    for row, group in pick(side.popularity, count):
        number, popularity = int(side.number[row]), float(side.popularity[row])
        place = (math.log10(max(popularity, FLOOR)) - low) / ((high - low) or 1)
        card: dict[str, Any] = {
            "side": side.name,
            "group": group,
            "number": number,
            "name": name(number),
            "caption": caption(number),
            "picture": picture(number),
            "popularity": popularity,
            "place": round(place, 4),
            "mean": round(min(max(-low / ((high - low) or 1), 0), 1), 4),
            "rank": int(rank[row]),
            "of": len(rank),
            "copies": round(float(side.weight[row])),
        }
        if side.zeta is not None and zeta_rank is not None:
            card |= {"zeta": float(side.zeta[row]), "zeta_rank": int(zeta_rank[row])}
        if side.truth is not None and truth_rank is not None:
            card |= {"truth": float(side.truth[row]), "truth_rank": int(truth_rank[row])}
        found.append(card)
    return found


def pictures_of_side(side: Side) -> list[charts.Chart]:
    """Histogram of the popularity; where there are, training-time zeta and truth beside it."""
    title = f"Popularity of the {side.name}"
    median = float(np.median(side.popularity))
    markers = [
        spreads.Marker(1.0, f"mean {numbers.times(1)}", 2),
        spreads.Marker(max(median, FLOOR), f"median {numbers.times(median)}", 8),
    ]
    found = [spreads.log_histogram(title, side.popularity.tolist(), "popularity, logarithmic", markers, floor=FLOOR)]
    shown = np.random.default_rng(0).permutation(len(side.popularity))[:MOST_POINTS]
    exact = np.maximum(side.popularity[shown], FLOOR)
    all_of = numbers.count(len(side.popularity))
    less = f"{numbers.count(len(shown))} of {all_of} drawn. " if len(shown) < len(side.popularity) else ""
    if side.truth is not None:
        agreement = side.agreement(side.truth)
        found.append(
            spreads.scatter(
                f"Exact against true, {side.name}",
                exact.tolist(),
                np.maximum(side.truth[shown], FLOOR).tolist(),
                "exact popularity under this model",
                "true popularity",
                log_x=True,
                log_y=True,
                slot=3,
                note=f"{less}Rank correlation {numbers.score(agreement)}.",
            )
        )
    if side.zeta is not None and np.ptp(side.zeta) > 0:
        agreement = side.agreement(side.zeta)
        found.append(
            spreads.scatter(
                f"Exact against zeta of training, {side.name}",
                exact.tolist(),
                side.zeta[shown].tolist(),
                "exact popularity under this model",
                "zeta as training left it",
                log_x=True,
                slot=4,
                note=f"{less}Rank correlation {numbers.score(agreement)}.",
            )
        )
    return found
