"""Correct the ranking of pairs in both directions, with a temperature and strength chosen on validation pairs.

A `Bank` holds a `PopularityCorrection` per direction and temperature. `choose_correction` picks one correction for all
queries. Evaluating it on the same validation pairs would be too optimistic, so `cross_validated_ranks` splits the x
into two halves. The queries of each half (its x and their partners) are ranked in the whole gallery, with the
correction that was best for the other half. So no query influences the correction that it is ranked with.

`popularity_agreement` measures on held-out queries what popularity means. Training does not identify it as a density:
s_ij + tau c_j with zeta_j + tau c_j is the same conditional model. But popularity that was solved on some queries
predicts how often each item is found by other queries (N_k).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr.arrays import Features, Integers, as_features, as_integers, as_links, as_rows, evenly_spaced
from nuclr.evaluation.intervals import cut_halves
from nuclr.evaluation.ranks import Ranks, rank_correlation
from nuclr.evaluation.retrieval import retrieval_ranks
from nuclr.popularity import hubness
from nuclr.popularity.bank import score_std
from nuclr.popularity.correction import (
    DEFAULT_STRENGTH,
    STRENGTHS,
    TEMPERATURE_FACTORS,
    PopularityCorrection,
)

K = 10  # results of a query whose hubness is measured
LARGEST = 4000  # anchors, and candidates: enough for a correlation, and about a second of work
MOST_CANDIDATES = 100_000  # that the held-out anchors search


@dataclass(frozen=True)
class Correction:
    """Temperature and strength that correct both directions.

    Args:
        temperature: Of the popularity problem. None: the default of `PopularityCorrection`.
        strength: Factor on zeta; without a temperature, on the default bias of `PopularityCorrection`.
        recall: Recall@1, mean of both directions, on the pairs that the correction was chosen on.

    Example:
        >>> Correction(temperature=0.05, strength=0.75)
        Correction(temperature=0.05, strength=0.75, recall=None)

    """

    temperature: float | None = None
    strength: float = DEFAULT_STRENGTH
    recall: float | None = None

    def biases(
        self,
        bank: "Bank",
        x: Features,
        y: Features,
    ) -> tuple[Tensor, Tensor]:
        """Return the biases to subtract from the scores of gallery x and of gallery y, (n_x,) and (n_y,)."""
        zeta_x, zeta_y = bank.zeta(x, y, self.temperature)
        return self.strength * zeta_x, self.strength * zeta_y


Setting = tuple[Correction, tuple[Ranks, Ranks]]  # a correction, and the ranks of both directions under it


class Bank:
    """x and y, such as those of the training pairs, each of which serves as the queries that choose from the other.

    The problem is solved once per direction and temperature; a gallery then costs one pass.

    Args:
        x: Features of side x, (n_x, d), unit norm.
        y: Features of side y, (n_y, d), unit norm.
        transductive: Whether they are the queries and the gallery of the search itself.

    Raises:
        ValueError: If features have a wrong type or shape, are not finite, or do not have unit norm.

    Example:
        >>> x = torch.nn.functional.normalize(torch.arange(24.0).sin().reshape(8, 3), dim=1)
        >>> bank = Bank(x, x)
        >>> bank
        Bank(x=8, y=8, dimensions=3)
        >>> zeta_x, zeta_y = bank.zeta(x[:4], x[:5], temperature=0.1)
        >>> zeta_x.shape, zeta_y.shape
        (torch.Size([4]), torch.Size([5]))

    """

    def __init__(
        self,
        x: Features,
        y: Features,
        *,
        transductive: bool = False,
    ) -> None:
        self.x = as_features("x", x)
        self.y = as_features("y", y)
        self.transductive = transductive
        self._fitted: dict[float | None, tuple[PopularityCorrection, PopularityCorrection]] = {}

    def __repr__(self) -> str:
        """Return one line with the sizes."""
        return f"Bank(x={len(self.x)}, y={len(self.y)}, dimensions={self.x.shape[1]})"

    def zeta(
        self,
        x: Features,
        y: Features,
        temperature: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Return zeta of gallery x for queries y, and of gallery y for queries x, or the default bias.

        Args:
            x: Features of a gallery of side x, (m_x, d).
            y: Features of a gallery of side y, (m_y, d).
            temperature: Of the popularity problem. None: the biases are those of `PopularityCorrection` with its
                default temperature and strength.

        Returns:
            (m_x,) and (m_y,), each of mean zero.

        Raises:
            ValueError: If features have a wrong type or shape, are not finite, or do not have unit norm.

        """
        if temperature not in self._fitted:
            size = max(2, len(self.x), len(self.y))  # whoever made the bank has chosen its size
            fix_x, fix_y = (
                PopularityCorrection(temperature, bank_size=size).fit(
                    queries, candidates, items=True, transductive=self.transductive
                )
                for queries, candidates in ((self.y, self.x), (self.x, self.y))
            )
            self._fitted[temperature] = fix_x, fix_y
        fix_x, fix_y = self._fitted[temperature]
        return fix_x.bias(x), fix_y.bias(y)


def choose_correction(
    x: Features,
    y: Features,
    links: Integers,
    bank: Bank,
    temperatures: Sequence[float] | None = None,
    strengths: Sequence[float] = STRENGTHS,
) -> Correction:
    """Choose the correction with the best mean reciprocal rank on validation pairs, mean of both directions.

    On Flickr8k this chooses better than recall@1, which jumps with single queries.

    Args:
        x: Features of side x of the validation pairs, (n_x, d).
        y: Features of side y, (n_y, d).
        links: Rows (row of x, row of y), (n, 2).
        bank: Queries and candidates that popularity is solved on.
        temperatures: Temperatures to try. None: multiples of the standard deviation of the scores.
        strengths: Strengths to try.

    Returns:
        The best correction, with the recall@1 that it reached (mean of both directions).

    Raises:
        ValueError: If there is nothing to choose from, or an argument has a wrong shape or type.

    Example:
        >>> import torch
        >>> x, y = torch.nn.functional.normalize(torch.stack([torch.eye(8), torch.eye(8) + 0.1]), dim=2)
        >>> links = [[i, i] for i in range(8)]
        >>> choose_correction(x, y, links, Bank(x, y), temperatures=[0.1], strengths=[0.5])
        Correction(temperature=0.1, strength=0.5, recall=1.0)

    """
    return _choose(ranks_by_correction(x, y, links, bank, temperatures, strengths))[0]


def ranks_by_correction(
    x: Features,
    y: Features,
    links: Integers,
    bank: Bank,
    temperatures: Sequence[float] | None = None,
    strengths: Sequence[float] = STRENGTHS,
) -> Iterator[Setting]:
    """Yield every correction that `choose_correction` tries, with the ranks of both directions under it."""
    if temperatures is None:
        scale = score_std(bank.x, bank.y)
        temperatures = [float(f"{factor * scale:.3g}") for factor in TEMPERATURE_FACTORS]
    for temperature in temperatures:
        zeta_x, zeta_y = bank.zeta(x, y, temperature)
        for strength in strengths:
            ranks = retrieval_ranks(x, y, links, strength * zeta_x, strength * zeta_y)
            yield Correction(temperature, strength), ranks


def cross_validated_ranks(
    x: Features,
    y: Features,
    links: Integers,
    bank: Bank,
    group: Integers | None = None,
) -> tuple[tuple[Ranks, Ranks], list[Correction]]:
    """Rank each half of the x and their partners under the correction chosen on the other half.

    Args:
        x: Features of side x, (n_x, d).
        y: Features of side y, (n_y, d).
        links: Rows (row of x, row of y), (n, 2).
        bank: Queries and candidates that popularity is solved on.
        group: (n_x,) integers, equal for x that belong together and must be in one half. None: all differ.

    Returns:
        The ranks of both directions, and the correction of each half (its recall is that of the half it was chosen on).

    Raises:
        ValueError: If fewer than two groups of x have partners, or an argument has a wrong shape or type.

    Example:
        >>> import torch
        >>> x = torch.nn.functional.normalize(torch.arange(24.0).sin().reshape(8, 3), dim=1)
        >>> (x_to_y, _), corrections = cross_validated_ranks(x, x, [[i, i] for i in range(8)], Bank(x, x))
        >>> len(x_to_y), len(corrections)
        (8, 2)

    """
    links = as_links("links", links, len(x), len(y))
    groups = torch.arange(len(x), device=links.device)
    if group is not None:
        groups = as_integers("group", group, len(x)).to(links.device)
    used = torch.unique(groups[links[:, 0]])
    if len(used) < 2:
        raise ValueError(f"{len(used)} x with a partner; needs two to choose on one half for the other")
    second_half = used[cut_halves(used)[1]]
    settings = list(ranks_by_correction(x, y, links, bank))
    # A query y of several x belongs to the half of the first one.
    first_x = torch.full((len(y),), len(x), device=links.device).scatter_reduce(0, links[:, 1], links[:, 0], "amin")
    x_to_y, y_to_x = settings[0][1]
    halves = [
        torch.isin(groups[x_to_y.query], second_half),
        torch.isin(groups[first_x[y_to_x.query]], second_half),
    ]
    (correction_0, ranks_0), (correction_1, ranks_1) = (
        _choose(settings, [in_second != half for in_second in halves]) for half in (False, True)
    )
    merged = [_merge(a, b, ~in_second) for a, b, in_second in zip(ranks_0, ranks_1, halves, strict=True)]
    return (merged[0], merged[1]), [correction_0, correction_1]


def _choose(settings: Iterable[Setting], kept: Sequence[Tensor] | None = None) -> Setting:
    """Return the setting with the best mean reciprocal rank, with its recall@1: means of both directions.

    Args:
        settings: what to choose from.
        kept: per direction which queries count, (n,) bool. None: all.

    """

    def mean(values: Sequence[Tensor]) -> float:
        chosen = values if kept is None else [one[rows] for one, rows in zip(values, kept, strict=True)]
        # If few y belong to many x, all of them may be in one half: the empty half counts as 0.
        return sum(float(one.sum()) / max(1, len(one)) for one in chosen) / 2

    correction, ranks = max(settings, key=lambda setting: mean([1 / of.expected() for of in setting[1]]))
    return replace(correction, recall=mean([of.hits(1) for of in ranks])), ranks


def bank_rows(ids: Integers, size: int) -> Tensor:
    """Return the rows of a bank: the first of each distinct item, evenly spaced if there are more than `size`.

    Args:
        ids: (n,) integers, equal for copies of one item.
        size: Largest number of rows.

    Returns:
        (min(distinct, size),) int64.

    Example:
        >>> bank_rows([5, 5, 3, 8, 3, 9], 3).tolist()
        [2, 3, 5]

    """
    distinct = np.unique(as_integers("ids", ids, None).cpu().numpy(), return_index=True)
    first = torch.from_numpy(distinct[1])
    return first[evenly_spaced(len(first), size)]


def _merge(
    a: Ranks,
    b: Ranks,
    take_a: Tensor,
) -> Ranks:
    """Take each query's entry from a or b, which differ only in the candidates' scores."""
    counts: dict[str, Any] = {
        name: torch.where(take_a, getattr(a, name), getattr(b, name)) for name in ("above", "tied", "own")
    }
    return replace(a, **counts)


# ---------------------------------------------------------------------------------------------------------------------
# What popularity predicts
# ---------------------------------------------------------------------------------------------------------------------


def popularity_agreement(
    anchors: Features,
    candidates: Features,
    temperature: float,
    k: int = K,
) -> float:
    """Return how well popularity predicts what other queries find.

    Popularity is solved with every other anchor. It is compared with N_k of the remaining anchors. At most 4,000 of
    each, and 100,000 candidates, are used, evenly spaced.

    Args:
        anchors: Features of the queries, (n_x, d).
        candidates: Features of the candidates, (n_y, d).
        temperature: Of the popularity problem.
        k: How many candidates an anchor finds.

    Returns:
        The rank correlation of zeta with N_k; NaN with fewer than four anchors or no more than k candidates.

    Raises:
        ValueError: If an argument has a wrong type or shape.

    Example:
        >>> import torch
        >>> x = torch.nn.functional.normalize(torch.arange(90.0).sin().reshape(30, 3), dim=1)
        >>> -1 <= popularity_agreement(x[:15], x[15:], temperature=0.1) <= 1
        True

    """
    if len(anchors) < 4 or len(candidates) <= k:
        return math.nan
    anchors = as_rows("anchors", anchors)
    candidates = as_rows("candidates", candidates)
    if len(candidates) > MOST_CANDIDATES:
        candidates = candidates.take(evenly_spaced(len(candidates), MOST_CANDIDATES))
    fix = PopularityCorrection(
        temperature,
        strength=1.0,
        bank_size=LARGEST,
    )
    fix.fit(anchors.part(slice(0, None, 2)), candidates, items=True)
    others = anchors.part(slice(1, None, 2))
    found = hubness(others.take(evenly_spaced(len(others), LARGEST)), candidates, k)
    return rank_correlation(fix.bias(candidates), found.counts)
