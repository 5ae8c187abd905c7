"""Likely false negatives against loops."""

import pytest
import torch

from nuclr.popularity.false_negatives import false_negatives


def test_false_negatives_agree_with_loops():
    torch.manual_seed(0)
    x, y = (torch.nn.functional.normalize(torch.randn(n, 5), dim=1) for n in (15, 40))
    links = torch.stack([torch.randint(0, 14, (40,)), torch.randperm(40)], dim=1)  # x 14 has no y
    popularity = torch.rand(40) * 2
    pairs = false_negatives(x, y, links, popularity, 6)
    best = []
    anchors_with_any = 0
    for i in torch.unique(links[:, 0]).tolist():
        own = links[links[:, 0] == i, 1].tolist()
        level = max(float(x[i] @ y[j]) for j in own)
        above = [j for j in range(40) if j not in own and float(x[i] @ y[j]) > level + 1e-5]
        anchors_with_any += bool(above)
        strength = [(float(x[i] @ y[j]) * float(popularity[j]), j) for j in above if x[i] @ y[j] > 0]
        if strength:
            best.append((*max(strength), i))
    expected, used = [], set()
    for _, j, i in sorted(best, reverse=True):
        if j not in used:
            used.add(j)
            expected.append((i, j))
    assert list(zip(pairs.x.tolist(), pairs.y.tolist(), strict=True)) == expected[:6]
    assert pairs.share == anchors_with_any / pairs.anchors
    assert torch.all(pairs.score > pairs.own_score)
    fewer = false_negatives(x.numpy(), y.numpy(), links.tolist(), popularity.numpy(), 6, anchors=[1, 2])
    assert fewer.anchors == 2 and set(fewer.x.tolist()) <= {1, 2} and "anchors=2" in repr(fewer)
    with pytest.raises(ValueError, match="links"):
        false_negatives(x, y, torch.arange(20), popularity, 6)
    with pytest.raises(ValueError, match=r"popularity.*\(19,\)"):
        false_negatives(x, y, links, popularity[:19], 6)


def test_negative_scores_are_listed_as_well():
    x = torch.tensor([[1.0, 0.0], [0.8, 0.6]])
    y = torch.tensor([[-1.0, 0.0], [-0.8, -0.6], [-0.6, -0.8]])
    pairs = false_negatives(x, y, torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 1.0, 0.5]), count=5)
    assert pairs.share == 1 and pairs.x.tolist() == [0, 1] and pairs.y.tolist() == [1, 0]
