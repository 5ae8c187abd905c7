import torch

from nuclr.popularity.false_negatives import false_negatives


def test_agrees_with_loops():
    torch.manual_seed(0)
    x, y = (torch.nn.functional.normalize(torch.randn(n, 5), dim=1) for n in (15, 40))
    links = torch.stack([torch.randint(0, 14, (40,)), torch.randperm(40)], dim=1)  # x 14 has no y
    popularity = torch.rand(40) * 2
    found = false_negatives(x, y, links, popularity, 6)
    best = []
    having = 0
    for i in torch.unique(links[:, 0]).tolist():
        own = links[links[:, 0] == i, 1].tolist()
        level = max(float(x[i] @ y[j]) for j in own)
        above = [j for j in range(40) if j not in own and float(x[i] @ y[j]) > level + 1e-5]
        having += bool(above)
        strength = [(float(x[i] @ y[j]) * float(popularity[j]), j) for j in above if x[i] @ y[j] > 0]
        if strength:
            best.append((*max(strength), i))
    wanted, taken = [], set()
    for _, j, i in sorted(best, reverse=True):
        if j not in taken:
            taken.add(j)
            wanted.append((i, j))
    assert list(zip(found.x.tolist(), found.y.tolist(), strict=True)) == wanted[:6]
    assert found.share == having / found.anchors
    assert torch.all(found.score > found.own_score)
    fewer = false_negatives(x, y, links, popularity, 6, anchors=torch.tensor([1, 2]))
    assert fewer.anchors == 2 and set(fewer.x.tolist()) <= {1, 2}
