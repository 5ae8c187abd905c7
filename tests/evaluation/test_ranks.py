"""Ranks against loops over every order of the tied candidates."""

import itertools

import numpy as np
import pytest
import torch

from nuclr.evaluation import query_ranks, query_ranks_from_scores, rank_correlation
from nuclr.evaluation.ranks import hit_probability


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


def test_hit_probability_by_hand():
    wrong, right = torch.tensor([3]), torch.tensor([1])
    probabilities = [float(hit_probability(torch.tensor([k]), wrong, right)) for k in (-1, 0, 1, 2, 4, 9)]
    assert probabilities == pytest.approx([0, 0, 0.25, 0.5, 1, 1])


@pytest.mark.parametrize(
    ("links", "bias", "message"),
    [
        (torch.tensor([0, 1]), None, "links has shape"),
        ([[0, 0], [1]], None, "links is a list with rows of unequal length"),
        ("all", None, "links is str; give a torch tensor, a numpy array or a list"),
        ([[0.0, 1.0]], None, "links holds float64; needs row numbers"),
        (torch.tensor([[0, 3]]), None, "row 3 of the gallery, which has 3"),
        (torch.tensor([[-1, 0]]), None, "row -1 of the queries"),
        (torch.tensor([[0, 0]]), torch.zeros(2), r"bias has shape \(2,\); it must be \(3,\)"),
        (torch.tensor([[0, 0]]), torch.full((3,), torch.nan), "bias holds NaN"),
    ],
)
def test_wrong_links_and_biases_are_refused(links, bias, message):
    with pytest.raises(ValueError, match=message):
        query_ranks_from_scores(torch.zeros(2, 3), links, bias)


def test_wrong_features_and_scores_are_refused():
    links = torch.tensor([[0, 0]])
    with pytest.raises(ValueError, match="queries: row 1 holds a NaN"):
        query_ranks(torch.tensor([[0.0], [float("nan")]]), torch.ones(2, 1), links)
    with pytest.raises(ValueError, match="gallery is list; give a torch tensor or a numpy array"):
        query_ranks(torch.ones(2, 1), [[1.0]], links)
    with pytest.raises(ValueError, match=r"queries has shape \(2,\) of float32"):
        query_ranks(torch.ones(2), torch.ones(2, 1), links)
    with pytest.raises(ValueError, match="queries has 1 columns and gallery 2"):
        query_ranks(torch.ones(2, 1), torch.ones(2, 2), links)
    with pytest.raises(ValueError, match=r"scores\[0, 1\] is NaN"):
        query_ranks_from_scores(torch.tensor([[0.0, float("nan")]]), links)
    with pytest.raises(ValueError, match=r"scores has shape \(3,\)"):
        query_ranks_from_scores(np.zeros(3), links)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_arrays_and_lists_are_accepted(dtype):
    generator = np.random.default_rng(0)
    queries, gallery = (generator.normal(size=(n, 4)).astype(dtype) for n in (5, 7))
    links, bias = [[0, 1], [2, 6], [4, 0]], generator.normal(size=7)
    expected = query_ranks(
        torch.from_numpy(queries), torch.from_numpy(gallery), torch.tensor(links), torch.from_numpy(bias)
    )
    ranks = query_ranks(queries, gallery, links, bias.tolist())
    assert torch.equal(ranks.above, expected.above)
    scores = queries.astype(np.float64) @ gallery.T.astype(np.float64)
    assert torch.equal(query_ranks_from_scores(scores, np.array(links), bias).above, expected.above)


def test_scores_are_not_modified():
    scores = torch.eye(3)
    query_ranks_from_scores(scores, torch.tensor([[0, 0], [1, 1], [2, 2]]), bias=torch.ones(3))
    assert torch.equal(scores, torch.eye(3))


def test_rank_correlation():
    a = np.array([1.0, 2.0, 2.0, 5.0])
    assert rank_correlation(a, a**3) == pytest.approx(1)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    assert np.isnan(rank_correlation(a, np.ones(4)))
    b = torch.tensor([0.1, 3.0, 2.0, 9.0])
    assert rank_correlation(b, torch.tensor([0.0, 2.0, 1.0, -5.0])) == pytest.approx(-0.2)
    with pytest.raises(ValueError, match=r"a has shape \(4,\) and b \(3,\)"):
        rank_correlation(a, a[:3])


def test_rank_correlation_agrees_with_scipy():
    scipy = pytest.importorskip("scipy.stats")
    a, b = np.random.default_rng(0).integers(0, 6, size=(2, 40)).astype(float)  # many ties
    assert rank_correlation(a, b) == pytest.approx(scipy.spearmanr(a, b).statistic)
