"""Charts: scales, ticks, colors, and one mark per value."""

import math
import re

import pytest

from nuclr.report.charts import Row, Scale, Series, line_chart, paint, row_chart, scatter, tick_labels


def test_ticks_are_round_and_distinct():
    assert Scale(0, 1, 0, 1).ticks() == [0, 0.25, 0.5, 0.75, 1]
    assert Scale(0.001, 1000, 0, 1, log=True).ticks() == [0.01, 1, 100]
    assert Scale(0.9, 6, 0, 1, log=True).ticks() == [1, 2, 5]
    assert tick_labels([1.01, 1.015, 1.02]) == ["1.01", "1.015", "1.02"]


def test_scales():
    scale = Scale.around([3.0, 3.0, math.nan], 0, 1)
    assert scale.low < 3 < scale.high
    scale = Scale(1, 100, 0, 10, log=True)
    assert [scale(v) for v in (0, 1, 10, 100, 1e9)] == [0, 0, 5, 10, 10]


def test_lines_have_a_description_and_escape_names():
    chart = line_chart("Recall", [Series("<b>", [0, 1, 2], [0.1, math.nan, 0.3])], "epoch", percent=True, zero=True)
    assert "<b>" not in chart.svg and "&lt;b&gt;" in chart.svg
    assert 'aria-label="Recall: &lt;b&gt; from 10.0' in chart.svg
    assert chart.data["series"][0]["y"] == [0.1, None, 0.3]


def test_empty_and_long_series():
    assert "no values" in line_chart("Empty", [], "epoch").svg
    for count in (1, 300, 301, 1000, 10_001):
        values = [float(k) for k in range(count)]
        long = Series("s", values, values, band=(values, values)).thin()
        assert min(count, 150) <= len(long.x) <= 300 and long.x[-1] == count - 1 and long.band == (long.x, long.x)


def test_colors_are_slots_or_hex():
    assert paint(3, "line") == 'class="line s3"'
    assert Series("a", [], [], "#0072B2", dashed=True).key == 'class="key dashed own" style="--own:#0072B2"'
    for wrong in (0, 9, "red", '#fff" onload="x'):
        with pytest.raises(ValueError, match="color"):
            paint(wrong)


def test_dots_of_a_row_are_on_its_bar():
    assert scatter("s", [1.0, 2.0], [0.0, 0.0], "x", "y").svg.count("<circle") == 2
    rows = [Row("a", [1.0, 2.0], "1.5", 1), Row("b", [1.0], "1", "#0072B2", (0.5, 2.0))]
    svg = row_chart("r", rows, "x").svg
    bar = re.search(r'class="line" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)"', svg)
    dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert len(dots) == 3 and dots[0][1] == dots[1][1] != dots[2][1] == bar[2]
    assert float(bar[1]) < float(dots[2][0]) < float(bar[3])
