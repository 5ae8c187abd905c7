"""nDCG, MRR, recall and MAP against pytrec_eval, with graded relevance and ties."""

import numpy as np
import pytest
import pytrec_eval
import torch

from nuclr.evaluation import graded_retrieval as module
from nuclr.evaluation.graded_retrieval import document_ranks, ranking_metrics


def random_case(seed, n_queries=7, n_documents=60, judged=12, levels=3):
    """Features on a coarse grid, so that many scores are exactly equal, and judgments from -1 to 3."""
    rng = np.random.default_rng(seed)
    queries = rng.integers(-2, 3, size=(n_queries, 3)).astype("float32") / 4
    corpus = rng.integers(-levels, levels + 1, size=(n_documents, 3)).astype("float32") / 4
    ids = [f"d{number}" for number in rng.permutation(10 * n_documents)[:n_documents]]
    ids[0], ids[1] = "ä", "Z"  # the order is that of bytes, and upper case is before lower case
    qrels = []
    for query in range(n_queries):
        documents = rng.choice(n_documents, judged, replace=False)
        relevance = rng.integers(-1, 4, size=judged)
        relevance[0] = max(1, relevance[0])
        qrels += [[query, int(d), int(r)] for d, r in zip(documents, relevance, strict=True)]
    return queries, corpus, np.array(qrels), ids


def judge(scores, qrels, ids, ignore=(), ndcg=10, mrr=10, recall=100):
    """Return the metrics of pytrec_eval; MRR@k follows from its reciprocal rank in the whole list."""
    relevance = {}
    for query, document, value in qrels.tolist():
        relevance.setdefault(f"q{query}", {})[ids[document]] = value
    run = {
        f"q{query}": {ids[j]: float(score) for j, score in enumerate(row) if (query, j) not in set(ignore)}
        for query, row in enumerate(scores)
        if f"q{query}" in relevance
    }
    measures = {f"ndcg_cut.{ndcg}", "recip_rank", f"recall.{recall}", "map"}
    results = pytrec_eval.RelevanceEvaluator(relevance, measures).evaluate(run)

    def mean(value):
        return sum(map(value, results.values())) / len(results)

    return {
        f"nDCG@{ndcg}": mean(lambda r: r[f"ndcg_cut_{ndcg}"]),
        f"MRR@{mrr}": mean(lambda r: r["recip_rank"] if r["recip_rank"] >= 1 / mrr - 1e-12 else 0.0),
        f"recall@{recall}": mean(lambda r: r[f"recall_{recall}"]),
        "MAP": mean(lambda r: r["map"]),
    }


@pytest.mark.parametrize("seed", range(20))
def test_metrics_equal_pytrec_eval_with_graded_relevance_and_ties(seed):
    queries, corpus, qrels, ids = random_case(seed)
    expected = judge(queries @ corpus.T, qrels, ids, ndcg=10, mrr=3, recall=20)
    for kind in (np.asarray, torch.from_numpy):
        ranks = document_ranks(kind(queries), kind(corpus), qrels, ids)
        metrics = {
            "nDCG@10": ranks.ndcg(10),
            "MRR@3": ranks.reciprocal_rank(3),
            "recall@20": ranks.recall(20),
            "MAP": ranks.average_precision(),
        }
        assert {key: float(values.mean()) for key, values in metrics.items()} == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_continuous_scores_biases_and_ignored_documents_equal_pytrec_eval(seed):
    rng = np.random.default_rng(seed)
    _, _, qrels, ids = random_case(seed)
    queries, corpus, bias = rng.normal(size=(7, 5)), rng.normal(size=(60, 5)), rng.normal(size=60)
    ignore = [(0, int(qrels[0, 1])), (0, 5), (3, 7)]  # the first is a relevant document
    metrics = ranking_metrics(queries, corpus, qrels, ids, bias, ignore)
    assert metrics == pytest.approx(judge(queries @ corpus.T - bias, qrels, ids, ignore), abs=1e-9)


def test_all_scores_equal_gives_the_order_of_identifiers_as_in_pytrec_eval():
    _, _, qrels, ids = random_case(0)
    ones = np.ones((7, 2)), np.ones((60, 2))
    assert ranking_metrics(*ones, qrels, ids) == pytest.approx(judge(ones[0] @ ones[1].T, qrels, ids), abs=1e-9)
    assert ranking_metrics(*ones, qrels) == ranking_metrics(*ones, qrels, [f"{row:02d}" for row in range(60)])


def test_tiles_give_the_same_ranks(monkeypatch):
    queries, corpus, qrels, ids = random_case(3, n_queries=40, n_documents=200, judged=100)
    counted = document_ranks(queries, corpus, qrels, ids)
    monkeypatch.setattr(module, "_FEWEST_ROWS", 3)
    monkeypatch.setattr(module, "TILE", 1)
    tiled = document_ranks(queries, corpus, qrels, ids)
    assert torch.equal(counted.rank, tiled.rank) and torch.equal(counted.document, tiled.document)
    assert repr(counted) == f"DocumentRanks(queries=40, relevant={(qrels[:, 2] > 0).sum()})"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qrels": [[0, 4, 1]]}, "qrels.*row 4.*corpus"),
        ({"qrels": [[-1, 0, 1]]}, "qrels.*row -1.*queries"),
        ({"qrels": [[0, 0, 1], [1, 2, 0]]}, "query 1.*qrels"),
        ({"qrels": [[0, 0, 1], [0, 0, 2]]}, "qrels.*document 0 for query 0"),
        ({"ids": ["a", "b", "b", "c"]}, "ids has 3.*4"),
        ({"ignore": [[0, 9]]}, "ignore.*row 9.*corpus"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(changes, message):
    arguments = {"queries": np.ones((2, 2)), "corpus": np.ones((4, 2)), "qrels": [[0, 0, 1]]} | changes
    with pytest.raises(ValueError, match=message):
        ranking_metrics(**arguments)
