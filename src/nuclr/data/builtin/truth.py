"""The truth about the built-in pairs: p(caption | picture), the popularity of every caption, all false negatives.

With q(y) = sum over the n pictures of p(y | x_i), popularity is defined in two ways:

- of a *pair* j: q_j = q(y_j), the paper's q, one value per pair. Pairs with equal captions have equal q_j.
- of a *distinct caption* y: q(y), one value per caption, however often it was drawn. The number of times it was drawn
  is its *count*, and q(y) is the expectation of the count given the pictures.

Given the scores s_ij = tau log p(y_j | x_i), the exact solver finds the q for which every picture sends a mass of 1 and
every pair's caption receives a mass of 1. The true q satisfies this up to the sampling noise of the captions: Z_i =
sum_j p(y_j | x_i) / q_j is 1 on average. The solver recovers q better if captions repeat more often: the rank
correlation over pairs is 0.97 to 0.98 at n = 1000, 0.995 at 4000 and 0.999 at 20,000. Over distinct captions it solves
the same problem only if their counts are given as y_weight (see `grouped`).

A pair whose caption fits no other picture of the data set is hard for the solver: its column needs all of that
picture's mass, so its q decreases towards 0, stopped only by the floor of impossible scores. The true q of such a
pair is also among the smallest, so ranks hardly change; a Pearson correlation of log q changes a lot.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nuclr.data.builtin.grammar import ONE_SHAPE, Language
from nuclr.data.builtin.scenes import Codes

Numbers = NDArray[np.integer]

FLOOR = -30.0


@dataclass(frozen=True)
class Grouped:
    """A data set of m pairs with equal scenes and equal captions merged: S scenes, C captions.

    solve(scores=tau log_p, x_weight=scene_count, y_weight=caption_count).zeta[caption] is the zeta of the m pairs.

    Attributes:
        log_p: (S, C), log p(caption | scene).
        scene_count: (S,), sums to m.
        caption_count: (C,), sums to m.
        caption: (m,), the column of each pair's caption.

    """

    log_p: NDArray[np.float64]
    scene_count: NDArray[np.int64]
    caption_count: NDArray[np.int64]
    caption: NDArray[np.int64]

    def __repr__(self) -> str:
        scenes, captions = self.log_p.shape
        return f"Grouped({len(self.caption):,} pairs, {scenes:,} scenes, {captions:,} captions)"


@dataclass(frozen=True)
class Truth:
    """The true probabilities behind n pairs.

    Attributes:
        scenes: (n,), the code of each pair's scene.
        captions: (n,), the code of each pair's caption.
        language: of the captions.

    """

    scenes: Codes
    captions: Codes
    language: Language = ONE_SHAPE

    def __repr__(self) -> str:
        return f"Truth({len(self.captions):,} pairs)"

    def log_p(self, pictures: Numbers, captions: Numbers, floor: float = -np.inf) -> NDArray[np.float64]:
        """Return the matrix log p(caption | picture).

        Args:
            pictures: numbers of pairs, whose pictures are the rows.
            captions: numbers of pairs, whose captions are the columns.
            floor: the value for captions that do not fit. The default is exact; a solver that needs finite scores can
                use FLOOR, a probability of e^-30 = 1e-13. Even a million of these add up to less than the smallest
                probability of a caption that fits (2e-4).

        Returns:
            (len(pictures), len(captions)), float64.

        """
        return _log_p(self.language, self.scenes[pictures], self.captions[captions], floor)

    def popularity(self, numbers: Numbers | None = None) -> NDArray[np.float64]:
        """Return q_j of each pair, in the data set of the pairs with these numbers (default: all n)."""
        captions = self.captions if numbers is None else self.captions[numbers]
        return self.caption_popularity(numbers)[captions]

    def caption_popularity(self, numbers: Numbers | None = None) -> NDArray[np.float64]:
        """Return q(y) of every caption of the language, indexed by its code, whether it was drawn or not.

        The values sum to the number of pictures. Because p is a product over the slots, the sum over pictures is a
        histogram of the scenes multiplied by one table per slot.
        """
        scenes = self.scenes if numbers is None else self.scenes[numbers]
        levels = self.language.levels
        q = np.bincount(scenes, minlength=int(np.prod(levels))).reshape(levels).astype(np.float64)
        for slot in self.language.slots:
            q = np.tensordot(q, slot.table, axes=(0, 0))  # removes the first axis (levels), appends one (words)
        return q.reshape(-1)

    def grouped(self, numbers: Numbers | None = None, floor: float = -np.inf) -> Grouped:
        """Merge equal scenes and equal captions of the pairs with these numbers (default: all n)."""
        rows = slice(None) if numbers is None else numbers
        scenes, scene_count = np.unique(self.scenes[rows], return_counts=True)
        captions, caption, caption_count = np.unique(self.captions[rows], return_inverse=True, return_counts=True)
        return Grouped(_log_p(self.language, scenes, captions, floor), scene_count, caption_count, caption)

    def false_negatives(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Return a matrix (m, m): True at (i, j) if j != i and the caption of pair j fits the picture of pair i."""
        fits = np.isfinite(self.log_p(numbers, numbers))
        np.fill_diagonal(fits, False)
        return fits


def _log_p(language: Language, scenes: Codes, captions: Codes, floor: float) -> NDArray[np.float64]:
    total = np.zeros((len(scenes), len(captions)))
    levels, words = np.unravel_index(scenes, language.levels), np.unravel_index(captions, language.words)
    for slot, level, word in zip(language.slots, levels, words, strict=True):
        with np.errstate(divide="ignore"):
            table = np.log(slot.table)
        total += table[:, word][level]
    return np.maximum(total, floor, out=total)
