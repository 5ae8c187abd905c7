"""Charts of distributions: histogram, scatter plot, differences with intervals, heat map."""

import math
from dataclasses import dataclass

import numpy as np
from markupsafe import escape

from nuclr.report import numbers
from nuclr.report.charts.lines import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Color,
    Key,
    Scale,
    axes,
    extent,
    paint,
    svg,
    text,
    tick_labels,
)  # fmt: skip


@dataclass(frozen=True)
class Marker:
    """A named value on the x axis of a histogram."""

    value: float
    name: str
    color: Color


def log_histogram(
    title: str, values: list[float], x_label: str, markers: list[Marker], bins: int = 48, floor: float = 1e-6
) -> Chart:
    """Draw a histogram over a logarithmic axis. The first bar includes values below `floor`."""
    shown = [max(v, floor) for v in values]
    x_low, x_high = extent(shown, log=True, pad=0.01)
    begin, end = math.log10(x_low), math.log10(x_high)
    tally = [0] * bins
    for v in shown:
        tally[min(bins - 1, int((math.log10(v) - begin) / (end - begin) * bins))] += 1
    across = Scale(x_low, x_high, LEFT, WIDTH - RIGHT, log=True)
    up = Scale(0, max(tally) * 1.12, HEIGHT - BOTTOM, TOP)
    parts = [axes(across, up, x_label)]
    width = (WIDTH - RIGHT - LEFT) / bins
    for k, n in enumerate(tally):
        if n:
            top = up(n)
            low, high = (10 ** (begin + (end - begin) * j / bins) for j in (k, k + 1))
            hint = f"{numbers.count(n)} from {numbers.times(low)} to {numbers.times(high)}"
            parts.append(
                f'<rect class="bar s1" x="{LEFT + k * width + 0.5:.1f}" width="{width - 1:.1f}" y="{top:.1f}" '
                f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{hint}</title></rect>'
            )
    for marker in markers:
        at, color = across(marker.value), paint(marker.color, "mark")
        parts.append(f'<line {color} x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    described = f"{title}: histogram of {numbers.count(len(values))} values, " + ", ".join(m.name for m in markers)
    return Chart(title, svg(parts, described), [Key(m.name, m.color) for m in markers])


def scatter(
    title: str,
    x: list[float],
    y: list[float],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    note: str = "",
    color: Color = 1,
) -> Chart:
    """Draw points. The name of the y axis is printed above it."""
    (x_low, x_high), (y_low, y_high) = extent(x, log_x, 0.03), extent(y, log_y, 0.05)
    across = Scale(x_low, x_high, LEFT, WIDTH - RIGHT, log_x)
    up = Scale(y_low, y_high, HEIGHT - BOTTOM, TOP + 14, log_y)
    dots = "".join(f'<circle cx="{across(a):.1f}" cy="{up(b):.1f}" r="1.8"/>' for a, b in zip(x, y, strict=True))
    parts = [axes(across, up, x_label), text(LEFT, TOP + 3, y_label, "tick"), f"<g {paint(color, 'dots')}>{dots}</g>"]
    return Chart(title, svg(parts, f"{title}: {len(x)} points. {note}"), note=note)


@dataclass(frozen=True)
class Interval:
    """A difference with its bounds; `significant` if zero lies outside."""

    name: str
    value: float
    low: float
    high: float
    significant: bool


def interval_chart(title: str, rows: list[Interval], x_label: str, note: str = "") -> Chart:
    """Draw a dot and a bar per row, with the name of the row above it. Zero is marked."""
    low, high = extent([v for r in rows for v in (r.low, r.high, 0.0)], pad=0.06)
    across = Scale(low, high, 8, WIDTH - 8)
    step, top = 36, 6
    height = top + step * len(rows) + BOTTOM
    base = height - BOTTOM
    zero = across(0)
    parts = [f'<line class="axis" x1="8" x2="{WIDTH - 8}" y1="{base}" y2="{base}"/>']
    parts.append(f'<line class="ref" x1="{zero:.1f}" x2="{zero:.1f}" y1="{top}" y2="{base}"/>')
    ticks = across.ticks(5)
    for v, label in zip(ticks, tick_labels(ticks), strict=True):
        parts.append(text(across(v), base + 15, label, "tick middle"))
    parts.append(text(WIDTH - 8, height - 3, x_label, "tick end"))
    for k, r in enumerate(rows):
        y = top + step * k + 24
        color = paint((3 if r.value > 0 else 2) if r.significant else 8)
        begin, at, end = (f"{across(v):.1f}" for v in (r.low, r.value, r.high))
        parts.append(text(8, y - 9, r.name, "tick"))
        parts.append(text(WIDTH - 8, y - 9, f"{numbers.signed(r.value)}  [{_bounds(r)}]", "tick end"))
        parts.append(f'<g {color}><line class="line" x1="{begin}" x2="{end}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle cx="{at}" cy="{y}" r="4"/></g>')
    described = "; ".join(f"{r.name} {numbers.signed(r.value)} within {_bounds(r)}" for r in rows)
    return Chart(title, svg(parts, f"{title}: {described}", height), note=note)


def _bounds(row: Interval) -> str:
    return f"{numbers.signed(row.low)}, {numbers.signed(row.high)}"


@dataclass(frozen=True)
class Spread:
    """Several values of one row, such as those of all seeds."""

    name: str
    values: list[float]
    color: Color


def spread_chart(title: str, rows: list[Spread], x_label: str, note: str = "") -> Chart:
    """Draw the values of each row as dots and their mean as a line, with the name of the row above them."""
    low, high = extent([value for row in rows for value in row.values], pad=0.06)
    across = Scale(low, high, 8, WIDTH - 8)
    step, top = 36, 6
    height = top + step * len(rows) + BOTTOM
    base = height - BOTTOM
    parts = [f'<line class="axis" x1="8" x2="{WIDTH - 8}" y1="{base}" y2="{base}"/>']
    ticks = across.ticks(5)
    for v, label in zip(ticks, tick_labels(ticks), strict=True):
        parts.append(f'<line class="grid" x1="{across(v):.1f}" x2="{across(v):.1f}" y1="{top}" y2="{base}"/>')
        parts.append(text(across(v), base + 15, label, "tick middle"))
    parts.append(text(WIDTH - 8, height - 3, x_label, "tick end"))
    described = []
    for k, row in enumerate(rows):
        y, mean = top + step * k + 24, float(np.mean(row.values))
        at = f"{across(mean):.1f}"
        dots = "".join(f'<circle cx="{across(value):.1f}" cy="{y}" r="3.5"/>' for value in row.values)
        parts.append(text(8, y - 9, row.name, "tick"))
        parts.append(text(WIDTH - 8, y - 9, f"{mean:.2f}", "tick end"))
        parts.append(f"<g {paint(row.color, 'dots')}>{dots}</g>")
        parts.append(f'<line {paint(row.color, "mark")} x1="{at}" x2="{at}" y1="{y - 7}" y2="{y + 7}"/>')
        described.append(f"{row.name} {mean:.2f}")
    return Chart(title, svg(parts, f"{title}: {'; '.join(described)}", height), note=note)


def heat_map(title: str, names: list[str], table: np.ndarray, description: str) -> Chart:
    """Draw a confusion matrix: rows are true classes, columns predicted classes, colors shares of the row.

    Args:
        title: printed above the chart.
        names: names of the c classes.
        table: (c, c) counts.
        description: read by screen readers.

    """
    c, left, top = len(names), 78, 6
    cell = min(26.0, (WIDTH - left - 6) / c)
    below = top + c * cell
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    parts = []
    for i, name in enumerate(names):
        parts.append(text(left - 6, top + (i + 0.5) * cell + 3.5, _shorten(name), "tick end"))
        x, y = left + (i + 0.5) * cell + 3, below + 9
        parts.append(
            f'<text class="tick end" transform="translate({x:.1f} {y:.1f}) rotate(-45)">{escape(_shorten(name))}</text>'
        )
        for j, other in enumerate(names):
            share = float(shares[i, j])
            hint = f"{name} classified as {other}: {numbers.percent(share, 0)} ({table[i, j]})"
            kind = "cell right" if i == j else "cell"
            parts.append(
                f'<rect class="{kind}" x="{left + j * cell + 0.5:.1f}" y="{top + i * cell + 0.5:.1f}" '
                f'width="{cell - 1:.1f}" height="{cell - 1:.1f}" rx="1.5" style="--v:{share:.3f}">'
                f"<title>{escape(hint)}</title></rect>"
            )
            if cell >= 20 and share >= 0.005:
                strong = " strong" if share > 0.55 else ""
                at = (left + (j + 0.5) * cell, top + (i + 0.5) * cell + 3.2)
                parts.append(text(*at, f"{100 * share:.0f}", f"in middle{strong}"))
    return Chart(title, svg(parts, description, height=round(below + 56)))


def _shorten(name: str, most: int = 13) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
