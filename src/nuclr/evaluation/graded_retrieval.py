"""Search metrics for graded relevance: nDCG@k, MRR@k, recall@k and MAP, equal to trec_eval's.

A judgment gives the relevance of a document for a query; a document is relevant if its relevance is 1 or more, and
documents without a judgment are not relevant. With r_1, r_2, ... the relevance of the ranked documents (negative values
count as 0), R the number of relevant documents of the query and t_1 < t_2 < ... their ranks:

- nDCG@k: sum_{i <= k} r_i / log2(i + 1), divided by the same sum for the best possible ranking;
- MRR@k: 1 / t_1 if t_1 <= k, otherwise 0;
- recall@k: the number of t_i <= k, divided by R;
- MAP: (1 / R) sum_i i / t_i, over the whole ranking.

Each is averaged over the queries. All of them follow from the ranks of the relevant documents, which are counted in
tiles of scores: the matrix of all scores is never in memory, and nothing is cut off after the first thousand documents.

Ties are broken as in trec_eval (and pytrec_eval, which BEIR uses): scores are compared in float32, and documents with
equal scores are ordered by their identifiers, the largest first. Note that `query_ranks` instead counts ties with their
expectation. Under trec_eval's rule a model that gives equal scores to all documents gets the value of one arbitrary
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr.arrays import Features, Integers, Vector, as_features, as_integers, as_links, as_vector
from nuclr.evaluation.metrics import measure
from nuclr.evaluation.ranks import TILE

_FEWEST_ROWS = 16  # queries per tile: their scores need less memory than the features of the corpus


@dataclass(frozen=True, repr=False)
class DocumentRanks:
    """The rank of every relevant document, sorted by query and then by rank.

    Attributes:
        query: Row of the query, (m,) int64.
        document: Row of the document, (m,) int64.
        relevance: (m,) int64, at least 1.
        rank: (m,) float64, from 1; infinite for a document that was ignored.

    """

    query: Tensor
    document: Tensor
    relevance: Tensor
    rank: Tensor

    def __repr__(self) -> str:
        """Return one line with the sizes."""
        return f"DocumentRanks(queries={len(self.queries)}, relevant={len(self.rank)})"

    @property
    def queries(self) -> Tensor:
        """Return the rows of the queries, ascending; the metrics have one entry for each."""
        return torch.unique_consecutive(self.query)

    def ndcg(self, k: int) -> Tensor:
        """Return nDCG@k per query, (n,) float64."""
        ideal = self.relevance[_sort_by(self.query, -self.relevance)]
        best = self._sum(_discounted(ideal, self._position() + 1, k))
        return self._sum(_discounted(self.relevance, self.rank, k)) / best

    def reciprocal_rank(self, k: int) -> Tensor:
        """Return the reciprocal rank of the first relevant document if it is among the first k, (n,) float64."""
        first = self.rank[self._position() == 0]
        return torch.where(first <= k, 1 / first, 0.0)

    def recall(self, k: int) -> Tensor:
        """Return the share of the relevant documents that are among the first k, (n,) float64."""
        return self._sum((self.rank <= k).double()) / self._counts()

    def average_precision(self) -> Tensor:
        """Return the precision at the rank of each relevant document, averaged over these, (n,) float64."""
        return self._sum((self._position() + 1) / self.rank) / self._counts()

    def _counts(self) -> Tensor:
        return torch.unique_consecutive(self.query, return_counts=True)[1]

    def _position(self) -> Tensor:
        """Return the position of each document among the relevant documents of its query, from 0."""
        counts = self._counts()
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        return torch.arange(len(self.query), device=self.query.device) - first

    def _sum(self, values: Tensor) -> Tensor:
        counts = self._counts()
        number = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        return values.new_zeros(len(counts)).index_add(0, number, values)


def ranking_metrics(
    queries: Features,
    corpus: Features,
    qrels: Integers,
    ids: Sequence[str] | None = None,
    bias: Vector | None = None,
    ignore: Integers | None = None,
) -> dict[str, float]:
    """Rank a corpus for each query by inner product and return the metrics above.

    Args:
        queries: Features of the queries, (n_queries, d); used as they are, so normalize them for cosine similarity.
        corpus: Features of the documents, (n_documents, d).
        qrels: Judgments, rows (row of the query, row of the document, relevance), (m, 3) integers. Queries without a
            judgment are left out.
        ids: Identifiers of the documents, which break ties. None: their row numbers.
        bias: Subtracted from the scores of each document, (n_documents,), for example its popularity.
        ignore: Rows (row of the query, row of the document) that are left out of the ranking, (i, 2). BEIR ignores a
            document that is the query itself.

    Returns:
        `nDCG@10`, `MRR@10`, `recall@100` and `MAP`, fractions: every registered metric of search. `document_ranks`
        gives other lengths, such as `document_ranks(...).ndcg(5).mean()`.

    Raises:
        ValueError: If a shape or type is wrong, a feature is not finite, a row does not exist, a query has judgments
            but no relevant document, or a document is judged twice for a query.

    Example:
        >>> import numpy as np
        >>> metrics = ranking_metrics(np.eye(3), np.eye(3)[[0, 1, 1]], [[0, 0, 2], [1, 0, 1], [1, 1, 2]])
        >>> {name: round(value, 3) for name, value in metrics.items()}
        {'nDCG@10': 0.835, 'MRR@10': 0.75, 'recall@100': 1.0, 'MAP': 0.792}

    """
    return measure("search", document_ranks(queries, corpus, qrels, ids, bias, ignore))


@torch.no_grad()
def document_ranks(
    queries: Features,
    corpus: Features,
    qrels: Integers,
    ids: Sequence[str] | None = None,
    bias: Vector | None = None,
    ignore: Integers | None = None,
) -> DocumentRanks:
    """Rank a corpus for each query by inner product and return the rank of every relevant document.

    Args:
        queries: Features of the queries, (n_queries, d).
        corpus: Features of the documents, (n_documents, d).
        qrels: Judgments, rows (row of the query, row of the document, relevance), (m, 3) integers.
        ids: Identifiers of the documents, which break ties. None: their row numbers.
        bias: Subtracted from the scores of each document, (n_documents,).
        ignore: Rows (row of the query, row of the document) that are left out of the ranking, (i, 2).

    Returns:
        The ranks, from which each metric follows per query.

    Raises:
        ValueError: As in `ranking_metrics`.

    Example:
        >>> import torch
        >>> ranks = document_ranks(torch.eye(2), torch.eye(2), [[0, 0, 1], [1, 0, 1]])
        >>> ranks.rank.tolist(), ranks.reciprocal_rank(10).tolist()
        ([1.0, 2.0], [1.0, 0.5])

    """
    features_q = as_features("queries", queries, "any")
    features_c = as_features(
        "corpus",
        corpus,
        "any",
        width=features_q.shape[1],
    )
    n = len(features_c)
    judged = _relevant(qrels, len(features_q), n)
    subtracted = None if bias is None else as_vector("bias", bias, n)
    before = _tie_order(ids, n).to(features_c.device)
    skipped = torch.zeros(0, 2, dtype=torch.long)
    if ignore is not None and len(ignore):
        skipped = as_links("ignore", ignore, len(features_q), n, ("queries", "corpus")).cpu()
    ranks: list[Tensor] = []
    size = max(_FEWEST_ROWS, TILE // n)
    for tile in torch.unique_consecutive(judged[:, 0]).split(size):
        scores = features_q[tile] @ features_c.T
        if subtracted is not None:
            scores -= subtracted.to(scores)
        scores = scores.float()  # trec_eval's precision, which decides about ties
        left_out = skipped[torch.isin(skipped[:, 0], tile)]
        scores[torch.searchsorted(tile, left_out[:, 0].contiguous()), left_out[:, 1]] = -torch.inf
        own = judged[torch.isin(judged[:, 0], tile)]
        rows = torch.searchsorted(tile, own[:, 0].contiguous())
        for row, document in torch.stack([rows, own[:, 1]], dim=1).tolist():
            score = scores[row, document]
            tied = (scores[row] == score).nonzero().flatten()
            ranks.append(1 + (scores[row] > score).sum() + (before[tied] < before[document]).sum())
    rank = torch.stack(ranks).double().cpu()
    rank[torch.isin(judged[:, 0] * n + judged[:, 1], skipped[:, 0] * n + skipped[:, 1])] = torch.inf
    order = _sort_by(judged[:, 0], rank)
    query, document_row, relevance = judged[order].unbind(1)
    return DocumentRanks(
        query,
        document_row,
        relevance,
        rank[order],
    )


def _relevant(
    qrels: Integers,
    n_queries: int,
    n_documents: int,
) -> Tensor:
    """Return the relevant judgments, (m, 3), sorted by query; refuse wrong judgments."""
    judged = as_integers("qrels", qrels, None, 3).cpu()
    links = as_links(
        "qrels",
        judged[:, :2],
        n_queries,
        n_documents,
        ("queries", "corpus"),
    )
    pairs, counts = torch.unique(
        links,
        dim=0,
        return_counts=True,
    )
    if int(counts.max()) > 1:
        query, document = pairs[counts.argmax()].tolist()
        raise ValueError(f"qrels judges document {document} for query {query} more than once; give one relevance")
    relevant = judged[judged[:, 2] > 0]
    missing = torch.unique(judged[:, 0])
    missing = missing[~torch.isin(missing, relevant[:, 0])]
    if len(missing):
        raise ValueError(f"query {int(missing[0])} has judgments in qrels but no relevant document; leave it out")
    return relevant[torch.argsort(relevant[:, 0], stable=True)]


def _tie_order(ids: Sequence[str] | None, n: int) -> Tensor:
    """Return the position of each document if all scores are equal: the largest identifier first, by its bytes."""
    if ids is None:
        return torch.arange(n - 1, -1, -1)
    if len(ids) != n or len(set(ids)) != n:
        raise ValueError(f"ids has {len(set(ids))} distinct entries; needs {n}, one for each row of corpus")
    order = sorted(
        range(n),
        key=lambda row: ids[row].encode("utf-8", "surrogatepass"),
        reverse=True,
    )
    return torch.argsort(torch.tensor(order))


def _discounted(
    relevance: Tensor,
    rank: Tensor,
    k: int,
) -> Tensor:
    return torch.where(rank <= k, relevance / torch.log2(rank.double() + 1), 0.0)


def _sort_by(first: Tensor, second: Tensor) -> Tensor:
    """Return the order by `first`, and by `second` where that is equal."""
    order = torch.argsort(second, stable=True)
    return order[torch.argsort(first[order], stable=True)]
