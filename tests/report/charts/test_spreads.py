"""Histograms, scatter plots, intervals and heat maps."""

import numpy as np

from nuclr.report.charts.spreads import Interval, Marker, heat_map, interval_chart, log_histogram, scatter


def test_charts_draw_one_mark_per_value():
    assert log_histogram("h", [0.0, 1e-9, 1.0, 5.0], "q", [Marker(1, "mean", 2)]).svg.count("<rect") == 3
    assert scatter("s", [1.0, 2.0], [0.0, 0.0], "x", "y").svg.count("<circle") == 2
    assert heat_map("t", ["a", "b<"], np.array([[1, 0], [1, 1]]), "d").svg.count("<rect") == 4


def test_heat_map_escapes_names():
    chart = heat_map("t", ["a", "b<"], np.array([[1, 0], [1, 1]]), "d")
    assert "b&lt;" in chart.svg and "b<" not in chart.svg
    assert "b&lt; classified as a: 50" in chart.svg


def test_intervals_are_colored_by_their_verdict():
    rows = [Interval("a", 2, 1, 3, True), Interval("b", -2, -3, -1, True), Interval("c", 1, -1, 3, False)]
    svg = interval_chart("d", rows, "points").svg
    assert "+1.00, +3.00" in svg
    assert [svg.index(f'class="s{color}"') for color in (3, 2, 8)] == sorted(
        svg.index(f'class="s{color}"') for color in (3, 2, 8)
    )
