"""Three names for each metric."""

import pytest
import torch

from nuclr.evaluation import metrics_by_convention, retrieval_metrics, zero_shot_metrics


def test_retrieval_has_the_same_values_in_all_conventions():
    torch.manual_seed(0)
    x, y = torch.randn(20, 5), torch.randn(40, 5)
    metrics = retrieval_metrics(x, y, torch.stack([torch.arange(40) // 2, torch.arange(40)], 1))
    named = metrics_by_convention(metrics)
    for k in (1, 5, 10):
        to_text, to_image = (named["open_clip"][f"{name}_R@{k}"] for name in ("image_to_text", "text_to_image"))
        assert to_text == named["clip_benchmark"][f"text_retrieval_recall@{k}"] == metrics[f"image_to_text_R@{k}"]
        assert to_image == named["clip_benchmark"][f"image_retrieval_recall@{k}"]
        assert named["paper"][f"r{k}"] == pytest.approx(50 * (to_text + to_image))
    assert named["open_clip"]["text_to_image_median_rank"] == metrics["text_to_image_median_rank"]
    assert set(named["paper"]) == {"r1", "r5", "r10"}
    assert not any("chance" in name or "mean_R" in name for names in named.values() for name in names)


def test_classification_has_the_same_values_in_all_conventions():
    torch.manual_seed(0)
    metrics = zero_shot_metrics(torch.randn(30, 4), torch.randn(8, 4), torch.randint(8, (30,)))
    named = metrics_by_convention(metrics)
    for k in (1, 5):
        assert named["open_clip"][f"zeroshot-val-top{k}"] == named["clip_benchmark"][f"acc{k}"]
        assert named["paper"][f"top{k}"] == 100 * metrics[f"zero_shot_acc{k}"]
    assert set(named["clip_benchmark"]) == {"acc1", "acc5", "mean_per_class_recall"}


@pytest.mark.parametrize("sides", [("en", "de"), ("image", "text_long"), ("text", "image_2")])
def test_other_sides_have_no_names_in_these_conventions(sides):
    metrics = retrieval_metrics(torch.eye(3), torch.eye(3), [[0, 0], [1, 1]], sides=sides)
    assert metrics[f"{sides[0]}_to_{sides[1]}_R@1"] == metrics[f"{sides[1]}_to_{sides[0]}_R@1"] == 1
    assert metrics_by_convention(metrics) == {"open_clip": {}, "clip_benchmark": {}, "paper": {}}
