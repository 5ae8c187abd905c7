"""Charts as inline SVG: functions from numbers to markup.

They all have one size, close to the size in which the page shows them, so that their letters are legible on a phone. A
color is a slot 1 to 8 of the page's palette (`--s1`, ... in the style), or "#rrggbb" as the registry of objectives has
it. One thing has the same color in all charts of a page.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from markupsafe import Markup, escape

from nuclr.report import numbers

Color = int | str
Range = tuple[float, float]

WIDTH = 360
HEIGHT = 224
LEFT = 46
RIGHT = 10
TOP = 10
BOTTOM = 32
ROW = 36  # pixels of a row of `row_chart`
MOST_POINTS = 300  # of a curve
MOST_DOTS = 12  # points of a curve that are marked
SMALLEST = 1e-300  # what a logarithmic axis shows for zero


@dataclass(frozen=True)
class Series:
    """A curve through the points (x, y). `band` has a lower and an upper bound per point."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: Color = 1
    dashed: bool = False
    band: tuple[Sequence[float], Sequence[float]] | None = None

    def thin(self) -> "Series":
        """Return about `MOST_POINTS` points, with the last one."""
        stride = -(-len(self.x) // MOST_POINTS) or 1
        chosen = slice((len(self.x) - 1) % stride, None, stride)
        band = (self.band[0][chosen], self.band[1][chosen]) if self.band else None
        return Series(
            self.name,
            self.x[chosen],
            self.y[chosen],
            self.color,
            self.dashed,
            band,
        )

    @property
    def key(self) -> Markup:
        """The class and style attributes of the curve's entry in the legend."""
        return paint(self.color, "key dashed" if self.dashed else "key")


@dataclass(frozen=True)
class Chart:
    """A chart as the page shows it: title, SVG, curves in the legend, and the values to show under the pointer."""

    title: str
    svg: Markup
    legend: list[Series] = field(default_factory=list)
    data: dict[str, Any] | None = None
    note: str = ""


def line_chart(
    title: str,
    series: Iterable[Series],
    x_label: str,
    *,
    percent: bool = False,
    log_x: bool = False,
    log_y: bool = False,
    reference: tuple[float, str] | None = None,
    zero: bool = False,
    x_ticks: list[float] | None = None,
    note: str = "",
) -> Chart:
    """Draw curves over a common x axis.

    Args:
        title: printed above the chart.
        series: the curves; those without points are left out.
        x_label: name of the x axis.
        percent: whether the values are fractions to be written as percent.
        log_x: whether the x axis is logarithmic.
        log_y: whether the y axis is logarithmic.
        reference: a level of y to mark, and its name.
        zero: whether the y axis begins at 0, unless a value is negative.
        x_ticks: where the x axis has ticks, by default at round values.
        note: printed below the chart.

    """
    shown = [s.thin() for s in series if s.x]
    ys = [reference[0]] if reference else []
    for s in shown:
        ys += itertools.chain(s.y, *(s.band or ()))
    across = Scale.around(itertools.chain.from_iterable(s.x for s in shown), LEFT, WIDTH - RIGHT, log_x, pad=0.02)
    up = Scale.around(ys, HEIGHT - BOTTOM, TOP, log_y)
    if zero and min(ys, default=0) >= 0:
        up = Scale(0.0, up.high, up.begin, up.end)
    parts = [_axes(across, up, x_label, percent, x_ticks)]
    parts += [_curve(s, across, up) for s in shown]
    if reference:  # above the curves, so that they do not strike out its name
        level = up(reference[0])
        parts.append(_rule('class="ref"', LEFT, level, WIDTH - RIGHT, level))
        parts.append(_text(WIDTH - RIGHT, level - 4 if level > TOP + 14 else level + 12, reference[1], "tick end"))
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" hidden/>')
    data = {
        "box": [LEFT, WIDTH - RIGHT],
        "x": [across.low, across.high],
        "log": log_x,
        "label": x_label,
        "percent": percent,
        "series": [{"name": s.name, "x": _rounded(s.x), "y": _rounded(s.y)} for s in shown],
    }
    show = numbers.percent if percent else numbers.number
    ends = [f"{s.name} from {show(s.y[0])} to {show(s.y[-1])}" for s in shown]
    return Chart(
        title,
        _svg(parts, f"{title}: {'; '.join(ends) or 'no values'}"),
        shown,
        data,
        note,
    )


def scatter(
    title: str,
    x: Sequence[float],
    y: Sequence[float],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    color: Color = 1,
    note: str = "",
) -> Chart:
    """Draw points. The name of the y axis is printed above it."""
    across = Scale.around(x, LEFT, WIDTH - RIGHT, log_x)
    up = Scale.around(y, HEIGHT - BOTTOM, TOP + 14)
    points = [(across(a), up(b)) for a, b in zip(x, y, strict=True)]
    parts = [
        _axes(across, up, x_label),
        _text(LEFT, TOP + 3, y_label, "tick"),
        f"<g {paint(color, 'dots')}>{_dots(points, 1.8)}</g>",
    ]
    return Chart(title, _svg(parts, f"{title}: {len(x)} points. {note}"), note=note)


@dataclass(frozen=True)
class Row:
    """Values of one row, with a bar if they have an interval, otherwise with a line at their mean.

    Args:
        name: printed above the values.
        values: drawn as dots.
        label: printed at the right.
        color: of the dots.
        bar: ends of an interval.

    """

    name: str
    values: list[float]
    label: str
    color: Color
    bar: Range | None = None


def row_chart(
    title: str,
    rows: list[Row],
    x_label: str,
    note: str = "",
) -> Chart:
    """Draw rows of values over a common axis. If there are bars, zero is marked."""
    bars = any(row.bar for row in rows)
    shown = [0.0] if bars else []
    for row in rows:
        shown += [*row.values, *(row.bar or ())]
    across = Scale.around(shown, 8, WIDTH - 8)
    base = TOP + ROW * len(rows)
    parts = [_axes(across, Scale(0, 0, base, TOP), x_label, y_ticks=[])]
    if bars:
        parts.append(_rule('class="ref"', across(0), TOP, across(0), base))
    for k, row in enumerate(rows):
        y = TOP + ROW * k + 24
        if row.bar:
            mark = _rule(
                'class="line"',
                across(row.bar[0]),
                y,
                across(row.bar[1]),
                y,
            )
        else:
            mean = across(fmean(row.values))
            mark = _rule('class="mark"', mean, y - 7, mean, y + 7)
        dots = _dots([(across(value), y) for value in row.values], 3.5)
        parts += [
            _text(8, y - 9, row.name, "tick"),
            _text(WIDTH - 8, y - 9, row.label, "tick end"),
            f"<g {paint(row.color)}>{mark}{dots}</g>",
        ]
    described = "; ".join(f"{row.name} {row.label}" for row in rows)
    return Chart(title, _svg(parts, f"{title}: {described}", base + BOTTOM), note=note)


# -- scales and ticks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Maps values in [low, high] to pixels in [begin, end]. With `log`, the axis is logarithmic and low is positive."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    @classmethod
    def around(
        cls,
        values: Iterable[float],
        begin: float,
        end: float,
        log: bool = False,
        pad: float = 0.04,
    ) -> "Scale":
        """Return a scale of all finite values, with a margin of `pad` times their range. Its ends always differ."""
        kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low = min(kept)
        high = max(kept)
        if log:
            factor = max((high / low) ** pad, 1.05)
            return cls(
                low / factor,
                high * factor,
                begin,
                end,
                log,
            )
        margin = (high - low) * pad or abs(low) * 0.1 or 1.0
        return cls(low - margin, high + margin, begin, end)

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; a value outside the range is put on the edge."""
        low, high, inner = (math.log10(max(v, SMALLEST)) if self.log else v for v in (self.low, self.high, value))
        share = (inner - low) / (high - low) if high > low else 0.5
        return self.begin + min(max(share, 0.0), 1.0) * (self.end - self.begin)

    def ticks(self, count: int = 4) -> list[float]:
        """Return about `count` round values within the range."""
        if self.log:
            first = math.ceil(math.log10(self.low) - 1e-9)
            last = math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 2:  # every power of ten, or every second or third
                stride = math.ceil((last - first + 1) / (count + 2))
                return [10.0**k for k in range(first, last + 1) if k % stride == 0]
            candidates = [m * 10.0**k for k, m in itertools.product(range(first - 1, last + 1), (1, 2, 5))]
            kept = [v for v in candidates if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]
            if len(kept) > 1:
                return kept
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = min((power * m for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(math.log(s / rough)))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(k * step, 12) for k in range(first, last + 1)]


def tick_labels(ticks: list[float], percent: bool = False) -> list[str]:
    """Return short texts for ticks, with enough digits that no two are equal."""
    for digits in range(3, 8):
        labels = [numbers.number(100 * v if percent else v, digits) for v in ticks]
        if len(set(labels)) == len(labels):
            break
    return [f"{label}{numbers.SPACE}%" for label in labels] if percent else labels


# -- markup ------------------------------------------------------------------------------------------------------------


def paint(color: Color, classes: str = "") -> Markup:
    """Return the attributes that give an element its color: a class, and a style if the color is not of the palette.

    Args:
        color: a slot 1 to 8, or "#rrggbb".
        classes: other classes of the element.

    Raises:
        ValueError: if the color is neither.

    """
    if isinstance(color, int) and 1 <= color <= 8:
        return Markup(f'class="{classes} s{color}"')
    if not re.fullmatch(r"#[0-9A-Fa-f]{6}", str(color)):
        raise ValueError(f"color must be 1 to 8 or '#rrggbb', but is {color!r}")
    return Markup(f'class="{classes} own" style="--own:{color}"')


def _axes(
    across: Scale,
    up: Scale,
    x_label: str,
    percent: bool = False,
    x_ticks: list[float] | None = None,
    y_ticks: list[float] | None = None,
) -> str:
    """Draw horizontal grid lines, the ticks of both axes, and the name of the x axis at its end."""
    base = up.begin
    parts = []
    ticks = up.ticks() if y_ticks is None else y_ticks
    for v, label in zip(ticks, tick_labels(ticks, percent), strict=True):
        parts.append(_rule('class="grid"', across.begin, up(v), across.end, up(v)))
        parts.append(_text(across.begin - 6, up(v) + 3.5, label, "tick end"))
    parts.append(_rule('class="axis"', across.begin, base, across.end, base))
    ticks = across.ticks(5) if x_ticks is None else x_ticks
    for v, label in zip(ticks, tick_labels(ticks), strict=True):
        parts.append(_rule('class="axis"', across(v), base, across(v), base + 4))
        parts.append(_text(across(v), base + 15, label, "tick middle"))
    parts.append(_text(across.end, base + 29, x_label, "tick end"))
    return "".join(parts)


def _curve(
    s: Series,
    across: Scale,
    up: Scale,
) -> str:
    def pixels(values: Sequence[float]) -> list[Range]:
        return [(across(x), up(y)) for x, y in zip(s.x, values, strict=True) if math.isfinite(y)]

    points = pixels(s.y)
    inner = ""
    if s.band:
        inner += f'<path class="band" d="{_path([*pixels(s.band[0]), *reversed(pixels(s.band[1]))])}Z"/>'
    if len(points) > 1:
        inner += f'<path class="line{" dashed" if s.dashed else ""}" d="{_path(points)}"/>'
    if len(points) <= MOST_DOTS and not s.dashed:
        inner += _dots(points, 2.6)
    return f'<g {paint(s.color)} data-series="{escape(s.name)}">{inner}</g>'


def _dots(points: list[Range], radius: float) -> str:
    return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in points)


def _path(points: list[Range]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _rule(
    attributes: str,
    x: float,
    y: float,
    to_x: float,
    to_y: float,
) -> str:
    return f'<line {attributes} x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def _text(
    x: float,
    y: float,
    words: str,
    classes: str,
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{escape(words)}</text>'


def _svg(
    parts: list[str],
    description: str,
    height: int = HEIGHT,
) -> Markup:
    """Return the SVG element of these parts. Screen readers read the description."""
    return Markup(  # all words in `parts` went through `_text` or `escape`
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(description)}">{"".join(parts)}</svg>'
    )


def _rounded(values: Iterable[float]) -> list[float | None]:
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values]
