"""Zero-shot classification against loops."""

import pytest
import torch

from nuclr.evaluation import class_features, zero_shot_metrics


def test_by_hand():
    classes = class_features([torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0]])])
    assert classes.tolist() == [[1, 0], [0, 1]]
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    assert zero_shot_metrics(x, classes, torch.tensor([0, 1, 0, 1])) == {
        "zero_shot_acc1": pytest.approx((1 + 1 + 0.5 + 0) / 4),
        "zero_shot_acc5": 1,
        "zero_shot_mean_per_class_recall": pytest.approx((1.5 / 2 + 1 / 2) / 2),
        "zero_shot_chance": 0.5,
    }


def test_ensemble_is_normalized_before_and_after():
    prompts = torch.tensor([[10.0, 0.0], [0.0, 0.1]])  # the long one does not outweigh the short one
    assert class_features([prompts])[0].tolist() == pytest.approx([0.5**0.5] * 2)


@pytest.mark.parametrize("seed", range(3))
def test_against_loops(seed):
    generator = torch.Generator().manual_seed(seed)
    x, classes = torch.randn(60, 4, generator=generator), torch.randn(9, 4, generator=generator)
    labels = torch.randint(7, (60,), generator=generator)  # two classes have no x
    first, five, by_class = [], [], {}
    for features, label in zip(x.double(), labels.tolist(), strict=True):
        order = (classes.double() @ features).argsort(descending=True).tolist()
        first.append(order[0] == label)
        five.append(label in order[:5])
        by_class.setdefault(label, []).append(order[0] == label)
    metrics = zero_shot_metrics(x, classes, labels)
    assert metrics["zero_shot_acc1"] == pytest.approx(sum(first) / 60)
    assert metrics["zero_shot_acc5"] == pytest.approx(sum(five) / 60)
    recalls = [sum(hits) / len(hits) for hits in by_class.values()]
    assert metrics["zero_shot_mean_per_class_recall"] == pytest.approx(sum(recalls) / len(recalls))


def test_wrong_labels_are_refused():
    with pytest.raises(ValueError, match=r"labels.*row 4.*classes"):
        zero_shot_metrics(torch.randn(3, 2), torch.randn(4, 2), [0, 1, 4])
