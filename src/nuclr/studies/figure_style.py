"""Common style of all figures: colors that color-blind people can distinguish, plain axes, one PNG and one SVG each."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nuclr import files

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, AMBER, INK, GREY = "#56B4E9", "#E69F00", "#222222", "#8A8A8A"

FORMATS = ("png", "svg")

_RC: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.titlesize": 13,
    "savefig.dpi": 150,
    "svg.hashsalt": "nuclr",
}


def house_style() -> Any:
    """Return the context manager in which figures are drawn and saved."""
    return matplotlib.rc_context(_RC)  # type: ignore[arg-type]


def panels(
    rows: int, columns: int, title: str, size: tuple[float, float], width_ratios: list[float] | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """Create a titled figure with a grid of axes.

    Args:
        rows: Number of rows of panels.
        columns: Number of columns of panels.
        title: Title of the figure.
        size: Width and height of one panel in inches, before `width_ratios`.
        width_ratios: Relative widths of the columns.

    Returns:
        The figure, and its axes row by row.

    """
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    return figure, figure.subplots(rows, columns, squeeze=False, width_ratios=width_ratios).tolist()


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write `name`.png and `name`.svg; equal figures give equal bytes.

    Args:
        figure: The figure.
        folder: Existing folder.
        name: File name without suffix.

    Raises:
        UserError: If a file cannot be written.

    """
    for kind in FORMATS:
        metadata = {"Date": None} if kind == "svg" else None
        with files.user_errors(folder), files.write_atomically(folder / f"{name}.{kind}") as file:
            figure.savefig(file, format=kind, metadata=metadata)
