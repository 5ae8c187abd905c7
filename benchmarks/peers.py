"""Corrections of hubness from the literature, written from their papers, each with the settings to choose from.

Scores s_ij = <q_i, g_j> of query i and item j of the gallery, s_bj of query b of the bank, and s_cj of candidate c of
the bank. d = sqrt(2 - 2 s) is the Euclidean distance. Temperatures t are in units of the standard deviation of the
bank's scores, so that one grid suits all models. Every method has SETTINGS settings; those with a single setting get
SETTINGS values of it. Scores are ranked per query, so terms that depend only on the query are left out.

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr.popularity.bank import score_std

SETTINGS = 16
TEMPERATURES = tuple(np.geomspace(0.1, 1.6, SETTINGS).round(3).tolist())
FEW_TEMPERATURES = (0.25, 0.4, 0.6, 0.8)
CANDIDATE_TEMPERATURES = (0.25, 0.5, 1.0, 4.0)
CSLS_NEIGHBORS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500)
NNN_NEIGHBORS, NNN_STRENGTHS = (8, 32, 128, 512), (0.5, 0.75, 1.0, 1.25)
SCALING_NEIGHBORS = (5, 10, 20, 50, 100, 200, 500, 1000)
PROXIMITY_NEIGHBORS = (20, 50, 100, 200, 500, 1000, 2000, None)  # None: all
SINKHORN_ITERATIONS = 10

Corrected = Iterator[tuple[dict[str, Any], Tensor]]  # a setting, and the scores (n_queries, n_gallery) to rank by


@dataclass(frozen=True)
class Task:
    """A search with its bank, all unit-norm features.

    Attributes:
        queries: (n_queries, d).
        gallery: (n_gallery, d).
        bank: Queries of the bank, (n_bank, d).
        candidates: What they choose from, (n_candidates, d).

    """

    queries: Tensor
    gallery: Tensor
    bank: Tensor
    candidates: Tensor

    @cached_property
    def scores(self) -> Tensor:
        """Plain scores, (n_queries, n_gallery)."""
        return self.queries @ self.gallery.T

    @cached_property
    def bank_scores(self) -> Tensor:
        """Scores of the bank's queries, (n_bank, n_gallery)."""
        return self.bank @ self.gallery.T

    @cached_property
    def scale(self) -> float:
        """Standard deviation of the bank's scores."""
        return score_std(self.bank, self.candidates)

    @cached_property
    def log_sums(self) -> dict[float, Tensor]:
        """Per temperature, log sum_b exp(s_bj/t), (n_gallery,); several methods use it."""
        return {factor: torch.logsumexp(self.bank_scores / (factor * self.scale), dim=0) for factor in TEMPERATURES}


def distances(scores: Tensor) -> Tensor:
    """Return Euclidean distances of unit vectors from their scores."""
    return (2 - 2 * scores).clamp(min=0).sqrt()


def running_means(sorted_values: Tensor) -> Tensor:
    """Return row k - 1: the mean of the first k rows."""
    return sorted_values.cumsum(dim=0) / torch.arange(1, len(sorted_values) + 1)[:, None]


def inverted_softmax(task: Task) -> Corrected:
    """Divide by the sum over the bank's queries."""
    for factor, log_sum in task.log_sums.items():
        yield {"temperature": factor}, task.scores - factor * task.scale * log_sum


def dual_softmax(task: Task) -> Corrected:
    """Multiply the score by the probability of the query given the item."""
    for factor, log_sum in task.log_sums.items():
        logits = task.scores.double() / (factor * task.scale)
        yield {"temperature": factor}, task.scores * torch.exp(logits - torch.logaddexp(logits, log_sum.double()))


def qb_norm(task: Task) -> Corrected:
    """Apply the inverted softmax to queries whose best item is a hub of the bank."""
    scores = task.scores
    hubs = torch.zeros(len(task.gallery), dtype=torch.bool)
    hubs[task.bank_scores.argmax(dim=1)] = True
    activated = hubs[scores.argmax(dim=1)][:, None]
    for setting, corrected in inverted_softmax(task):
        yield setting, torch.where(activated, corrected, scores)


def csls(task: Task) -> Corrected:
    """Subtract the mean score of the item's nearest queries of the bank."""
    scores, means = task.scores, running_means(_nearest(task.bank_scores, max(CSLS_NEIGHBORS)))
    for k in CSLS_NEIGHBORS:
        yield {"neighbors": k}, 2 * scores - means[min(k, len(means)) - 1]


def nnn(task: Task) -> Corrected:
    """Subtract a multiple of the mean score of the item's nearest queries of the bank."""
    scores, means = task.scores, running_means(_nearest(task.bank_scores, max(NNN_NEIGHBORS)))
    for k in NNN_NEIGHBORS:
        bias = means[min(k, len(means)) - 1]
        yield from (({"neighbors": k, "strength": c}, scores - c * bias) for c in NNN_STRENGTHS)


def local_scaling(task: Task) -> Corrected:
    """Divide squared distances by the item's distance to its nearest queries of the bank."""
    square = distances(task.scores).square()
    nearest = distances(_nearest(task.bank_scores, max(SCALING_NEIGHBORS)))
    means = running_means(nearest)
    for k in SCALING_NEIGHBORS:
        for form, radius in (("k-th", nearest), ("mean", means)):
            yield {"neighbors": k, "form": form}, -square / radius[min(k, len(radius)) - 1]


def mutual_proximity(task: Task) -> Corrected:
    """Return the log-probability that the distance is short for both the query and the item."""
    distance = distances(task.scores)
    of_item = distances(_nearest(task.bank_scores, len(task.bank)))
    of_query = distances(_nearest(task.candidates @ task.queries.T, len(task.candidates)))
    for k in PROXIMITY_NEIGHBORS:
        item, query = of_item[:k], of_query[:k]
        yield (
            {"neighbors": k, "form": "Gaussian"},
            _log_tail(distance, item.mean(dim=0), item.std(dim=0))
            + _log_tail(distance, query.mean(dim=0)[:, None], query.std(dim=0)[:, None]),
        )
        tail_item, tail_query = _share_above(distance.T, item).T, _share_above(distance, query)
        yield {"neighbors": k, "form": "empirical"}, tail_item * tail_query


def dual_inverted_softmax(task: Task) -> Corrected:
    """Divide by the sums over the bank's queries and over its candidates."""
    scores, bank, inside = task.scores, task.bank_scores, task.candidates @ task.gallery.T
    scale = score_std(task.candidates, task.candidates)
    for factor in FEW_TEMPERATURES:
        t = factor * task.scale
        over_queries = torch.logsumexp(bank / t, dim=0)
        for other in CANDIDATE_TEMPERATURES:
            u = other * scale
            over_candidates = torch.logsumexp(inside / u, dim=0)
            logs = (1 / t + 1 / u) * scores - over_queries - over_candidates
            yield {"temperature": factor, "candidate_temperature": other}, logs


def dual_bank_sinkhorn(task: Task) -> Corrected:
    """Subtract the potential after ten Sinkhorn iterations; gallery and candidates have the same mass each."""
    scores = task.scores
    rows = torch.cat([task.gallery, task.candidates]) @ task.bank.T
    for factor in TEMPERATURES:
        t = factor * task.scale
        top = rows.max(dim=1, keepdim=True).values
        kernel = ((rows - top) / t).exp_()  # each row relative to its largest score, so that none underflows
        of_bank = rows.new_ones(len(task.bank))
        for _ in range(SINKHORN_ITERATIONS):
            of_row = 1 / (kernel @ of_bank)
            of_bank = len(rows) / len(of_bank) / (kernel.T @ of_row)
        zeta = top[:, 0] + t * (kernel @ of_bank).log()
        yield {"temperature": factor}, scores - zeta[: len(task.gallery)]


def _nearest(scores: Tensor, k: int) -> Tensor:
    """Return the k largest scores per column, largest first."""
    return scores.topk(min(k, len(scores)), dim=0).values


def _log_tail(distance: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return torch.special.log_ndtr((mean - distance) / deviation)


def _share_above(distance: Tensor, nearest: Tensor) -> Tensor:
    """Return per row of `distance` the share of the sorted column of `nearest` that is larger."""
    position = torch.searchsorted(nearest.T.contiguous(), distance.contiguous(), right=True)
    return 1 - position.double() / len(nearest)


PEERS: dict[str, Callable[[Task], Corrected]] = {
    "inverted softmax": inverted_softmax,
    "dual softmax": dual_softmax,
    "CSLS": csls,
    "local scaling": local_scaling,
    "mutual proximity": mutual_proximity,
    "QB-Norm": qb_norm,
    "DualIS": dual_inverted_softmax,
    "NNN": nnn,
    "DBSN": dual_bank_sinkhorn,
}
