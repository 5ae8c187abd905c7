"""Confusion of classes."""

import numpy as np

from nuclr.report.sections.zero_shot import Confusion, count_confusions


def test_confusion():
    table = count_confusions(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1]), 3)
    confusion = Confusion(["a", "b<", "c"], table, 4)
    assert table.tolist() == [[1, 1, 0], [0, 1, 0], [0, 1, 0]]
    assert confusion.accuracy == 0.5 and confusion.images == 4
    mistake = confusion.mistakes[0]
    assert (mistake.name, mistake.other, mistake.count, mistake.share) == ("a", "b<", 1, 0.5)
    assert "b&lt;" in confusion.chart.svg


def test_too_many_classes_for_a_chart():
    confusion = Confusion(list(map(str, range(200))), np.zeros((200, 200), int), 0)
    assert confusion.chart is None and confusion.mistakes == []
