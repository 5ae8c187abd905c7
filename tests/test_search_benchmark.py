"""The regimes and the statistics of benchmarks/search.py."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

FOLDER = str(Path(__file__).parent.parent / "benchmarks")


@pytest.fixture(scope="module")
def benchmark():
    """Return the modules of the benchmark, which import one another by name."""
    pytest.importorskip("scipy")
    sys.path.insert(0, FOLDER)
    try:
        import search
        import search_report
    finally:
        sys.path.remove(FOLDER)
    return search, search_report


@pytest.fixture(scope="module")
def vectors(benchmark):
    """Return 60 topics with two documents and three queries each; coordinate 0 is the number of the topic."""
    topic = torch.arange(60)
    generator = torch.Generator().manual_seed(0)

    def near(copies):
        rows = topic.repeat_interleave(copies)
        return normalize(torch.eye(60)[rows] + 0.01 * torch.rand(len(rows), 60, generator=generator), dim=1)

    links = [(3 * number + query, 2 * number + item) for number in range(60) for query in range(3) for item in range(2)]
    documents = near(2)
    return benchmark[0].Vectors(near(3), documents, documents, np.array(links))


def test_regimes_have_right_answers_and_no_test_query_in_the_log(benchmark, vectors):
    names = []
    for regime in benchmark[0].regimes(vectors, 0):
        names.append(regime.name)
        found = (regime.queries @ regime.gallery.T).topk(2, dim=1).indices
        assert torch.equal(found.sort().values, regime.right)
        known = (regime.answers >= 0).all(dim=1)
        best = (regime.log @ regime.gallery.T).max(dim=1).values
        assert bool((best[known] > 0.9).all())
        if regime.name != "no log":
            assert float((regime.queries @ regime.log.T).max()) < 0.99999
        if regime.name.startswith("clean"):
            assert not bool(known.any())
            assert float(best.max()) < 0.5  # what the log asks for is not in the gallery
    assert names.count("power law") == benchmark[0].ORDERS
    assert len(set(names)) == 9


def test_measures_of_several_right_answers_and_ties(benchmark):
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.7], [0.1, 0.2, 0.3, 0.3], [0.0, 0.0, 0.0, 0.0]])
    scores = torch.cat([scores, torch.full((3, 8), -1.0)], dim=1)
    right = torch.tensor([[1, 2], [3, 0], [0, 1]])
    measures = benchmark[0].measure(scores, right)
    # 0.8 is second; 0.3 shares the first two ranks; a tie with two wrong items has them half above
    assert measures["rank"].tolist() == [2, 1.5, 2]
    ideal = 1 + 1 / np.log2(3)
    first = (1 / np.log2(3) + 1 / np.log2(5)) / ideal
    assert np.isclose(measures["ndcg"][0], first, atol=1e-3)


def test_holm_finds_the_harmful_cell_only(benchmark):
    rng = np.random.default_rng(0)
    cells = []
    for share in (0.3, 0.5, 0.5):  # queries that are still right
        plain = np.where(rng.random(2000) < 0.5, 1, 2)
        other = np.where(rng.random(2000) < share, 1, 2)
        extra = {"ndcg": np.ones(2000), "never": np.zeros(1)}
        cells.append(benchmark[1].make_cell({"plain": {"rank": plain, **extra}, "other": {"rank": other, **extra}}))
    assert benchmark[1].significant(cells, "other", 0) == [-1, 0, 0]
    interval = benchmark[1].mean_change(cells, "other")
    assert interval["low"] < interval["mean"] < interval["high"] < 0
