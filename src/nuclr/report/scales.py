"""Axes: a range of values -> a range of pixels, and the ticks between."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nuclr.report import numbers

SMALLEST = 1e-300  # what a logarithmic axis shows for zero


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [begin, end]; `log` for a logarithmic axis, whose bounds are above zero."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value; what lies outside is put on the edge."""
        low, high, value = (self._inner(v) for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + min(max(share, 0.0), 1.0) * (self.end - self.begin)

    def _inner(self, value: float) -> float:
        return math.log10(max(value, SMALLEST)) if self.log else value

    def ticks(self, wanted: int = 4) -> list[float]:
        """Round values within the range."""
        return log_ticks(self.low, self.high, wanted) if self.log else linear_ticks(self.low, self.high, wanted)


def extent(values: Iterable[float], log: bool = False, pad: float = 0.04) -> tuple[float, float]:
    """Bounds that hold all finite values with a little room; never empty."""
    kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not kept:
        return (0.1, 10.0) if log else (0.0, 1.0)
    low, high = min(kept), max(kept)
    if log:
        room = max((high / low) ** pad, 1.05)
        return low / room, high * room
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    room = (high - low) * pad
    return low - room, high + room


def linear_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten, about `wanted` of them."""
    span = high - low
    if not span > 0:
        return [low]
    rough = span / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power * m for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(math.log(s / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def log_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Powers of ten, every second or third where there are many; with 2 and 5 between them where there are few."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        stride = max(1, math.ceil((last - first + 1) / (wanted + 2)))
        return [10.0**k for k in range(first, last + 1) if k % stride == 0]
    found = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5)]
    kept = [v for v in found if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
    return kept if len(kept) > 1 else linear_ticks(low, high, wanted)


def tick_labels(ticks: list[float], percent: bool = False) -> list[str]:
    """Short texts for ticks, with as many digits as tell neighbors apart."""
    shown = [100 * v for v in ticks] if percent else ticks
    for digits in range(3, 8):
        found = [numbers.number(v, digits) for v in shown]
        if len(set(found)) == len(found):
            break
    return [f"{text}{numbers.SPACE}%" for text in found] if percent else found
