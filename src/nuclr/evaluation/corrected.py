"""Corrected ranks of the very pairs that the correction is chosen on, without flattering it.

The images are split in two halves. The queries of each half (its images, and their captions) are ranked in the whole
gallery under the correction that was best for the queries of the other half; so no query has a say in its own setting.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from nuclr.evaluation.correction import Bank, Correction, tried
from nuclr.evaluation.ranks import Ranks


def cross_chosen(x: Tensor, y: Tensor, pairs: Tensor, bank: Bank) -> tuple[tuple[Ranks, Ranks], list[Correction]]:
    """Ranks of both directions, and the correction of each half (arguments: see `correction.choose`)."""
    images, place = torch.unique(pairs[:, 0], return_inverse=True)
    if len(images) < 2:
        raise ValueError(f"{len(images)} image with captions; needs two to choose on one half for the other")
    found = list(tried(x, y, pairs, bank))
    first = torch.full((len(y),), len(images), device=pairs.device)
    first = first.scatter_reduce(0, pairs[:, 1], place, "amin")  # a caption goes with the first of its images
    sides = torch.arange(len(images), device=pairs.device) % 2, first[first < len(images)] % 2
    chosen = []
    for half in (0, 1):
        others = [side != half for side in sides]
        setting, ranked = max(
            found, key=lambda tried: _both(zip((1 / of.expected() for of in tried[1]), others, strict=True))
        )
        recall = _both(zip((of.hits(1) for of in ranked), others, strict=True))
        chosen.append((replace(setting, recall=recall), ranked))
    (one, of_one), (other, of_other) = chosen
    merged = [_merge(a, b, side == 0) for a, b, side in zip(of_one, of_other, sides, strict=True)]
    return (merged[0], merged[1]), [one, other]


def _both(directions: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Mean over both directions of the mean over the chosen queries."""
    # Few captions of many images may all go with one half: none is counted as 0.
    return sum(float(values[kept].sum()) / max(1, int(kept.sum())) for values, kept in directions) / 2


def _merge(a: Ranks, b: Ranks, take_a: Tensor) -> Ranks:
    """Each query's entry from one of the two, which differ only in where the candidates stand."""
    above, tied, own = (torch.where(take_a, getattr(a, name), getattr(b, name)) for name in ("above", "tied", "own"))
    return replace(a, above=above, tied=tied, own=own)
