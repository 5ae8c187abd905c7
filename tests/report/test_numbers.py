"""How numbers are written."""

import pytest

from nuclr.report import numbers


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
    ],
)
def test_numbers(shown, text):
    assert shown == text
