import json
import math

import pytest

from nuclr.report import numbers
from nuclr.report.charts import Series, line_chart, thin, to_json
from nuclr.report.scales import Scale, extent, linear_ticks, log_ticks, tick_labels
from nuclr.report.spreads import Interval, Marker, interval_chart, log_histogram, scatter


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (numbers.percent(0.2489), "24.9\u202f%"),
        (numbers.percent(None), "\u2013"),
        (numbers.number(-0.01234), "\u22120.0123"),
        (numbers.number(1e-5), "10⁻⁵"),
        (numbers.number(1.25e-7, 2), "1.2\u202f\u00d7\u202f10⁻⁷"),
        (numbers.number(4210), "4,210"),
        (numbers.times(1.3), "1.30\u00d7"),
        (numbers.times(0.00477), "0.0048\u00d7"),
        (numbers.duration(102), "1\u202fmin 42\u202fs"),
        (numbers.duration(11_100), "3\u202fh 05\u202fmin"),
    ],
)
def test_numbers(shown, text):
    assert shown == text


def test_ticks_are_round_and_told_apart():
    assert linear_ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1]
    assert log_ticks(0.001, 1000) == [0.01, 1, 100]
    assert log_ticks(0.9, 6) == [1, 2, 5]
    assert tick_labels([1.01, 1.015, 1.02]) == ["1.01", "1.015", "1.02"]
    low, high = extent([3.0, 3.0, math.nan])
    assert low < 3 < high
    scale = Scale(1, 100, 0, 10, log=True)
    assert [scale(v) for v in (0, 1, 10, 100, 1e9)] == [0, 0, 5, 10, 10]


def test_lines_have_text_and_escape_names():
    chart = line_chart("Recall", [Series("<b>", [0, 1, 2], [0.1, math.nan, 0.3])], "epoch", percent=True, zero=True)
    assert "<b>" not in chart.svg and "&lt;b&gt;" in chart.svg
    assert 'aria-label="Recall: &lt;b&gt; from 10.0' in chart.svg
    assert chart.data["series"][0]["y"] == [0.1, None, 0.3]


def test_charts_of_nothing_and_of_much():
    assert "no values" in line_chart("Empty", [], "epoch").svg
    assert len(thin(Series("s", [float(k) for k in range(10_001)], [0.0] * 10_001)).x) <= 302
    assert thin(Series("s", [float(k) for k in range(1000)], [0.0] * 1000)).x[-1] == 999
    assert log_histogram("h", [0.0, 1e-9, 1.0, 5.0], "q", [Marker(1, "mean", 2)]).svg.count("<rect") == 3
    assert scatter("s", [1.0, 2.0], [0.0, 0.0], "x", "y").svg.count("<circle") == 2
    assert "+1.00, +3.00" in interval_chart("d", [Interval("a", 2, 1, 3, True)], "points").svg


def test_json_cannot_leave_its_script():
    dumped = to_json({"caption": "</script><!--\u2028"})
    assert "<" not in dumped and json.loads(dumped)["caption"] == "</script><!--\u2028"
