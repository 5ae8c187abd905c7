"""Corrections of hubness from the literature, written from their papers, with settings to choose from.

Scores s_ij = <q_i, g_j> of query i and item j of the gallery, s_bj of query b of the bank, and s_cj of candidate c of
the bank. d = sqrt(2 - 2 s) is the Euclidean distance. Temperatures t are in units of the standard deviation of the
bank's scores, so that one grid suits all models. `GRIDS` has SETTINGS settings per method; those with a single setting
get SETTINGS values of it. `published` returns the setting that the paper, or the code of the paper, has as its default;
where a paper tunes the temperature, it is the 1/20 of QB-Norm. Scores are ranked per query, so terms that depend only
on the query are left out. No method knows answers in its paper; with known answers, the score of a bank's query and its
answer is replaced by the mean score of the item, so that it does not count.

- inverted softmax:  s_ij - t log sum_b exp(s_bj/t)                                           (Smith et al., ICLR 2017)
- dual softmax:      s_ij p_ij, p_ij = exp(s_ij/t) / (exp(s_ij/t) + sum_b exp(s_bj/t))        (Cheng et al. 2021; the
                     paper sums over the test queries, which are the bank of the transductive table)
- CSLS:              2 s_ij - mean of the k largest s_bj                                     (Conneau et al., ICLR 2018)
- local scaling:     -d_ij^2 / r_j, r_j = distance of item j to its k-th nearest query of the bank (Zelnik-Manor and
                     Perona 2004), or the mean distance to the k nearest (NICDM, Jegou et al. 2007)
- mutual proximity:  P(D_i > d_ij) P(D_j > d_ij) with D_i the distances of the query to its k nearest candidates of the
                     bank, D_j those of the item to its k nearest queries; Gaussian or empirical distributions
                     (Schnitzer et al., JMLR 2012, with independent factors; k = all there, k nearest in scikit-hubness)
- QB-Norm:           inverted softmax, but only for queries whose plain best item is the best of a query of the bank
                     (dynamic inverted softmax, Bogolin et al., CVPR 2022)
- DualIS:            the product of two inverted softmaxes, one over the bank's queries at t, the other over the bank's
                     candidates (s_cj) at u                                                  (Wang et al., EMNLP 2023)
- NNN:               s_ij - c mean of the k largest s_bj                                  (Chowdhury et al., EMNLP 2024)
- DBSN:              s_ij - zeta_j after ten Sinkhorn iterations between the bank's queries and gallery and candidates
                     together                                                                 (Pan et al., ACM MM 2025)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr.popularity.bank import score_std

SETTINGS = 16
TEMPERATURES = tuple(np.geomspace(0.1, 1.6, SETTINGS).round(3).tolist())
QB_NORM_TEMPERATURE = 1 / 20  # of cosines
SINKHORN_ITERATIONS = 10


@dataclass(frozen=True)
class Task:
    """A search with its bank, all unit-norm features.

    Attributes:
        queries: (n_queries, d).
        gallery: (n_gallery, d).
        bank: Queries of the bank, (n_bank, d).
        candidates: What they choose from, (n_candidates, d). None: the gallery.
        answers: Known answers, (n_bank, k) rows of the gallery, -1 for none. None: not known.

    """

    queries: Tensor
    gallery: Tensor
    bank: Tensor
    candidates: Tensor | None = None
    answers: Tensor | None = None

    @cached_property
    def scores(self) -> Tensor:
        """Plain scores, (n_queries, n_gallery)."""
        return self.queries @ self.gallery.T

    @cached_property
    def bank_scores(self) -> Tensor:
        """Scores of the bank's queries, (n_bank, n_gallery)."""
        scores = self.bank @ self.gallery.T
        if self.answers is not None:
            query, column = (self.answers >= 0).nonzero(as_tuple=True)
            item = self.answers[query, column]
            scores[query, item] = scores.mean(dim=0)[item]
        return scores

    @cached_property
    def nearest_scores(self) -> Tensor:
        """Scores of the bank's queries, the largest of each item first, (n_bank, n_gallery)."""
        return self.bank_scores.sort(dim=0, descending=True).values

    @cached_property
    def nearest_candidates(self) -> Tensor:
        """Scores of each query with the candidates, the largest first, (n_candidates, n_queries)."""
        return (self.choices @ self.queries.T).sort(dim=0, descending=True).values

    @cached_property
    def scale(self) -> float:
        """Standard deviation of the bank's scores."""
        return score_std(self.bank, self.choices)

    @property
    def choices(self) -> Tensor:
        """Candidates, or the gallery without any."""
        return self.gallery if self.candidates is None else self.candidates

    def log_sum(self, temperature: float) -> Tensor:
        """Return log sum_b exp(s_bj/t), (n_gallery,)."""
        return torch.logsumexp(self.bank_scores / (temperature * self.scale), dim=0)


def distances(scores: Tensor) -> Tensor:
    """Return Euclidean distances of unit vectors from their scores."""
    return (2 - 2 * scores).clamp(min=0).sqrt()


def inverted_softmax(task: Task, temperature: float) -> Tensor:
    """Divide by the sum over the bank's queries."""
    return task.scores - temperature * task.scale * task.log_sum(temperature)


def dual_softmax(task: Task, temperature: float) -> Tensor:
    """Multiply the score by the probability of the query given the item."""
    logits = task.scores.double() / (temperature * task.scale)
    return task.scores * torch.exp(logits - torch.logaddexp(logits, task.log_sum(temperature).double()))


def qb_norm(task: Task, temperature: float) -> Tensor:
    """Apply the inverted softmax to queries whose best item is a hub of the bank."""
    hubs = torch.zeros(len(task.gallery), dtype=torch.bool)
    hubs[task.bank_scores.argmax(dim=1)] = True
    activated = hubs[task.scores.argmax(dim=1)][:, None]
    return torch.where(activated, inverted_softmax(task, temperature), task.scores)


def csls(task: Task, neighbors: int) -> Tensor:
    """Subtract the mean score of the item's nearest queries of the bank."""
    return 2 * task.scores - task.nearest_scores[:neighbors].mean(dim=0)


def nnn(task: Task, neighbors: int, strength: float) -> Tensor:
    """Subtract a multiple of the mean score of the item's nearest queries of the bank."""
    return task.scores - strength * task.nearest_scores[:neighbors].mean(dim=0)


def local_scaling(task: Task, neighbors: int, form: str) -> Tensor:
    """Divide squared distances by the item's distance to its nearest queries of the bank."""
    nearest = distances(task.nearest_scores[:neighbors])
    radius = nearest[-1] if form == "k-th" else nearest.mean(dim=0)
    return -distances(task.scores).square() / radius.clamp(min=1e-6)


def mutual_proximity(task: Task, neighbors: int | None, form: str) -> Tensor:
    """Return the (log-)probability that the distance is short for both the query and the item."""
    distance = distances(task.scores)
    item = distances(task.nearest_scores[:neighbors])
    query = distances(task.nearest_candidates[:neighbors])
    if form == "empirical":
        return _share_above(distance.T, item).T * _share_above(distance, query)
    of_item = _log_tail(distance, item.mean(dim=0), item.std(dim=0))
    of_query = _log_tail(distance, query.mean(dim=0)[:, None], query.std(dim=0)[:, None])
    return of_item + of_query


def dual_inverted_softmax(task: Task, temperature: float, candidate_temperature: float) -> Tensor:
    """Divide by the sums over the bank's queries and over its candidates."""
    t = temperature * task.scale
    u = candidate_temperature * score_std(task.choices, task.choices)
    over_candidates = torch.logsumexp(task.choices @ task.gallery.T / u, dim=0)
    return (1 / t + 1 / u) * task.scores - task.log_sum(temperature) - over_candidates


def dual_bank_sinkhorn(task: Task, temperature: float) -> Tensor:
    """Subtract the potential after ten Sinkhorn iterations; gallery and candidates have the same mass each."""
    rows = task.bank_scores.T
    if task.candidates is not None:
        rows = torch.cat([rows, task.candidates @ task.bank.T])
    t = temperature * task.scale
    top = rows.max(dim=1, keepdim=True).values
    kernel = ((rows - top) / t).exp_()  # each row relative to its largest score, so that none underflows
    of_bank = rows.new_ones(len(task.bank))
    for _ in range(SINKHORN_ITERATIONS):
        of_row = 1 / (kernel @ of_bank)
        of_bank = len(rows) / len(of_bank) / (kernel.T @ of_row)
    zeta = top[:, 0] + t * (kernel @ of_bank).log()
    return task.scores - zeta[: len(task.gallery)]


def _log_tail(distance: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return torch.special.log_ndtr((mean - distance) / deviation)


def _share_above(distance: Tensor, nearest: Tensor) -> Tensor:
    """Return per row of `distance` the share of the sorted column of `nearest` that is larger."""
    position = torch.searchsorted(nearest.T.contiguous(), distance.contiguous(), right=True)
    return 1 - position.double() / len(nearest)


PEERS: dict[str, Callable[..., Tensor]] = {
    "CSLS": csls,
    "NNN": nnn,
    "inverted softmax": inverted_softmax,
    "dual softmax": dual_softmax,
    "QB-Norm": qb_norm,
    "DualIS": dual_inverted_softmax,
    "DBSN": dual_bank_sinkhorn,
    "local scaling": local_scaling,
    "mutual proximity": mutual_proximity,
}


def _grid(**values: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(values, setting, strict=True)) for setting in product(*values.values())]


_SOFTMAX = _grid(temperature=TEMPERATURES)
GRIDS: dict[str, list[dict[str, Any]]] = {
    "CSLS": _grid(neighbors=(1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500)),
    "NNN": _grid(neighbors=(8, 32, 128, 512), strength=(0.5, 0.75, 1.0, 1.25)),
    "inverted softmax": _SOFTMAX,
    "dual softmax": _SOFTMAX,
    "QB-Norm": _SOFTMAX,
    "DualIS": _grid(temperature=(0.25, 0.4, 0.6, 0.8), candidate_temperature=(0.25, 0.5, 1.0, 4.0)),
    "DBSN": _SOFTMAX,
    "local scaling": _grid(neighbors=(5, 10, 20, 50, 100, 200, 500, 1000), form=("k-th", "mean")),
    "mutual proximity": _grid(neighbors=(20, 50, 100, 200, 500, 1000, 2000, None), form=("Gaussian", "empirical")),
}


def published(task: Task) -> dict[str, dict[str, Any]]:
    """Return the published default of each method."""
    softmax = {"temperature": QB_NORM_TEMPERATURE / task.scale}
    other = QB_NORM_TEMPERATURE / score_std(task.choices, task.choices)
    return {
        "CSLS": {"neighbors": 10},
        "NNN": {"neighbors": 128, "strength": 0.75},
        "inverted softmax": softmax,
        "dual softmax": softmax,
        "QB-Norm": softmax,
        "DualIS": {**softmax, "candidate_temperature": other},
        "DBSN": softmax,
        "local scaling": {"neighbors": 7, "form": "k-th"},
        "mutual proximity": {"neighbors": None, "form": "Gaussian"},
    }
