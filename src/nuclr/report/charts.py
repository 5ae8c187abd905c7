"""Charts as inline SVG: pure functions from numbers to markup that takes its colors from the page's style.

All have one size, near that in which they are shown, so that their letters are legible on a phone as well. A series
has a color slot 1 to 8 (`--s1`, ... in the style), the same for one thing all over a page.
"""

import json
import math
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from nuclr.report import numbers
from nuclr.report.scales import Scale, extent, tick_labels

WIDTH, HEIGHT = 360, 224
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 32
MOST_POINTS = 300
BAND_ALPHA = 0.16


@dataclass(frozen=True)
class Series:
    """A curve through the points (x, y); `band` gives a lower and an upper bound for each."""

    name: str
    x: list[float]
    y: list[float]
    slot: int = 1
    dashed: bool = False
    band: tuple[list[float], list[float]] | None = None


@dataclass(frozen=True)
class Chart:
    """What the page shows: a title, markup, the legend's entries (name, slot, dashed), and values for the pointer."""

    title: str
    svg: Markup
    keys: list[tuple[str, int, bool]] = field(default_factory=list)
    data: dict[str, object] | None = None
    note: str = ""
    wide: bool = False


def thin(series: Series, most: int = MOST_POINTS) -> Series:
    """Every k-th point and the last one, where there are more than `most`."""
    if len(series.x) <= most:
        return series
    rows = sorted({*range(0, len(series.x), math.ceil(len(series.x) / most)), len(series.x) - 1})
    band = series.band and tuple([side[r] for r in rows] for side in series.band)
    return Series(
        series.name, [series.x[r] for r in rows], [series.y[r] for r in rows], series.slot, series.dashed,
        band,  # type: ignore[arg-type]
    )  # fmt: skip


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
    """Curves over a common x; `reference` is a level with a name, `zero` makes the y axis begin at 0."""
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
        above = level - 4 if level > TOP + 14 else level + 12
        parts.append(text(WIDTH - RIGHT, above, reference[1], "tick end"))
    for s in series:
        parts.append(_curve(s, across, up))
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" hidden/>')
    data = {
        "box": [LEFT, WIDTH - RIGHT],
        "x": [x_low, x_high],
        "log": log_x,
        "label": x_label,
        "percent": percent,
        "series": [{"name": s.name, "x": _rounded(s.x), "y": _rounded(s.y)} for s in series],
    }
    return Chart(title, figure(parts, _told(title, series, percent)), [(s.name, s.slot, s.dashed) for s in series],
                 data, note)  # fmt: skip


def _curve(s: Series, across: Scale, up: Scale) -> str:
    points = [(across(x), up(y)) for x, y in zip(s.x, s.y, strict=True) if math.isfinite(y)]
    inner = ""
    if s.band:
        known = [(x, *ends) for x, *ends in zip(s.x, *s.band, strict=True) if all(map(math.isfinite, ends))]
        lower = [(across(x), up(low)) for x, low, _ in known]
        upper = [(across(x), up(high)) for x, _, high in known]
        inner += f'<path class="band" d="{path([*lower, *reversed(upper)])}Z"/>'
    dashed = " dashed" if s.dashed else ""
    if len(points) > 1:
        inner += f'<path class="line{dashed}" d="{path(points)}"/>'
    if len(points) <= 12:
        inner += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points)
    return f'<g class="s{s.slot}" data-series="{escape(s.name)}">{inner}</g>'


def axes(across: Scale, up: Scale, x_label: str, percent: bool = False, x_ticks: list[float] | None = None) -> str:
    """Horizontal grid, ticks of both axes, and the name of the x axis at its end."""
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


def figure(parts: list[str], told: str, height: int = HEIGHT) -> Markup:
    """The SVG element, with its text alternative."""
    return Markup(  # all words in `parts` went through `text` or `escape`
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(told)}">{"".join(parts)}</svg>'
    )


def text(x: float, y: float, words: str, kind: str) -> str:
    """A text element; `kind` is its class: tick, end, middle."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def path(points: list[tuple[float, float]]) -> str:
    """Straight lines through the points."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _rounded(values: list[float]) -> list[float | None]:
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values]


def _told(title: str, series: list[Series], percent: bool) -> str:
    """What a person who does not see the chart is told: where each curve begins and ends."""
    show = numbers.percent if percent else numbers.number
    ends = [f"{s.name} from {show(s.y[0])} to {show(s.y[-1])}" for s in series]
    return f"{title}: " + "; ".join(ends) if ends else f"{title}: no values"


def to_json(data: object) -> Markup:
    """JSON for a script element: nothing in it can end the element or begin another."""
    dumped = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        dumped = dumped.replace(character, f"\\u{ord(character):04x}")
    return Markup(dumped)
