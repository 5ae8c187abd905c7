"""Line charts, scales and colors."""

import math

import pytest

from nuclr.report.charts.lines import (
    Key,
    Scale,
    Series,
    extent,
    line_chart,
    linear_ticks,
    log_ticks,
    paint,
    thin,
    tick_labels,
)


def test_ticks_are_round_and_distinct():
    assert linear_ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1]
    assert log_ticks(0.001, 1000) == [0.01, 1, 100]
    assert log_ticks(0.9, 6) == [1, 2, 5]
    assert tick_labels([1.01, 1.015, 1.02]) == ["1.01", "1.015", "1.02"]
    low, high = extent([3.0, 3.0, math.nan])
    assert low < 3 < high
    scale = Scale(1, 100, 0, 10, log=True)
    assert [scale(v) for v in (0, 1, 10, 100, 1e9)] == [0, 0, 5, 10, 10]


def test_lines_have_a_description_and_escape_names():
    chart = line_chart("Recall", [Series("<b>", [0, 1, 2], [0.1, math.nan, 0.3])], "epoch", percent=True, zero=True)
    assert "<b>" not in chart.svg and "&lt;b&gt;" in chart.svg
    assert 'aria-label="Recall: &lt;b&gt; from 10.0' in chart.svg
    assert chart.data["series"][0]["y"] == [0.1, None, 0.3]


def test_nested_bands_have_their_own_shades():
    x, y = [0.0, 1.0], [0.0, 0.1]
    wide = Series("wide", x, y, band=([-2, -2], [2, 2.5]), shade=0.2)
    chart = line_chart(
        "Zeta", [wide, Series("narrow", x, y, band=([-1, -1], [1, 1]), shade=0.5), Series("m", x, y)], ""
    )
    assert [key.paint for key in chart.legend] == [
        'class="key shade s1" style="--shade:20%"', 'class="key shade s1" style="--shade:50%"', 'class="key s1"',
    ]  # fmt: skip
    assert chart.svg.count('class="line"') == 1 and 'aria-label="Zeta: m from' in chart.svg
    assert chart.data["series"][0]["high"] == [2, 2.5] and "high" not in chart.data["series"][2]


def test_empty_and_long_series():
    assert "no values" in line_chart("Empty", [], "epoch").svg
    values = [float(k) for k in range(10_001)]
    long = thin(Series("s", values, values, band=(values, values)))
    assert len(long.x) <= 302 and long.x[-1] == 10_000 and long.band == (long.x, long.x)
    assert thin(Series("s", values[:1000], values[:1000])).x[-1] == 999


def test_colors_are_slots_or_hex():
    assert paint(3, "line") == 'class="line s3"'
    assert Key("a", "#0072B2", dashed=True).paint == 'class="key dashed own" style="--own:#0072B2"'
    for wrong in (0, 9, "red", '#fff" onload="x'):
        with pytest.raises(ValueError, match="color must be"):
            paint(wrong)
