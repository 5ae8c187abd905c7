"""Three names for each number."""

import pytest
import torch

from nuclr.evaluation import conventions, retrieval, zero_shot


def test_retrieval_agrees():
    torch.manual_seed(0)
    x, y = torch.randn(20, 5), torch.randn(40, 5)
    found = retrieval(x, y, torch.stack([torch.arange(40) // 2, torch.arange(40)], 1))
    named = conventions(found)
    for k in (1, 5, 10):
        to_text, to_image = (named["open_clip"][f"{name}_R@{k}"] for name in ("image_to_text", "text_to_image"))
        assert to_text == named["clip_benchmark"][f"text_retrieval_recall@{k}"] == found[f"image_to_text_R@{k}"]
        assert to_image == named["clip_benchmark"][f"image_retrieval_recall@{k}"]
        assert named["paper"][f"r{k}"] == pytest.approx(50 * (to_text + to_image))
    assert named["open_clip"]["text_to_image_median_rank"] == found["text_to_image_median_rank"]
    assert set(named["paper"]) == {"r1", "r5", "r10"}
    assert not any("chance" in name or "mean_R" in name for names in named.values() for name in names)


def test_classification_agrees():
    torch.manual_seed(0)
    found = zero_shot(torch.randn(30, 4), torch.randn(8, 4), torch.randint(8, (30,)))
    named = conventions(found)
    for k in (1, 5):
        assert named["open_clip"][f"zeroshot-val-top{k}"] == named["clip_benchmark"][f"acc{k}"]
        assert named["paper"][f"top{k}"] == 100 * found[f"zero_shot_acc{k}"]
    assert set(named["clip_benchmark"]) == {"acc1", "acc5", "mean_per_class_recall"}
