"""Popularity-corrected retrieval: rank by s - strength * zeta, so that hubs no longer crowd out the right answer.

A hub is a candidate that is near to too many queries. Its zeta is large: the popularity problem (`nuclr.popularity`)
of a bank of queries and the candidates they choose from makes all candidates equally often chosen. It is solved on the
bank, once for all galleries, and extended to the gallery: most of what a training query looks for is among the training
candidates, not in a small gallery it never saw. The bank may be training pairs, so that nothing of a test set is used;
with the test pairs themselves as the bank the figure is *transductive* and has to be called so. Temperature and
strength are chosen on validation.

    bias = gallery_bias(train_images, captions, candidates=train_captions)        # (n_captions,)
    scores = images @ captions.T - bias                                    # or ranks(images, captions, links, bias)
    index.add(append_bias(captions, bias)); index.search(append_one(images), 10)   # any inner-product index does it

Relations: tau log sum_b exp(s_bj/tau) / Z_b with the bank's partition functions Z_b. With Z_b = 1 it is the inverted
softmax (Smith et al. 2017), in which queries with many near candidates count most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nuclr.evaluation.ranks import Ranks
from nuclr.evaluation.retrieval import both
from nuclr.popularity import Result, solve

# Temperatures in units of the scores' standard deviation, so that they suit any model: those of a CLIP spread less.
SPREADS = (0.25, 0.4, 0.6, 0.8)
DEFAULT_SPREAD = 0.6
STRENGTHS = (0.5, 0.75, 1.0, 1.25)
BANK_SIZE = 12_000  # images, and captions: more cost time and change next to nothing
TOLERANCE = 1e-3  # of the solver's residual: a rank does not feel less


@dataclass(frozen=True)
class Correction:
    """A temperature of the popularity problem (None: by the scores' spread) and a factor on its zeta.

    `recall` is the recall@1, mean of both directions, that they reached where they were chosen.
    """

    temperature: float | None = None
    strength: float = 1.0
    recall: float | None = None

    def biases(self, bank: "Bank", x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What to subtract from the scores of images x and of captions y."""
        zeta_x, zeta_y = bank.biases(x, y, self.temperature)
        return self.strength * zeta_x, self.strength * zeta_y


def gallery_bias(
    bank: Tensor,
    gallery: Tensor,
    temperature: float | None = None,
    strength: float = 1.0,
    candidates: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """What to subtract from the scores of each candidate, (n_gallery,), of mean zero.

    Args:
        bank: features of queries of the kind that will be asked, (n_bank, d).
        gallery: features of the candidates to be ranked, (n_gallery, d).
        temperature: of the popularity problem, not the one trained with; higher corrects more coarsely. None: 0.6
            standard deviations of the scores.
        strength: factor on zeta.
        candidates: features of what the bank's queries choose from, (n, d), such as the training captions of training
            images. None: from the gallery.
        options: of `nuclr.popularity.solver`.

    """
    temperature = DEFAULT_SPREAD * spread(bank, gallery) if temperature is None else temperature
    options = {"temperature": temperature, "tolerance": TOLERANCE} | options
    if candidates is None:
        return strength * solve(bank, gallery, **options).zeta
    return strength * _extended(solve(bank, candidates, **options), gallery)


def bias_of_scores(
    scores: Tensor,
    temperature: float | None = None,
    strength: float = 1.0,
    candidates: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The same from the bank's scores of the gallery (n_bank, n_gallery) and of `candidates` (n_bank, n), of any model.

    It need not be an inner product.
    """
    temperature = DEFAULT_SPREAD * float(scores.std()) if temperature is None else temperature
    options = {"temperature": temperature, "tolerance": TOLERANCE} | options
    if candidates is None:
        return strength * solve(scores=scores, **options).zeta
    return strength * _extended(solve(scores=candidates, **options), scores)


def _extended(found: Result, gallery: Tensor) -> Tensor:
    zeta = found.extend(gallery)
    return zeta - zeta.mean()


class Bank:
    """Images x (n_x, d) and captions y (n_y, d), each the queries that the others are chosen by, such as training's.

    Solved once for each temperature; a gallery then costs one pass.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self._solved: dict[float, tuple[Result, Result]] = {}

    def biases(self, x: Tensor, y: Tensor, temperature: float | None) -> tuple[Tensor, Tensor]:
        """What to subtract from the scores of images x and of captions y, each of mean zero; see `gallery_bias`."""
        temperature = DEFAULT_SPREAD * spread(self.x, y) if temperature is None else temperature
        if temperature not in self._solved:
            sides = ((self.y, self.x), (self.x, self.y))
            of_x, of_y = (solve(*side, temperature=temperature, tolerance=TOLERANCE) for side in sides)
            self._solved[temperature] = of_x, of_y
        of_x, of_y = self._solved[temperature]
        return _extended(of_x, x), _extended(of_y, y)


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
    bank: Bank,
    temperatures: Sequence[float] | None = None,
    strengths: Sequence[float] = STRENGTHS,
) -> Correction:
    """The correction with the best mean reciprocal rank of both directions on validation pairs.

    On Flickr8k it chooses better than recall@1, which jumps with single queries.

    Args:
        x: (n_x, d), images to validate on.
        y: (n_y, d), captions.
        pairs: (n, 2), which belong together.
        bank: what popularity is learnt from.
        temperatures: candidates; None: some around 0.6 standard deviations of the scores.
        strengths: candidates.

    """
    best, highest = None, 0.0
    for setting, ranked in tried(x, y, pairs, bank, temperatures, strengths):
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
    bank: Bank,
    temperatures: Sequence[float] | None = None,
    strengths: Sequence[float] = STRENGTHS,
) -> Iterator[tuple[Correction, tuple[Ranks, Ranks]]]:
    """Every correction that `choose` looks at, with the ranks of both directions under it."""
    if temperatures is None:
        scale = spread(bank.x, y)
        temperatures = [float(f"{step * scale:.3g}") for step in SPREADS]
    for temperature in temperatures:
        zeta_x, zeta_y = bank.biases(x, y, temperature)
        for strength in strengths:
            yield Correction(temperature, strength), both(x, y, pairs, strength * zeta_x, strength * zeta_y)
