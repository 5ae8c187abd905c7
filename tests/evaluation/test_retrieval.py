"""Against loops that go through every order of the tied candidates, and against float64 brute force."""

import itertools
import sys

import pytest
import torch

from nuclr.evaluation import ranks, ranks_of_scores, retrieval
from nuclr.evaluation.ranks import within


def by_loops(scores, links, ks):
    """Per query, all permutations of the gallery: expected hits, those of a random ranking, and the expected rank."""
    partners = {}
    for query, partner in links.tolist():
        partners.setdefault(query, set()).add(partner)
    orders = list(itertools.permutations(range(scores.shape[1])))
    hits, chance, rank = ({query: [] for query in sorted(partners)} for _ in range(3))
    for query, right in partners.items():
        lists = [sorted(order, key=lambda j: -float(scores[query, j])) for order in orders]  # stable: ties as drawn
        places = [min(ranked.index(j) for j in right) for ranked in lists]
        first = [min(order.index(j) for j in right) for order in orders]
        hits[query] = [sum(place < k for place in places) / len(orders) for k in ks]
        chance[query] = [sum(place < k for place in first) / len(orders) for k in ks]
        rank[query] = 1 + sum(places) / len(orders)
    return hits, chance, rank


@pytest.mark.parametrize("seed", range(6))
def test_against_all_orders(seed):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(-1, 2, (6, 2), generator=generator).float()  # few values: many ties
    gallery = torch.randint(-1, 2, (5, 2), generator=generator).float()
    links = torch.stack([torch.randint(6, (8,), generator=generator), torch.randint(5, (8,), generator=generator)], 1)
    bias = torch.randint(-1, 2, (5,), generator=generator).float() if seed % 2 else None
    scores = queries.double() @ gallery.double().T - (0 if bias is None else bias)
    ks = (1, 2, 4)
    hits, chance, rank = by_loops(scores, links, ks)
    for found in (ranks(queries, gallery, links, bias), ranks_of_scores(scores, links)):
        assert found.query.tolist() == list(hits)
        for place, query in enumerate(found.query.tolist()):
            assert [float(found.hits(k)[place]) for k in ks] == pytest.approx(hits[query])
            assert [float(found.chance(k)[place]) for k in ks] == pytest.approx(chance[query])
            assert float(found.expected()[place]) == pytest.approx(rank[query])


@pytest.mark.parametrize("seed", range(4))
def test_means_against_sorting(seed):
    """Without ties, several captions an image and several images a caption: places in the sorted list, float64."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(40, 8, generator=generator), torch.randn(90, 8, generator=generator)
    pairs = torch.stack([torch.randint(40, (110,), generator=generator), torch.randperm(110, generator=generator) % 90])
    pairs, scores = pairs.T, x.double() @ y.double().T
    found = retrieval(x, y, pairs)
    for name, table, links in (("image_to_text", scores, pairs), ("text_to_image", scores.T, pairs.flip(1))):
        place = table.argsort(dim=1, descending=True).argsort(dim=1) + 1
        best = {}
        for query, partner in links.tolist():
            best[query] = min(best.get(query, len(table.T)), int(place[query, partner]))
        best = torch.tensor(list(best.values())).double()
        for k in (1, 5, 10):
            assert found[f"{name}_R@{k}"] == pytest.approx(float((best <= k).double().mean()))
        assert found[f"{name}_mean_rank"] == pytest.approx(float(best.mean()))
        assert found[f"{name}_median_rank"] == pytest.approx(float(torch.quantile(best, 0.5)))


def test_tiles_change_nothing(monkeypatch):
    torch.manual_seed(0)
    x, y = torch.randn(30, 4), torch.randn(60, 4)
    pairs = torch.stack([torch.arange(60) // 2, torch.arange(60)], 1)
    whole = retrieval(x, y, pairs)
    monkeypatch.setattr(sys.modules["nuclr.evaluation.ranks"], "TILE", 100)
    assert retrieval(x, y, pairs) == pytest.approx(whole)


def test_perfect_and_collapsed():
    x = torch.eye(8)
    pairs = torch.stack([torch.arange(8)] * 2, 1)
    assert retrieval(x, x, pairs)["mean_R@1"] == 1
    collapsed = retrieval(torch.ones(8, 3), torch.ones(8, 3), pairs)
    for k in (1, 5, 10):
        assert collapsed[f"mean_R@{k}"] == pytest.approx(min(k, 8) / 8)
        assert collapsed[f"mean_R@{k}"] == pytest.approx(collapsed[f"mean_chance@{k}"])
    assert collapsed["image_to_text_mean_rank"] == collapsed["text_to_image_median_rank"] == 4.5


def test_within():
    wrong, right = torch.tensor([3]), torch.tensor([1])
    assert [float(within(torch.tensor([k]), wrong, right)) for k in (-1, 0, 1, 2, 4, 9)] == pytest.approx(
        [0, 0, 0.25, 0.5, 1, 1]
    )


@pytest.mark.parametrize(
    ("links", "bias", "told"),
    [
        (torch.tensor([0, 1]), None, "links has shape"),
        (torch.tensor([[0, 3]]), None, "row 3 of the gallery, which has 3"),
        (torch.tensor([[-1, 0]]), None, "row -1 of the queries"),
        (torch.tensor([[0, 0]]), torch.zeros(2), r"bias has shape \(2,\); needs \(3,\)"),
    ],
)
def test_refusals(links, bias, told):
    with pytest.raises(ValueError, match=told):
        ranks_of_scores(torch.zeros(2, 3), links, bias)


def test_nan_is_no_hit():
    links = torch.tensor([[0, 0]])
    with pytest.raises(ValueError, match="queries: row 1 holds a NaN"):
        ranks(torch.tensor([[0.0], [float("nan")]]), torch.ones(2, 1), links)
    with pytest.raises(ValueError, match="scores hold a NaN"):
        ranks_of_scores(torch.tensor([[0.0, float("nan")]]), links)


def test_scores_are_left_as_they_were():
    scores = torch.eye(3)
    ranks_of_scores(scores, torch.tensor([[0, 0], [1, 1], [2, 2]]), bias=torch.ones(3))
    assert torch.equal(scores, torch.eye(3))
