"""What is true of the built-in pairs: p(caption | picture), every caption's popularity, every false negative.

With q(y) = sum over the n pictures of p(y | x_i), there are two popularities, of the same numbers:

- of a *pair* j: q_j = q(y_j), the paper's q, one for each pair. Pairs with equal captions have equal q_j.
- of a *distinct caption* y: q(y), once, however often y was drawn. How often it was drawn is its *count*, and q(y) is
  the expectation of the count given the pictures.

Fed with the scores s_ij = tau log p(y_j | x_i), the exact solver finds the q for which every picture gives away a mass
of 1 and every pair's caption receives one. The true q does so up to the noise of which captions were drawn: its Z_i =
sum_j p(y_j | x_i) / q_j are 1 on average. So the solver recovers q the better the more often captions repeat; the rank
correlation over pairs is 0.97 to 0.98 at n = 1000, 0.995 at 4000 and 0.999 at 20,000. Over distinct
captions it solves the same problem only with their counts as y_weight (`grouped`).

A pair whose caption fits no other picture of the data set is the solver's hard case: its column needs all of that
picture's mass, so its q falls towards 0, where only the floor of impossible scores holds it. The true q is among the
smallest there as well, so ranks hardly suffer; a Pearson correlation of log q does.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nuclr.data.builtin.grammar import LEVELS, SLOTS, WORDS
from nuclr.data.builtin.scenes import Codes

Numbers = NDArray[np.integer]

FLOOR = -30.0


@dataclass(frozen=True)
class Grouped:
    """The same data set with equal scenes and equal captions taken together: m pairs, S scenes, C captions.

    `log_p` (S, C); `scene_count` (S,) and `caption_count` (C,), each summing to m; `caption` (m,), the column of each
    pair's caption. solve(scores=tau log_p, x_weight=scene_count, y_weight=caption_count).zeta[caption] is the zeta of
    the m pairs.
    """

    log_p: NDArray[np.float64]
    scene_count: NDArray[np.int64]
    caption_count: NDArray[np.int64]
    caption: NDArray[np.int64]


@dataclass(frozen=True)
class Truth:
    """`scenes` (n,) and `captions` (n,): the codes of every pair's picture and caption."""

    scenes: Codes
    captions: Codes

    def log_p(self, pictures: Numbers, captions: Numbers, floor: float = -np.inf) -> NDArray[np.float64]:
        """The matrix log p(caption | picture), (len(pictures), len(captions)), both given by pairs' numbers.

        A caption that does not fit has -inf, or `floor` for a solver that needs finite scores: FLOOR gives it a
        probability of e^-30 = 1e-13, nothing beside the smallest that fits (2e-4) even when a million of them add up.
        """
        return _log_p(self.scenes[pictures], self.captions[captions], floor)

    def popularity(self, numbers: Numbers | None = None) -> NDArray[np.float64]:
        """q_j of each pair, over the data set of the pairs with these numbers; without numbers, of all n."""
        captions = self.captions if numbers is None else self.captions[numbers]
        return self.caption_popularity(numbers)[captions]

    def caption_popularity(self, numbers: Numbers | None = None) -> NDArray[np.float64]:
        """q(y) of every caption of the language by its code, drawn or not; the sum is the number of pictures.

        As p is a product over the slots, the sum over pictures is a histogram of the scenes times one table a slot.
        """
        scenes = self.scenes if numbers is None else self.scenes[numbers]
        q = np.bincount(scenes, minlength=int(np.prod(LEVELS))).reshape(LEVELS).astype(np.float64)
        for slot in SLOTS:
            q = np.tensordot(q, slot.table, axes=(0, 0))  # the slot's levels leave in front, its words enter behind
        return q.reshape(-1)

    def grouped(self, numbers: Numbers | None = None, floor: float = -np.inf) -> Grouped:
        """The data set of the pairs with these numbers (without: all n) by distinct scenes and captions."""
        rows = slice(None) if numbers is None else numbers
        scenes, scene_count = np.unique(self.scenes[rows], return_counts=True)
        captions, caption, caption_count = np.unique(self.captions[rows], return_inverse=True, return_counts=True)
        return Grouped(_log_p(scenes, captions, floor), scene_count, caption_count, caption)

    def false_negatives(self, numbers: Numbers) -> NDArray[np.bool_]:
        """(m, m), row i and column j: the caption of another pair j also fits the picture of i."""
        fits = np.isfinite(self.log_p(numbers, numbers))
        np.fill_diagonal(fits, False)
        return fits


def _log_p(scenes: Codes, captions: Codes, floor: float) -> NDArray[np.float64]:
    total = np.zeros((len(scenes), len(captions)))
    levels, words = np.unravel_index(scenes, LEVELS), np.unravel_index(captions, WORDS)
    for slot, level, word in zip(SLOTS, levels, words, strict=True):
        with np.errstate(divide="ignore"):
            table = np.log(slot.table)
        total += table[:, word][level]
    return np.maximum(total, floor, out=total)
