"""Line charts as inline SVG, with the scales and axes that all charts share.

Charts are functions from numbers to markup. They all have one size, close to the size in which the page shows them, so
that their letters are legible on a phone. A color is a slot 1 to 8 of the page's palette (`--s1`, ... in the style), or
"#rrggbb" as the registry of objectives has it. One thing has the same color in all charts of a page.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from markupsafe import Markup, escape

from nuclr.report import numbers

Color = int | str

WIDTH, HEIGHT = 360, 224
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 32
MOST_POINTS = 300
SMALLEST = 1e-300  # what a logarithmic axis shows for zero


@dataclass(frozen=True)
class Scale:
    """Maps values in [low, high] to pixels in [begin, end]. With `log`, the axis is logarithmic and low is positive."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; a value outside the range is put on the edge."""
        low, high, value = (self._inner(v) for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + min(max(share, 0.0), 1.0) * (self.end - self.begin)

    def _inner(self, value: float) -> float:
        return math.log10(max(value, SMALLEST)) if self.log else value

    def ticks(self, count: int = 4) -> list[float]:
        """Return about `count` round values within the range."""
        return log_ticks(self.low, self.high, count) if self.log else linear_ticks(self.low, self.high, count)


def extent(values: Iterable[float], log: bool = False, pad: float = 0.04) -> tuple[float, float]:
    """Return bounds around all finite values, with a margin of `pad` times their range. They always differ."""
    kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not kept:
        return (0.1, 10.0) if log else (0.0, 1.0)
    low, high = min(kept), max(kept)
    if log:
        margin = max((high / low) ** pad, 1.05)
        return low / margin, high * margin
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    margin = (high - low) * pad
    return low - margin, high + margin


def linear_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` multiples of 1, 2, 2.5 or 5 times a power of ten."""
    span = high - low
    if not span > 0:
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power * m for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(math.log(s / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return powers of ten: every second or third if there are many, with 2 and 5 between them if there are few."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        stride = max(1, math.ceil((last - first + 1) / (count + 2)))
        return [10.0**k for k in range(first, last + 1) if k % stride == 0]
    candidates = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5)]
    kept = [v for v in candidates if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
    return kept if len(kept) > 1 else linear_ticks(low, high, count)


def tick_labels(ticks: list[float], percent: bool = False) -> list[str]:
    """Return short texts for ticks, with enough digits that no two are equal."""
    shown = [100 * v for v in ticks] if percent else ticks
    for digits in range(3, 8):
        labels = [numbers.number(v, digits) for v in shown]
        if len(set(labels)) == len(labels):
            break
    return [f"{label}{numbers.SPACE}%" for label in labels] if percent else labels


@dataclass(frozen=True)
class Series:
    """A curve through the points (x, y). `band` has a lower and an upper bound per point.

    Few points are marked by dots unless `dots` is False. With `shade`, the band is drawn without the curve, and its
    color is mixed with this share of the palette's color, so that nested bands of one color differ.
    """

    name: str
    x: list[float]
    y: list[float]
    color: Color = 1
    dashed: bool = False
    band: tuple[list[float], list[float]] | None = None
    dots: bool = True
    shade: float | None = None


@dataclass(frozen=True)
class Key:
    """An entry of a chart's legend. With `shade`, it is that of a band (see `Series`)."""

    name: str
    color: Color
    dashed: bool = False
    shade: float | None = None

    @property
    def paint(self) -> Markup:
        """The class and style attributes of the entry."""
        if self.shade is not None:
            return paint(self.color, "key shade", f"--shade:{self.shade:.0%}")
        return paint(self.color, "key dashed" if self.dashed else "key")


@dataclass(frozen=True)
class Chart:
    """A chart as the page shows it: title, SVG, legend, and the values to show under the pointer (`data`)."""

    title: str
    svg: Markup
    legend: list[Key] = field(default_factory=list)
    data: dict[str, object] | None = None
    note: str = ""


def paint(color: Color, classes: str = "", style: str = "") -> Markup:
    """Return the attributes that give an element its color: a class, and a style if the color is not of the palette.

    Args:
        color: a slot 1 to 8, or "#rrggbb".
        classes: other classes of the element.
        style: other declarations of its style.

    Raises:
        ValueError: if the color is neither.

    """
    before = f"{classes} " if classes else ""
    if isinstance(color, int) and 1 <= color <= 8:
        return Markup(f'class="{before}s{color}"' + (f' style="{style}"' if style else ""))
    if not re.fullmatch(r"#[0-9A-Fa-f]{6}", str(color)):
        raise ValueError(f"color must be 1 to 8 or '#rrggbb', but is {color!r}")
    return Markup(f'class="{before}own" style="--own:{color}{f";{style}" if style else ""}"')


def thin(series: Series, most: int = MOST_POINTS) -> Series:
    """Return every k-th point and the last one, about `most` of them, or all if there are no more."""
    if len(series.x) <= most:
        return series
    rows = sorted({*range(0, len(series.x), math.ceil(len(series.x) / most)), len(series.x) - 1})
    lower, upper = series.band or ([], [])
    band = ([lower[r] for r in rows], [upper[r] for r in rows]) if series.band else None
    return replace(series, x=[series.x[r] for r in rows], y=[series.y[r] for r in rows], band=band)


def line_chart(
    title: str,
    series: list[Series],
    x_label: str,
    *,
    percent: bool = False,
    log_x: bool = False,
    log_y: bool = False,
    reference: tuple[float, str] | None = None,
    zero: bool = False,
    x_ticks: list[float] | None = None,
    x_range: tuple[float, float] | None = None,
    whole_x: bool = False,
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
        x_range: ends of the x axis, by default those of the data.
        whole_x: whether ticks of the x axis are whole numbers.
        note: printed below the chart.

    """
    series = [thin(s) for s in series if s.x]
    ys = [v for s in series for v in s.y] + [v for s in series if s.band for side in s.band for v in side]
    ys += [reference[0]] if reference else []
    low, high = extent(ys, log_y)
    low = 0.0 if zero and min(ys, default=0) >= 0 else low
    x_low, x_high = x_range or extent([v for s in series for v in s.x], log_x, pad=0.02)
    across = Scale(x_low, x_high, LEFT, WIDTH - RIGHT, log_x)
    up = Scale(low, high, HEIGHT - BOTTOM, TOP, log_y)
    if whole_x and x_ticks is None:
        x_ticks = [v for v in across.ticks(5) if v == round(v)]
    parts = [axes(across, up, x_label, percent, x_ticks)]
    if reference:
        level = up(reference[0])
        parts.append(f'<line class="ref" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
    parts += [_curve(s, across, up) for s in series]
    if reference:  # its name is above the curves, so that they do not strike it out
        parts.append(text(WIDTH - RIGHT, level - 4 if level > TOP + 14 else level + 12, reference[1], "tick end"))
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" hidden/>')
    data = {
        "box": [LEFT, WIDTH - RIGHT],
        "x": [x_low, x_high],
        "log": log_x,
        "label": x_label,
        "percent": percent,
        "series": [_read_out(s) for s in series],
    }
    legend = [Key(s.name, s.color, s.dashed, s.shade) for s in series]
    return Chart(title, svg(parts, _description(title, series, percent)), legend, data, note)


def _read_out(s: Series) -> dict[str, object]:
    """Return what the page's script shows of a curve under the pointer; of a shaded band, both bounds."""
    values: dict[str, object] = {"name": s.name, "x": _rounded(s.x), "y": _rounded(s.y)}
    if s.band and s.shade is not None:
        values |= {"low": _rounded(s.band[0]), "high": _rounded(s.band[1])}
    return values


def _curve(s: Series, across: Scale, up: Scale) -> str:
    points = [(across(x), up(y)) for x, y in zip(s.x, s.y, strict=True) if math.isfinite(y)]
    inner = ""
    if s.band:
        known = [(x, *ends) for x, *ends in zip(s.x, *s.band, strict=True) if all(map(math.isfinite, ends))]
        lower = [(across(x), up(low)) for x, low, _ in known]
        upper = [(across(x), up(high)) for x, _, high in known]
        inner += f'<path class="band" d="{path([*lower, *reversed(upper)])}Z"/>'
    if s.shade is not None:
        attributes = paint(s.color, "shade", f"--shade:{s.shade:.0%}")
        return f'<g {attributes} data-series="{escape(s.name)}">{inner}</g>'
    dashed = " dashed" if s.dashed else ""
    if len(points) > 1:
        inner += f'<path class="line{dashed}" d="{path(points)}"/>'
    if s.dots and len(points) <= 12:
        inner += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points)
    return f'<g {paint(s.color)} data-series="{escape(s.name)}">{inner}</g>'


def axes(across: Scale, up: Scale, x_label: str, percent: bool = False, x_ticks: list[float] | None = None) -> str:
    """Draw horizontal grid lines, the ticks of both axes, and the name of the x axis at its end."""
    parts = []
    ticks = up.ticks()
    for v, label in zip(ticks, tick_labels(ticks, percent), strict=True):
        y = up(v)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(LEFT - 6, y + 3.5, label, "tick end"))
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    ticks = across.ticks(5) if x_ticks is None else x_ticks
    for v, label in zip(ticks, tick_labels(ticks), strict=True):
        x = across(v)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(text(x, base + 15, label, "tick middle"))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 3, x_label, "tick end"))
    return "".join(parts)


def svg(parts: list[str], description: str, height: int = HEIGHT) -> Markup:
    """Return the SVG element of these parts. Screen readers read the description."""
    return Markup(  # all words in `parts` went through `text` or `escape`
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(description)}">{"".join(parts)}</svg>'
    )


def text(x: float, y: float, words: str, kind: str) -> str:
    """Return a text element; `kind` has its classes: tick, end, middle."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def path(points: list[tuple[float, float]]) -> str:
    """Return the data of an SVG path: straight lines through the points."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _rounded(values: list[float]) -> list[float | None]:
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values]


def _description(title: str, series: list[Series], percent: bool) -> str:
    """Describe the chart for people who do not see it: where each curve begins and ends."""
    show = numbers.percent if percent else numbers.number
    ends = [f"{s.name} from {show(s.y[0])} to {show(s.y[-1])}" for s in series if s.shade is None]
    return f"{title}: " + "; ".join(ends) if ends else f"{title}: no values"
