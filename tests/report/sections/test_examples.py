"""Retrieval examples against sorting by score."""

import torch

from nuclr.report.sections.examples import find_answers, find_examples


def test_examples_agree_with_sorting():
    torch.manual_seed(0)
    queries, gallery = torch.randn(12, 4).double(), torch.randn(30, 4).double()
    links = torch.stack([torch.arange(24) % 12, torch.randperm(30)[:24]], dim=1)
    margins = {}
    for row in range(12):
        scores = gallery @ queries[row]
        own = set(links[links[:, 0] == row, 1].tolist())
        order = scores.argsort(descending=True).tolist()
        example = find_answers(queries, gallery, links, row)
        assert [a.row for a in example.answers] == order[:5]
        assert [a.right for a in example.answers] == [k in own for k in order[:5]]
        rank = next(rank for rank, k in enumerate(order, 1) if k in own)
        assert (example.rank, example.right) == (rank, order[rank - 1])
        margins[row] = float(max(scores[k] for k in order if k not in own) - scores[example.right])
    worst = [e.query for e in find_examples(queries, gallery, links, count=3).worst]
    assert worst == sorted((r for r in margins if margins[r] > 0), key=lambda r: -margins[r])[:3]
