"""Confusion of classes."""

import tracemalloc

import numpy as np

from nuclr.report.sections.zero_shot import Confusion, count_confusions


def test_confusion():
    counts = count_confusions(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1]))
    confusion = Confusion(["a", "b<", "c"], counts, 4)
    assert counts.tolist() == [[0, 0, 1], [0, 1, 1], [1, 1, 1], [2, 1, 1]]
    assert confusion.accuracy == 0.5 and confusion.images == 4
    mistake = confusion.mistakes[0]
    assert (mistake.name, mistake.other, mistake.count, mistake.share) == ("a", "b<", 1, 0.5)
    assert "b&lt;" in confusion.chart.svg


def test_too_many_classes_for_a_chart():
    confusion = Confusion(list(map(str, range(200))), np.zeros((0, 3), int), 0)
    assert confusion.chart is None and confusion.mistakes == []


def test_memory_does_not_grow_with_the_square_of_the_classes():
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(10_000, size=1500), rng.integers(10_000, size=1500)
    tracemalloc.start()
    confusion = Confusion(list(map(str, range(10_000))), count_confusions(labels, predicted), 1500)
    assert confusion.images == 1500 and len(confusion.mistakes) == 8 and confusion.accuracy < 0.01
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10e6
