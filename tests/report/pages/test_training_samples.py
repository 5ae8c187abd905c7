"""Retrieval examples against sorting by score."""

import torch

from nuclr.report.pages.training_samples import rank_answers


def test_ranks_agree_with_sorting():
    torch.manual_seed(0)
    queries, gallery = torch.randn(12, 4).double(), torch.randn(30, 4).double()
    links = torch.stack([torch.arange(24) % 12, torch.randperm(30)[:24]], dim=1)
    ranked = rank_answers(queries, gallery, links)
    for row in range(12):
        scores = gallery @ queries[row]
        own = set(links[links[:, 0] == row, 1].tolist())
        order = scores.argsort(descending=True).tolist()
        rank = next(rank for rank, k in enumerate(order, 1) if k in own)
        assert (ranked.rank[row], ranked.right[row]) == (rank, order[rank - 1])
        assert set(ranked.own[row].nonzero().squeeze(1).tolist()) == own
        wrong = max(scores[k] for k in order if k not in own)
        torch.testing.assert_close(ranked.margin[row], wrong - scores[order[rank - 1]])
