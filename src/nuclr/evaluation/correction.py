"""Popularity-corrected retrieval: rank by s - strength * zeta, so that hubs no longer crowd out the right answer.

A hub is a candidate of the gallery that is near to too many queries. Its zeta is large: the popularity problem
(`nuclr.popularity`, rectangular) solved for the gallery with a bank of queries as anchors makes all candidates equally
often chosen. The bank may be training queries, so that nothing of a test set is used; with the test queries themselves
as the bank the figure is *transductive* and has to be called so. Temperature and strength are chosen on validation.

    bias = gallery_bias(train_images, captions)                            # (n_captions,)
    scores = images @ captions.T - bias                                    # or ranks(images, captions, links, bias)
    index.add(append_bias(captions, bias)); index.search(append_one(images), 10)   # any inner-product index does it

Relations: one step of the solver from zeta = 0 without the anchors' normalisation is the inverted softmax (Smith et al.
2017); with Z_i it is the first iteration of Sinkhorn's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nuclr.evaluation.ranks import Ranks
from nuclr.evaluation.retrieval import both
from nuclr.popularity import solve

# Temperatures in units of the scores' standard deviation, so that they suit any model: those of a CLIP spread less.
SPREADS = (0.25, 0.4, 0.6, 0.8)
DEFAULT_SPREAD = 0.6
STRENGTHS = (0.5, 0.75, 1.0, 1.25)
TOLERANCE = 1e-3  # of the solver's residual: a rank does not feel less


@dataclass(frozen=True)
class Correction:
    """A temperature of the popularity problem (None: by the scores' spread) and a factor on its zeta.

    `recall` is the recall@1, mean of both directions, that they reached where they were chosen.
    """

    temperature: float | None = None
    strength: float = 1.0
    recall: float | None = None


def gallery_bias(
    bank: Tensor, gallery: Tensor, temperature: float | None = None, strength: float = 1.0, **options: Any
) -> Tensor:
    """What to subtract from the scores of each candidate, (n_gallery,), of mean zero.

    Args:
        bank: features of queries of the kind that will be asked, (n_bank, d).
        gallery: features of the candidates, (n_gallery, d).
        temperature: of the popularity problem, not the one trained with; higher corrects more coarsely. None: 0.6
            standard deviations of the scores.
        strength: factor on zeta.
        options: of `nuclr.popularity.solve`.

    """
    temperature = DEFAULT_SPREAD * spread(bank, gallery) if temperature is None else temperature
    return strength * solve(bank, gallery, temperature=temperature, **{"tolerance": TOLERANCE} | options).zeta


def bias_of_scores(scores: Tensor, temperature: float | None = None, strength: float = 1.0, **options: Any) -> Tensor:
    """The same from the scores (n_bank, n_gallery) of any model, also one that is no inner product."""
    temperature = DEFAULT_SPREAD * float(scores.std()) if temperature is None else temperature
    return strength * solve(scores=scores, temperature=temperature, **{"tolerance": TOLERANCE} | options).zeta


def spread(bank: Tensor, gallery: Tensor) -> float:
    """Standard deviation of all scores <b, g>, without making them: E s^2 is the product of the second moments."""
    b, g = bank.double(), gallery.double()
    square = float(((b.T @ b) * (g.T @ g)).sum()) / (len(b) * len(g))
    return max(square - float(b.mean(dim=0) @ g.mean(dim=0)) ** 2, 1e-12) ** 0.5


def append_bias(gallery: Tensor, bias: Tensor) -> Tensor:
    """Gallery (n, d) with one more coordinate, -bias; its inner product with `append_one` of q is <q, g> - bias."""
    return torch.cat([gallery, -bias[:, None].to(gallery)], dim=1)


def append_one(queries: Tensor) -> Tensor:
    """Queries (n, d) with one more coordinate, 1."""
    return torch.cat([queries, queries.new_ones(len(queries), 1)], dim=1)


def choose(
    x: Tensor,
    y: Tensor,
    pairs: Tensor,
    bank_x: Tensor,
    bank_y: Tensor,
    temperatures: Sequence[float] | None = None,
    strengths: Sequence[float] = STRENGTHS,
) -> Correction:
    """The correction with the best mean reciprocal rank of both directions on validation pairs.

    On Flickr8k it chooses better than recall@1, which jumps with single queries.

    Args:
        x: (n_x, d), images to validate on.
        y: (n_y, d), captions.
        pairs: (n, 2), which belong together.
        bank_x: (m_x, d), image queries that the captions' popularity is solved with.
        bank_y: (m_y, d), caption queries for the images'.
        temperatures: candidates; None: some around 0.6 standard deviations of the scores.
        strengths: candidates.

    """
    best, highest = None, 0.0
    for setting, ranked in tried(x, y, pairs, bank_x, bank_y, temperatures, strengths):
        quality = sum(float((1 / of.expected()).mean()) for of in ranked)
        if quality > highest:
            recall = sum(float(of.hits(1).mean()) for of in ranked) / 2
            best, highest = replace(setting, recall=recall), quality
    if best is None:
        raise ValueError("no temperatures or strengths to choose from")
    return best


def tried(
    x: Tensor,
    y: Tensor,
    pairs: Tensor,
    bank_x: Tensor,
    bank_y: Tensor,
    temperatures: Sequence[float] | None = None,
    strengths: Sequence[float] = STRENGTHS,
) -> Iterator[tuple[Correction, tuple[Ranks, Ranks]]]:
    """Every correction that `choose` looks at, with the ranks of both directions under it."""
    if temperatures is None:
        scale = spread(bank_x, y)
        temperatures = [float(f"{step * scale:.3g}") for step in SPREADS]
    for temperature in temperatures:
        zeta_x, zeta_y = gallery_bias(bank_y, x, temperature), gallery_bias(bank_x, y, temperature)
        for strength in strengths:
            yield Correction(temperature, strength), both(x, y, pairs, strength * zeta_x, strength * zeta_y)
