"""Ranks against loops over every order of the tied candidates."""

import itertools

import numpy as np
import pytest
import torch

from nuclr.evaluation import query_ranks, query_ranks_from_scores, rank_correlation


def by_loops(scores, links, ks):
    """Return expected hits, chance level and expected rank per query, averaged over all permutations of the gallery."""
    partners = {}
    for query, partner in links.tolist():
        partners.setdefault(query, set()).add(partner)
    orders = list(itertools.permutations(range(scores.shape[1])))
    hits, chance, rank = ({query: [] for query in sorted(partners)} for _ in range(3))
    for query, right in partners.items():
        lists = [
            sorted(order, key=lambda j: -float(scores[query, j])) for order in orders
        ]  # stable: ties keep the order drawn
        positions = [min(ranked.index(j) for j in right) for ranked in lists]
        first = [min(order.index(j) for j in right) for order in orders]
        hits[query] = [sum(position < k for position in positions) / len(orders) for k in ks]
        chance[query] = [sum(position < k for position in first) / len(orders) for k in ks]
        rank[query] = 1 + sum(positions) / len(orders)
    return hits, chance, rank


@pytest.mark.parametrize("seed", range(6))
def test_ties_count_as_the_average_over_all_orders(seed):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(-1, 2, (6, 2), generator=generator).float()  # few values: many ties
    gallery = torch.randint(-1, 2, (5, 2), generator=generator).float()
    links = torch.stack([torch.randint(6, (8,), generator=generator), torch.randint(5, (8,), generator=generator)], 1)
    bias = torch.randint(-1, 2, (5,), generator=generator).float() if seed % 2 else None
    scores = queries.double() @ gallery.double().T - (0 if bias is None else bias)
    ks = (1, 2, 4)
    hits, chance, rank = by_loops(scores, links, ks)
    for ranks in (query_ranks(queries, gallery, links, bias), query_ranks_from_scores(scores, links)):
        assert ranks.query.tolist() == list(hits)
        for row, query in enumerate(ranks.query.tolist()):
            assert [float(ranks.hits(k)[row]) for k in ks] == pytest.approx(hits[query])
            assert [float(ranks.chance(k)[row]) for k in ks] == pytest.approx(chance[query])
            assert float(ranks.expected()[row]) == pytest.approx(rank[query])


@pytest.mark.parametrize(
    ("scores", "links", "bias", "message"),
    [
        (np.zeros((2, 3)), [[0, 3]], None, "row 3.*gallery"),
        (np.zeros((2, 3)), [[0, 0]], [0.0, 0.0], "bias"),
        (np.array([[0.0, np.nan]]), [[0, 0]], None, "scores"),
        (np.zeros(3), [[0, 0]], None, "scores"),
    ],
)
def test_wrong_scores_links_and_biases_are_refused(scores, links, bias, message):
    with pytest.raises(ValueError, match=message):
        query_ranks_from_scores(scores, links, bias)
    with pytest.raises(ValueError, match="gallery has 2 columns"):
        query_ranks(np.ones((2, 1)), np.ones((2, 2)), [[0, 0]])


def test_scores_are_not_modified():
    scores = torch.eye(3)
    query_ranks_from_scores(scores, torch.tensor([[0, 0], [1, 1], [2, 2]]), bias=torch.ones(3))
    assert torch.equal(scores, torch.eye(3))


def test_rank_correlation_agrees_with_scipy():
    a, b = np.random.default_rng(0).integers(0, 6, size=(2, 40)).astype(float)  # many ties
    assert rank_correlation(a, b) == pytest.approx(pytest.importorskip("scipy.stats").spearmanr(a, b).statistic)
    assert rank_correlation(a, -(a**3)) == pytest.approx(-1)
    assert np.isnan(rank_correlation(a, np.ones(40)))
    with pytest.raises(ValueError, match=r"\(3,\).*\(40,\)"):
        rank_correlation(a, a[:3])
