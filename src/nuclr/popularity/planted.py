r"""Planted hubs: documents that come back for many queries because somebody made them so.

A document g is compared with the clean items of a gallery before it enters the index. With the bank's queries b, their
masses w_b (of sum 1), and t_bk, the k-th highest score among the clean items, three measures say how many queries it
would attract:

    log(share_k + 1/n),  share_k = sum_b w_b [<q_b, g> >= t_bk],  for k = 3 and 100;      sum_b w_b <q_b, g>

share_k is N_k per query if g were added, and n the effective number of queries. A hub of one topic takes first ranks
from the queries of its topic, a global hub is a little nearer to all queries than other items are. Of a gallery with
fewer than 1,000 items, the second depth is a tenth of it.

Each measure is shifted and scaled so that the median of the clean items is 0 and their 99 % quantile is 1. The *score*
is the largest of the three. Clean items have the measures that they would have as new documents: an item has a rank
of at most k if and only if its score is at least t_bk. So for a clean document from the same source as the gallery,

    p(g) = (1 + number of clean items with at least the score of g) / (1 + number of clean items)

is at most alpha with a probability of about alpha. The maximum over the measures needs no other correction, and a copy
of a clean item has the p-value of the item. Neither measures nor p-values depend on a temperature.

Relations: k = 10 alone is N_k of Radovanović et al. 2010, and the third measure alone is the mean cosine. p is the
p-value of conformal anomaly detection (Laxhammar and Falkman 2010).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr.arrays import as_vector, slices
from nuclr.popularity.problem import COPY_LOGIT, Problem

DEPTHS = (3, 100)
MEASURES = ("first ranks", "ranks up to 100", "mean score")
SMALLEST_PART = 0.1  # of the gallery: no depth is larger
TAIL = 0.99  # quantile of the clean items that has the value 1
QUERIES = 5000  # of a larger bank, every second, third, ... query is used
SAME_SCORE = 1e-6  # scores of the same two vectors differ by less than this from tile to tile
TILE = 2**22  # scores at a time: 16 MiB in float32


@dataclass(frozen=True, repr=False)
class Suspicion:
    """How suspicious documents are.

    Attributes:
        score: The largest measure, (n,) float64; 0 is the median of the clean items, and 1 their 99 % quantile.
        p_value: Share of clean items with at least this score, (n,) float64; not less than 1 / (1 + clean items).
        measure: Which measure is the largest, (n,) int64, numbers of `nuclr.popularity.planted.MEASURES`: 0 and 1 are
            hubs of a topic, 2 are global hubs.

    """

    score: Tensor
    p_value: Tensor
    measure: Tensor

    def __repr__(self) -> str:
        """Return one line with the number of documents and the smallest p-value."""
        return (
            f"Suspicion(documents={len(self.score)}, p<=0.01: {int((self.p_value <= 0.01).sum())}, "
            f"smallest p={float(self.p_value.min()):.2g})"
        )


@dataclass(frozen=True)
class CleanIndex:
    """What new documents are compared with.

    Attributes:
        thresholds: Logit of the last clean item that a query finds at each depth, (queries, 2).
        scale: Median of each measure over the clean items, and how far its 99 % quantile is above, (2, 3) float64.
        scores: Scores of the clean items, ascending, (m,) float64.

    """

    thresholds: Tensor
    scale: Tensor
    scores: Tensor

    @classmethod
    def of(cls, problem: Problem) -> "CleanIndex":
        """Return what is to be kept of a problem whose candidates are clean.

        Example:
            >>> from nuclr.popularity.problem import make_problem
            >>> CleanIndex.of(make_problem(torch.eye(3), torch.eye(3), temperature=1.0)).scores.shape
            torch.Size([3])

        """
        problem = _sampled(problem)
        items = len(problem.b)
        depths = [max(1, min(depth, int(SMALLEST_PART * items))) for depth in DEPTHS]
        thresholds = []
        sums = torch.zeros(len(DEPTHS) + 2, items, dtype=torch.float64, device=problem.b.device)
        zero = torch.zeros(items, dtype=problem.dtype, device=problem.b.device)
        for rows in slices(len(problem.a), max(1, TILE // items)):
            logits = problem.logits(rows, slice(None), zero)
            best = logits.topk(max(depths), dim=1).values
            thresholds.append(best[:, [depth - 1 for depth in depths]])
            sums += _sums(problem, rows, logits, thresholds[-1])
        measures = _measures(problem, sums)
        low, high = measures.quantile(torch.tensor([0.5, TAIL]).to(measures), dim=1)
        scale = torch.stack([low, (high - low).clamp(min=SAME_SCORE)])
        return cls(torch.cat(thresholds), scale, _score(measures, scale).values.sort().values)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], queries: int) -> "CleanIndex":
        """Return what `tensors` returned, for a bank of `queries` rows, or raise a KeyError or ValueError."""
        thresholds = tensors["clean_thresholds"]
        scale = tensors["clean_scale"]
        scores = tensors["clean_scores"]
        used = len(range(0, queries, -(-queries // QUERIES)))
        if thresholds.shape != (used, len(DEPTHS)) or scale.shape != (2, len(MEASURES)):
            raise ValueError("clean_thresholds or clean_scale has a wrong shape")
        if not bool(thresholds.isfinite().all() and scale.isfinite().all() and (scale[1] > 0).all()):
            raise ValueError("clean_thresholds or clean_scale has values that no gallery gives")
        return cls(thresholds, scale, as_vector("clean_scores", scores, scores.numel()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the content for a file."""
        return {"clean_thresholds": self.thresholds, "clean_scale": self.scale, "clean_scores": self.scores}

    def suspicion(self, problems: Iterable[Problem]) -> Suspicion:
        """Return the scores of documents, which are the candidates of problems with the same queries."""
        parts = [_score(self._new_measures(problem), self.scale) for problem in problems]
        score = torch.cat([part.values for part in parts])
        higher = len(self.scores) - torch.searchsorted(self.scores, score)
        p_value = (1 + higher).double() / (1 + len(self.scores))
        return Suspicion(score, p_value, torch.cat([part.indices for part in parts]))

    def _new_measures(self, problem: Problem) -> Tensor:
        problem = _sampled(problem)
        documents = len(problem.b)
        zero = torch.zeros(documents, dtype=problem.dtype, device=problem.b.device)
        every = slice(None)
        sums = []
        for columns in slices(documents, max(1, TILE // len(problem.a))):
            sums.append(_sums(problem, every, problem.logits(every, columns, zero), self.thresholds))
        return _measures(problem, torch.cat(sums, dim=1))


def _sampled(problem: Problem) -> Problem:
    return problem.part(slice(None, None, -(-len(problem.a) // QUERIES)))


def _sums(problem: Problem, rows: slice, logits: Tensor, thresholds: Tensor) -> Tensor:
    """Return sums over some queries: of those that find an item at each depth, of scores, and of masses, (4, items)."""
    assert isinstance(problem.x, Tensor)
    weight = (problem.a * problem.x.any(dim=1))[rows].to(logits)  # without the prior count
    allowed = logits > COPY_LOGIT  # neither a copy of the query nor its known answer
    margin = SAME_SCORE / problem.temperature
    sums = [weight @ ((logits >= limit[:, None] - margin) & allowed).to(logits) for limit in thresholds.T]
    sums += [problem.temperature * (weight @ (logits * allowed)), weight @ allowed.to(logits)]
    return torch.stack(sums).double()


def _measures(problem: Problem, sums: Tensor) -> Tensor:
    """Return the measures from the sums over all queries, (3, items)."""
    assert isinstance(problem.x, Tensor)
    mass = problem.a * problem.x.any(dim=1)
    one_query = mass.square().sum() / mass.sum().square()
    *found, scores, masses = sums
    shares = [(part / mass.sum() + one_query).log() for part in found]
    return torch.stack([*shares, scores / masses.clamp(min=SAME_SCORE)])


def _score(measures: Tensor, scale: Tensor) -> "torch.return_types.max":
    """Return the largest measure and its number."""
    return ((measures - scale[0][:, None]) / scale[1][:, None]).max(dim=0)
