"""Popularity-corrected retrieval: rank by s - strength * zeta, so that hubs no longer crowd out the right answer.

A hub is a candidate of the gallery that is near to too many queries. Its zeta is large: the popularity problem
(`nuclr.popularity`, rectangular) solved for the gallery with a bank of queries as anchors makes all candidates equally
often chosen. The bank may be training queries, so that nothing of a test set is used; with the test queries themselves
as the bank the figure is *transductive* and has to be called so. Temperature and strength are chosen on validation.

    bias = gallery_bias(train_images, captions, temperature=0.05)          # (n_captions,)
    scores = images @ captions.T - bias                                    # or ranks(images, captions, links, bias)
    index.add(append_bias(captions, bias)); index.search(append_one(images), 10)   # any inner-product index does it

Relations: one step of the solver from zeta = 0 without the anchors' normalisation is the inverted softmax (Smith et al.
2017); with Z_i it is the first iteration of Sinkhorn's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr.evaluation.retrieval import both
from nuclr.popularity import solve

TEMPERATURES = (0.03, 0.05, 0.07, 0.1, 0.15, 0.2)
STRENGTHS = (0.75, 1.0)
DEFAULT_TEMPERATURE = 0.1
TOLERANCE = 1e-3  # of the solver's residual: a rank does not feel less


@dataclass(frozen=True)
class Correction:
    """A temperature of the popularity problem and a factor on its zeta; `recall` is what they reached where chosen."""

    temperature: float = DEFAULT_TEMPERATURE
    strength: float = 1.0
    recall: float | None = None


def gallery_bias(
    bank: Tensor, gallery: Tensor, temperature: float = DEFAULT_TEMPERATURE, strength: float = 1.0, **options: object
) -> Tensor:
    """What to subtract from the scores of each candidate, (n_gallery,), of mean zero.

    Args:
        bank: features of queries of the kind that will be asked, (n_bank, d).
        gallery: features of the candidates, (n_gallery, d).
        temperature: of the popularity problem, not the one trained with; higher corrects more coarsely.
        strength: factor on zeta.
        options: of `nuclr.popularity.solve`.

    """
    return strength * solve(bank, gallery, temperature=temperature, **{"tolerance": TOLERANCE} | options).zeta  # type: ignore[arg-type]


def bias_of_scores(
    scores: Tensor, temperature: float = DEFAULT_TEMPERATURE, strength: float = 1.0, **options: object
) -> Tensor:
    """The same from the scores (n_bank, n_gallery) of any model, also one that is no inner product."""
    return strength * solve(scores=scores, temperature=temperature, **{"tolerance": TOLERANCE} | options).zeta  # type: ignore[arg-type]


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
    temperatures: Sequence[float] = TEMPERATURES,
    strengths: Sequence[float] = STRENGTHS,
) -> Correction:
    """The correction with the best recall@1, mean of both directions, on validation pairs.

    Args:
        x: (n_x, d), images to validate on.
        y: (n_y, d), captions.
        pairs: (n, 2), which belong together.
        bank_x: (m_x, d), image queries that the captions' popularity is solved with.
        bank_y: (m_y, d), caption queries for the images'.
        temperatures: candidates.
        strengths: candidates.

    """
    best: Correction | None = None
    for temperature in temperatures:
        zeta_x, zeta_y = gallery_bias(bank_y, x, temperature), gallery_bias(bank_x, y, temperature)
        for strength in strengths:
            ranked = both(x, y, pairs, strength * zeta_x, strength * zeta_y)
            recall = sum(float(of.hits(1).mean()) for of in ranked) / 2
            if best is None or best.recall is None or recall > best.recall:
                best = Correction(temperature, strength, recall)
    if best is None:
        raise ValueError("no temperatures or strengths to choose from")
    return best
