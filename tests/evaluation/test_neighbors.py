"""k-nearest-neighbor accuracy against loops in float64."""

import math

import numpy as np
import pytest

from nuclr.evaluation import neighbors
from nuclr.evaluation.neighbors import knn_accuracy, knn_metrics, split_halves


def labeled(seed, n, classes=4, width=6, spread=1.5):
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, width))
    labels = rng.integers(classes, size=n)
    return centers[labels] + spread * rng.normal(size=(n, width)), labels


def knn_by_loops(gallery, labels, queries, query_labels, k, temperature):
    right = 0.0
    for query, own in zip(queries, query_labels, strict=True):
        cosine = [float(query @ row) / math.hypot(*query) / math.hypot(*row) for row in gallery]
        nearest = sorted(range(len(gallery)), key=lambda j: (-cosine[j], j))[:k]
        votes = dict.fromkeys(labels.tolist(), 0.0)
        for j in nearest:
            votes[int(labels[j])] += math.exp(cosine[j] / temperature)
        best = [label for label, vote in votes.items() if vote == max(votes.values())]
        right += (own in best) / len(best)
    return right / len(queries)


@pytest.mark.parametrize("temperature", [0.07, 1.0])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_knn_accuracy_equals_loops(k, temperature, monkeypatch):
    (gallery, labels), (queries, query_labels) = labeled(0, 50), labeled(1, 40)
    expected = knn_by_loops(gallery, labels, queries, query_labels, k, temperature)
    assert knn_accuracy(gallery, labels, queries, query_labels, k, temperature) == pytest.approx(expected, abs=1e-12)
    monkeypatch.setattr(neighbors, "TILE", 1)
    assert knn_accuracy(gallery, labels, queries, query_labels, k, temperature) == pytest.approx(expected, abs=1e-12)


def test_weights_do_not_overflow_and_labels_may_be_any_integers():
    (gallery, labels), (queries, query_labels) = labeled(0, 50), labeled(1, 40)
    plain = knn_accuracy(gallery, labels, queries, query_labels, 5, 0.07)
    assert knn_accuracy(1e30 * gallery, labels, queries, query_labels, 5, 0.07) == plain
    assert knn_accuracy(gallery, 10**12 * labels - 5, queries, 10**12 * query_labels - 5, 5, 0.07) == plain
    nearest = knn_accuracy(gallery, labels, queries, query_labels, 1)
    assert knn_accuracy(gallery, labels, queries, query_labels, 5, 1e-5) == nearest
    assert knn_accuracy(gallery, labels, queries, 0 * query_labels + 77, 5) == 0, "a class that the gallery lacks"


def test_halves_alternate_within_each_class():
    first, second = split_halves([7, 3, 7, 7, 3, 9])
    assert first.tolist() == [0, 1, 3, 5] and second.tolist() == [2, 4]
    x, labels = labeled(2, 60)
    first, second = split_halves(labels)
    expected = knn_accuracy(x[first], labels[first], x[second], labels[second])
    assert knn_metrics(x, labels) == {"knn_acc1": expected, "knn_chance": 0.25}
    assert knn_metrics(x[:6], [0, 0, 0, 1, 1, 1])["knn_chance"] == 0.5, "fewer than k neighbors exist"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: knn_accuracy(x, y, x, y, k=0), "k=0"),
        (lambda x, y: knn_accuracy(x, y, x, y, k=2, temperature=0.0), "temperature"),
        (lambda x, y: knn_accuracy(x, y, x[:0], y[:0], k=2), "queries"),
        (lambda x, y: split_halves([0, 1, 2]), "labels"),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.ones((3, 2)), [0, 1, 1])
