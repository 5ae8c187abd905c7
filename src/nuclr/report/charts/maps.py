"""Charts of the plane: points in colors, and values over a grid."""

import math
from collections.abc import Sequence

from markupsafe import escape

from nuclr.report.charts.lines import BOTTOM, LEFT, TOP, WIDTH, Chart, Color, Key, paint, svg, text, tick_labels

SIDE = 225  # pixels of the y axis
Point = tuple[float, float]


def colored_points(
    title: str,
    groups: Sequence[tuple[str, Color, list[Point]]],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    note: str = "",
) -> Chart:
    """Draw points of several groups in their colors, with equal scales on both axes.

    Args:
        title: printed above the chart.
        groups: name, color and points (x, y) of each group; the names are the legend.
        x_range: ends of the x axis.
        y_range: ends of the y axis.
        note: printed below the chart.

    """
    plane = _Plane(x_range, y_range)
    parts = [plane.axes()]
    for name, color, points in groups:
        dots = "".join(f'<circle cx="{plane.x(a):.1f}" cy="{plane.y(b):.1f}" r="2.8"/>' for a, b in points)
        parts.append(f"<g {paint(color)}><title>{escape(name)}</title>{dots}</g>")
    count = sum(len(points) for _, _, points in groups)
    description = f"{title}: {count} points in {len(groups)} colors. {note}"
    legend = [Key(name, color) for name, color, _ in groups]
    return Chart(title, svg(parts, description, plane.height), legend, note=note)


def value_map(
    title: str, rows: list[list[float]], low: float, high: float, points: list[Point] | None = None, note: str = ""
) -> Chart:
    """Draw values over the unit square: the stronger the color, the larger the value.

    Args:
        title: printed above the chart.
        rows: values at equidistant nodes, rows from y = 0 to 1, each from x = 0 to 1.
        low: value of the faintest color.
        high: value of the strongest color.
        points: marked by small dots.
        note: printed below the chart.

    """
    plane = _Plane((0, 1), (0, 1))
    tall, wide = len(rows), len(rows[0])
    width, height = SIDE / wide, SIDE / tall
    cells = []
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            share = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0
            x, y = plane.left + j * width, TOP + (tall - 1 - i) * height
            cells.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" style="--v:{share:.2f}"/>'
            )
    parts = [f'<g class="map" shape-rendering="crispEdges">{"".join(cells)}</g>', plane.axes()]
    if points:
        dots = "".join(f'<circle cx="{plane.x(a):.1f}" cy="{plane.y(b):.1f}" r="1.2"/>' for a, b in points)
        parts.append(f'<g class="specks">{dots}</g>')
    smallest, largest = (extreme(map(extreme, rows)) for extreme in (min, max))
    description = f"{title}: values from {smallest:.3g} to {largest:.3g}. {note}"
    return Chart(title, svg(parts, description, plane.height), note=note)


class _Plane:
    """Equal scales on both axes, centered in the width of a chart."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self.x_range, self.y_range = x_range, y_range
        spans = x_range[1] - x_range[0], y_range[1] - y_range[0]
        self.unit = min((WIDTH - LEFT - 10) / spans[0], SIDE / spans[1])
        self.left = LEFT + (WIDTH - LEFT - 10 - self.unit * spans[0]) // 2
        self.bottom = TOP + self.unit * spans[1]
        self.height = math.ceil(self.bottom + BOTTOM)

    def x(self, value: float) -> float:
        return self.left + self.unit * (value - self.x_range[0])

    def y(self, value: float) -> float:
        return self.bottom - self.unit * (value - self.y_range[0])

    def axes(self) -> str:
        right = self.x(self.x_range[1])
        parts = [
            f'<line class="axis" x1="{self.left:.1f}" x2="{right:.1f}" y1="{self.bottom:.1f}" y2="{self.bottom:.1f}"/>',
            f'<line class="axis" x1="{self.left:.1f}" x2="{self.left:.1f}" y1="{TOP}" y2="{self.bottom:.1f}"/>',
        ]
        for place, (low, high) in ((self.x, self.x_range), (self.y, self.y_range)):
            ticks = [low, (low + high) / 2, high]
            for value, label in zip(ticks, tick_labels(ticks), strict=True):
                if place == self.x:
                    parts.append(text(self.x(value), self.bottom + 15, label, "tick middle"))
                else:
                    parts.append(text(self.left - 6, self.y(value) + 3.5, label, "tick end"))
        return "".join(parts)
