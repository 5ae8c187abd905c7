"""Popularity-corrected retrieval: rank by s - strength * zeta, so that hubs no longer crowd out the right answer.

A hub is a candidate that is near to too many queries. Its zeta is large. The popularity problem is solved on a *bank*:
queries, and the candidates that they choose from. At its solution all candidates are chosen equally often. The solution
is then extended to the gallery. Solving on the bank works better than solving on a small gallery, because most of what
a training query looks for is among the training candidates. One solution serves all galleries.

The bank may consist of training pairs, so that nothing of a test set is used. If the test pairs themselves are the
bank, the result is *transductive* and must be reported as such. Temperature and strength are chosen on validation pairs
(`nuclr.evaluation.choose_correction`).

    bias = gallery_bias(train_images, captions, candidates=train_captions)         # (n_captions,)
    scores = images @ captions.T - bias                              # or query_ranks(images, captions, links, bias)
    index.add(append_bias(captions, bias)); index.search(append_one(images), 10)   # any inner-product index

Relations: the bias is tau log sum_b exp(s_bj/tau) / Z_b with the bank's partition functions Z_b. With Z_b = 1 it is the
inverted softmax (Smith et al. 2017), in which queries with many near candidates count most.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nuclr.popularity.problem import Array, as_features, as_matrix, as_vector
from nuclr.popularity.result import Result
from nuclr.popularity.solver import solve

DEFAULT_TEMPERATURE_FACTOR = 0.6  # default temperature in units of the scores' standard deviation
BANK_SIZE = 12_000  # images, and captions: a larger bank takes longer and hardly changes the result
TOLERANCE = 1e-3  # of the solver's residual: a smaller residual does not change ranks


@dataclass(frozen=True)
class Correction:
    """Temperature and strength of a popularity correction.

    Args:
        temperature: Of the popularity problem. None: 0.6 standard deviations of the scores.
        strength: Factor on zeta.
        recall: Recall@1, mean of both directions, on the pairs that the correction was chosen on.

    Example:
        >>> Correction(temperature=0.05, strength=0.75)
        Correction(temperature=0.05, strength=0.75, recall=None)

    """

    temperature: float | None = None
    strength: float = 1.0
    recall: float | None = None

    def biases(self, bank: "Bank", x: Array, y: Array) -> tuple[Tensor, Tensor]:
        """Return the biases to subtract from the scores of images x and of captions y, (n_x,) and (n_y,)."""
        zeta_x, zeta_y = bank.biases(x, y, self.temperature)
        return self.strength * zeta_x, self.strength * zeta_y


def gallery_bias(
    bank: Array,
    gallery: Array,
    temperature: float | None = None,
    strength: float = 1.0,
    candidates: Array | None = None,
    *,
    normalize: bool = False,
    **options: Any,
) -> Tensor:
    """Return the bias to subtract from the scores of each candidate of a gallery.

    Args:
        bank: Features of queries of the kind that will be asked, (n_bank, d), unit norm.
        gallery: Features of the candidates to be ranked, (n_gallery, d), unit norm.
        temperature: Of the popularity problem, not the one used in training; a higher temperature corrects more
            coarsely. None: 0.6 standard deviations of the scores.
        strength: Factor on zeta.
        candidates: Features of what the bank's queries choose from, (n, d), such as the training captions of training
            images. None: they choose from the gallery.
        normalize: Scale all features to unit norm first.
        options: Passed on to `solve`.

    Returns:
        (n_gallery,), of mean zero.

    Raises:
        ValueError: If features have a wrong type or shape, are not finite, or do not have unit norm.

    Example:
        >>> queries = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2], [1.0, -0.2], [0.2, 1.0]]), dim=1)
        >>> bias = gallery_bias(queries, torch.eye(2), temperature=0.5)
        >>> bool(bias[0] > bias[1])  # near to two of the three queries
        True

    """
    bank, gallery = (as_features(n, v, normalize) for n, v in (("bank", bank), ("gallery", gallery)))
    temperature = DEFAULT_TEMPERATURE_FACTOR * score_std(bank, gallery) if temperature is None else temperature
    options = {"temperature": temperature, "tolerance": TOLERANCE} | options
    if candidates is None:
        return strength * solve(bank, gallery, **options).zeta
    candidates = as_features("candidates", candidates, normalize)
    return strength * _centered(solve(bank, candidates, **options), gallery)


def bias_from_scores(
    scores: Array,
    temperature: float | None = None,
    strength: float = 1.0,
    candidates: Array | None = None,
    **options: Any,
) -> Tensor:
    """Return the bias to subtract from the scores of each candidate of a gallery, from scores of any model.

    The scores need not be inner products.

    Args:
        scores: Scores of the gallery for the bank's queries, (n_bank, n_gallery).
        temperature: Of the popularity problem. None: 0.6 standard deviations of the scores.
        strength: Factor on zeta.
        candidates: Scores of what the bank's queries choose from, (n_bank, n). None: they choose from the gallery.
        options: Passed on to `solve`.

    Returns:
        (n_gallery,), of mean zero.

    Raises:
        ValueError: If scores have a wrong type or shape or are not finite.

    Example:
        >>> import numpy as np
        >>> bias_from_scores(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), temperature=0.5).argmax()
        tensor(0)

    """
    scores = as_matrix("scores", scores)
    temperature = DEFAULT_TEMPERATURE_FACTOR * float(scores.std()) if temperature is None else temperature
    options = {"temperature": temperature, "tolerance": TOLERANCE} | options
    if candidates is None:
        return strength * solve(scores=scores, **options).zeta
    return strength * _centered(solve(scores=as_matrix("candidates", candidates), **options), scores)


def _centered(result: Result, gallery: Tensor) -> Tensor:
    zeta = result.extend(gallery)
    return zeta - zeta.mean()


class Bank:
    """Images x and captions y, such as those of training, on which popularity is solved in both directions.

    Each side serves as the queries that choose from the other. The problem is solved once per temperature; a gallery
    then costs one pass.

    Args:
        x: Features of the images, (n_x, d), unit norm.
        y: Features of the captions, (n_y, d), unit norm.
        normalize: Scale all features to unit norm, including those passed to `biases`.

    Raises:
        ValueError: If features have a wrong type or shape, are not finite, or do not have unit norm.

    Example:
        >>> x = torch.nn.functional.normalize(torch.arange(24.0).sin().reshape(8, 3), dim=1)
        >>> bank = Bank(x, x)
        >>> bank
        Bank(x=8, y=8, dimensions=3, solved_temperatures=[])
        >>> bias_x, bias_y = bank.biases(x[:4], x[:5], temperature=0.1)
        >>> bias_x.shape, bias_y.shape
        (torch.Size([4]), torch.Size([5]))

    """

    def __init__(self, x: Array, y: Array, *, normalize: bool = False) -> None:
        self.x, self.y = (as_features(name, side, normalize) for name, side in (("x", x), ("y", y)))
        self.normalize = normalize
        self._solved: dict[float, tuple[Result, Result]] = {}

    def __repr__(self) -> str:
        """Return one line with the sizes."""
        sizes = f"x={len(self.x)}, y={len(self.y)}, dimensions={self.x.shape[1]}"
        return f"Bank({sizes}, solved_temperatures={sorted(self._solved)})"

    def biases(self, x: Array, y: Array, temperature: float | None) -> tuple[Tensor, Tensor]:
        """Return the biases to subtract from the scores of images x and of captions y.

        Args:
            x: Features of the images of the gallery, (n_x, d).
            y: Features of the captions of the gallery, (n_y, d).
            temperature: Of the popularity problem. None: 0.6 standard deviations of the scores.

        Returns:
            (n_x,) and (n_y,), each of mean zero (see `gallery_bias`).

        Raises:
            ValueError: If features have a wrong type or shape, are not finite, or do not have unit norm.

        """
        x, y = (as_features(name, side, self.normalize) for name, side in (("x", x), ("y", y)))
        temperature = DEFAULT_TEMPERATURE_FACTOR * score_std(self.x, y) if temperature is None else temperature
        if temperature not in self._solved:
            sides = ((self.y, self.x), (self.x, self.y))
            of_x, of_y = (solve(*side, temperature=temperature, tolerance=TOLERANCE) for side in sides)
            self._solved[temperature] = of_x, of_y
        of_x, of_y = self._solved[temperature]
        return _centered(of_x, x), _centered(of_y, y)


def score_std(bank: Array, gallery: Array) -> float:
    """Return the standard deviation of all scores <b, g> without computing them.

    E s^2 is the inner product of the two second-moment matrices, divided by the number of scores.

    Args:
        bank: (n_bank, d).
        gallery: (n_gallery, d).

    Returns:
        The standard deviation (not less than 1e-6).

    Raises:
        ValueError: If an argument is not a finite floating-point matrix.

    Example:
        >>> round(score_std(torch.eye(2), torch.eye(2)), 3)
        0.5

    """
    b, g = as_matrix("bank", bank).double(), as_matrix("gallery", gallery).double()
    square = float(((b.T @ b) * (g.T @ g)).sum()) / (len(b) * len(g))
    return float(max(square - float(b.mean(dim=0) @ g.mean(dim=0)) ** 2, 1e-12) ** 0.5)


def append_bias(gallery: Array, bias: Array) -> Tensor:
    """Append the coordinate -bias to each candidate; its inner product with `append_one` of q is <q, g> - bias.

    Args:
        gallery: (n, d).
        bias: (n,).

    Returns:
        (n, d + 1), to be added to any inner-product index.

    Raises:
        ValueError: If a shape or type is wrong.

    Example:
        >>> append_bias(torch.tensor([[0.6, 0.8]]), [0.5]).tolist()[0][-1]
        -0.5

    """
    gallery = as_matrix("gallery", gallery)
    bias = as_vector("bias", bias, len(gallery))
    return torch.cat([gallery, -bias[:, None].to(gallery)], dim=1)


def append_one(queries: Array) -> Tensor:
    """Append the coordinate 1 to each query.

    Args:
        queries: (n, d).

    Returns:
        (n, d + 1).

    Raises:
        ValueError: If `queries` is not a finite floating-point matrix.

    Example:
        >>> append_one(torch.zeros(1, 2)).tolist()
        [[0.0, 0.0, 1.0]]

    """
    queries = as_matrix("queries", queries)
    return torch.cat([queries, queries.new_ones(len(queries), 1)], dim=1)
