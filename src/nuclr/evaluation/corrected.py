"""Correct the ranking of pairs in both directions, with a temperature and strength chosen on validation pairs.

A `Bank` holds a `PopularityCorrection` per direction and temperature. `choose_correction` picks one correction for all
queries. Evaluating it on the same validation pairs would be too optimistic, so `cross_validated_ranks` splits the x
into two halves. The queries of each half (its x and their partners) are ranked in the whole gallery, with the
correction that was best for the other half. So no query influences the correction that it is ranked with.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nuclr.evaluation.ranks import Ranks, as_links
from nuclr.evaluation.retrieval import retrieval_ranks
from nuclr.popularity.correction import (
    DEFAULT_STRENGTH,
    STRENGTHS,
    TEMPERATURE_FACTORS,
    PopularityCorrection,
)
from nuclr.popularity.default_temperature import score_std
from nuclr.popularity.problem import Array, Indices, Vector, as_features, as_vector


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

    def biases(self, bank: "Bank", x: Array, y: Array) -> tuple[Tensor, Tensor]:
        """Return the biases to subtract from the scores of gallery x and of gallery y, (n_x,) and (n_y,)."""
        zeta_x, zeta_y = bank.zeta(x, y, self.temperature)
        return self.strength * zeta_x, self.strength * zeta_y


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

    def __init__(self, x: Array, y: Array, *, transductive: bool = False) -> None:
        self.x, self.y = as_features("x", x), as_features("y", y)
        self.transductive = transductive
        self._fitted: dict[float | None, tuple[PopularityCorrection, PopularityCorrection]] = {}

    def __repr__(self) -> str:
        """Return one line with the sizes."""
        return f"Bank(x={len(self.x)}, y={len(self.y)}, dimensions={self.x.shape[1]})"

    def zeta(self, x: Array, y: Array, temperature: float | None) -> tuple[Tensor, Tensor]:
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
                    queries, candidates, transductive=self.transductive
                )
                for queries, candidates in ((self.y, self.x), (self.x, self.y))
            )
            self._fitted[temperature] = fix_x, fix_y
        fix_x, fix_y = self._fitted[temperature]
        return fix_x.bias(x), fix_y.bias(y)


def choose_correction(
    x: Array,
    y: Array,
    links: Indices,
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
    best, highest = None, 0.0
    for correction, ranks in ranks_by_correction(x, y, links, bank, temperatures, strengths):
        quality = sum(float((1 / of.expected()).mean()) for of in ranks)
        if quality > highest:
            recall = sum(float(of.hits(1).mean()) for of in ranks) / 2
            best, highest = replace(correction, recall=recall), quality
    if best is None:
        raise ValueError("temperatures or strengths is empty; give at least one of each to choose from")
    return best


def ranks_by_correction(
    x: Array,
    y: Array,
    links: Indices,
    bank: Bank,
    temperatures: Sequence[float] | None = None,
    strengths: Sequence[float] = STRENGTHS,
) -> Iterator[tuple[Correction, tuple[Ranks, Ranks]]]:
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
    x: Array, y: Array, links: Indices, bank: Bank, group: Vector | None = None
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
    links = as_links(links, len(x), len(y))
    groups = torch.arange(len(x), device=links.device)
    if group is not None:
        groups = as_vector("group", group, len(x)).long().to(links.device)
    distinct, number = torch.unique(groups[links[:, 0]], return_inverse=True)  # the group of each link, from 0
    if len(distinct) < 2:
        raise ValueError(f"{len(distinct)} x with a partner; needs two to choose on one half for the other")
    settings = list(ranks_by_correction(x, y, links, bank))
    halves = [_half_of_query(links[:, side], number, size) for side, size in ((0, len(x)), (1, len(y)))]
    chosen = []
    for half in (0, 1):
        others = [half_of_query != half for half_of_query in halves]
        correction, ranks = max(
            settings,
            key=lambda setting: _mean_of_both(zip((1 / of.expected() for of in setting[1]), others, strict=True)),
        )
        recall = _mean_of_both(zip((of.hits(1) for of in ranks), others, strict=True))
        chosen.append((replace(correction, recall=recall), ranks))
    (correction_0, ranks_0), (correction_1, ranks_1) = chosen
    merged = [_merge(a, b, half == 0) for a, b, half in zip(ranks_0, ranks_1, halves, strict=True)]
    return (merged[0], merged[1]), [correction_0, correction_1]


def _half_of_query(row: Tensor, group: Tensor, size: int) -> Tensor:
    """Return the half, 0 or 1, of each query that has a partner: that of the first group that it occurs in."""
    none = int(group.max()) + 1
    first = torch.full((size,), none, device=row.device).scatter_reduce(0, row, group, "amin")
    return first[first < none] % 2


def _mean_of_both(directions: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Average over both directions the mean over the selected queries."""
    # If few y belong to many x, all of them may be in one half: the empty half counts as 0.
    return sum(float(values[kept].sum()) / max(1, int(kept.sum())) for values, kept in directions) / 2


def _merge(a: Ranks, b: Ranks, take_a: Tensor) -> Ranks:
    """Take each query's entry from a or b, which differ only in the candidates' scores."""
    above, tied, own = (torch.where(take_a, getattr(a, name), getattr(b, name)) for name in ("above", "tied", "own"))
    return replace(a, above=above, tied=tied, own=own)
