"""Retrieval metrics against sorting in float64, and links to copies of captions against sets."""

import sys

import pytest
import torch

from nuclr.evaluation import retrieval_metrics


@pytest.mark.parametrize("seed", range(4))
def test_metrics_agree_with_sorting(seed):
    """Without ties, with several captions per image and images per caption: ranks in the list sorted in float64."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(40, 8, generator=generator), torch.randn(90, 8, generator=generator)
    links = torch.stack([torch.randint(40, (110,), generator=generator), torch.randperm(110, generator=generator) % 90])
    links, scores = links.T, x.double() @ y.double().T
    metrics = retrieval_metrics(x, y, links)
    for name, table, directed in (("image_to_text", scores, links), ("text_to_image", scores.T, links.flip(1))):
        rank = table.argsort(dim=1, descending=True).argsort(dim=1) + 1
        best = {}
        for query, partner in directed.tolist():
            best[query] = min(best.get(query, len(table.T)), int(rank[query, partner]))
        best = torch.tensor(list(best.values())).double()
        for k in (1, 5, 10):
            assert metrics[f"{name}_R@{k}"] == pytest.approx(float((best <= k).double().mean()))
        assert metrics[f"{name}_mean_rank"] == pytest.approx(float(best.mean()))
        assert metrics[f"{name}_median_rank"] == pytest.approx(float(torch.quantile(best, 0.5)))


def test_the_size_of_tiles_does_not_change_metrics(monkeypatch):
    torch.manual_seed(0)
    x, y = torch.randn(30, 4), torch.randn(60, 4)
    links = torch.stack([torch.arange(60) // 2, torch.arange(60)], 1)
    whole = retrieval_metrics(x, y, links)
    monkeypatch.setattr(sys.modules["nuclr.evaluation.ranks"], "TILE", 100)
    assert retrieval_metrics(x, y, links) == pytest.approx(whole)


def test_a_perfect_model_has_recall_one_and_a_collapsed_one_chance_level():
    x = torch.eye(8)
    links = torch.stack([torch.arange(8)] * 2, 1)
    assert retrieval_metrics(x, x, links)["mean_R@1"] == 1
    collapsed = retrieval_metrics(torch.ones(8, 3), torch.ones(8, 3), links)
    for k in (1, 5, 10):
        assert collapsed[f"mean_R@{k}"] == pytest.approx(min(k, 8) / 8)
        assert collapsed[f"mean_R@{k}"] == pytest.approx(collapsed[f"mean_chance@{k}"])
    assert collapsed["image_to_text_mean_rank"] == collapsed["text_to_image_median_rank"] == 4.5


def test_metrics_have_the_names_of_the_sides():
    x, y, links = torch.eye(3), torch.eye(3)[[0, 2, 1]], [[0, 0], [1, 1], [2, 0]]
    plain, named = retrieval_metrics(x, y, links), retrieval_metrics(x, y, links, sides=("question", "answer"))
    assert named == {key.replace("image", "question").replace("text", "answer"): value for key, value in plain.items()}
    assert named["question_to_answer_R@1"] != named["answer_to_question_R@1"]
    with pytest.raises(ValueError, match=r"sides.*text"):
        retrieval_metrics(x, y, links, sides=("text", "text"))
