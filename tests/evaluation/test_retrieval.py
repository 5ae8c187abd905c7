"""Against loops that go through every order of the tied candidates."""

import itertools
import sys

import pytest
import torch

from nuclr.evaluation import class_features, retrieval, zero_shot
from nuclr.evaluation.retrieval import recall, within


def by_loops(queries, gallery, links, k):
    """Expected recall@k, and that of a random ranking, by going through all permutations of the gallery."""
    partners = {}
    for query, partner in links.tolist():
        partners.setdefault(query, set()).add(partner)
    orders = list(itertools.permutations(range(len(gallery))))
    hit = chance = 0.0
    for query, right in partners.items():
        scores = gallery @ queries[query]
        for order in orders:
            ranked = sorted(order, key=lambda j: -float(scores[j]))  # stable: ties in the order drawn
            hit += bool(right & set(ranked[:k])) / len(orders)
            chance += bool(right & set(order[:k])) / len(orders)
    return hit / len(partners), chance / len(partners)


@pytest.mark.parametrize("seed", range(4))
def test_against_all_orders(seed):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(-1, 2, (6, 2), generator=generator).float()  # few values: many ties
    gallery = torch.randint(-1, 2, (5, 2), generator=generator).float()
    links = torch.stack([torch.randint(6, (8,), generator=generator), torch.randint(5, (8,), generator=generator)], 1)
    hits, chance = recall(queries, gallery, links, (1, 2, 4))
    for k, hit, level in zip((1, 2, 4), hits, chance, strict=True):
        expected = by_loops(queries, gallery, links, k)
        assert (float(hit), float(level)) == pytest.approx(expected)


def test_tiles_change_nothing(monkeypatch):
    torch.manual_seed(0)
    x, y = torch.randn(30, 4), torch.randn(60, 4)
    pairs = torch.stack([torch.arange(60) // 2, torch.arange(60)], 1)
    whole = retrieval(x, y, pairs)
    monkeypatch.setattr(sys.modules["nuclr.evaluation.retrieval"], "TILE", 100)
    assert retrieval(x, y, pairs) == pytest.approx(whole)


def test_perfect_and_collapsed():
    x = torch.eye(8)
    pairs = torch.stack([torch.arange(8)] * 2, 1)
    assert retrieval(x, x, pairs)["mean_R@1"] == 1
    collapsed = retrieval(torch.ones(8, 3), torch.ones(8, 3), pairs)
    for k in (1, 5, 10):
        assert collapsed[f"mean_R@{k}"] == pytest.approx(min(k, 8) / 8)
        assert collapsed[f"mean_R@{k}"] == pytest.approx(collapsed[f"mean_chance@{k}"])


def test_within():
    wrong, right = torch.tensor([3]), torch.tensor([1])
    assert [float(within(torch.tensor([k]), wrong, right)) for k in (-1, 0, 1, 2, 4, 9)] == pytest.approx(
        [0, 0, 0.25, 0.5, 1, 1]
    )


def test_zero_shot():
    classes = class_features([torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0]])])
    assert classes.tolist() == [[1, 0], [0, 1]]
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    found = zero_shot(x, classes, torch.tensor([0, 1, 0, 1]))
    assert found == {"zero_shot_acc1": pytest.approx((1 + 1 + 0.5 + 0) / 4), "zero_shot_chance": 0.5}
