"""What `nuclr toy` wrote, and how its page names and draws the methods."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nuclr import files
from nuclr.errors import UserError
from nuclr.report import numbers
from nuclr.report.charts.lines import Chart, Series, line_chart
from nuclr.report.render import Context, LeaveOut, Options

SUMMARY = "toy.json"
METHODS = {
    "gcl": ("GCL: uniform q", 2, False),
    "gcl_constant": ("GCL, best constant", 6, True),
    "mle": ("MLE: exact Z", 8, False),
    "true_q": ("true q", 3, True),
    "nuclr": ("NUCLR, scale from maxima", 1, False),
    "nuclr_area": ("NUCLR, scale from area", 5, True),
    "counts": ("q from counts", 3, True),
}
GUIDE = 7  # the color of a guide

Record = dict[str, Any]  # of toy.json: a temperature, a sample size, a method, and their metrics


@dataclass
class ToyStudy(Context):
    """What `nuclr toy` wrote."""

    folder: Path = field(kw_only=True)
    content: dict[str, Any] = field(kw_only=True)
    records: list[Record] = field(kw_only=True)
    temperatures: list[float] = field(kw_only=True)
    largest: int = field(kw_only=True)
    seeds: int = field(kw_only=True)

    def select(self, tau: float, method: str, part: str = "records") -> list[Record]:
        """Return the records of a temperature and a method by sample size."""
        chosen = [r for r in self.part(part) if (r["tau"], r["method"]) == (tau, method)]
        return sorted(chosen, key=lambda r: r["n"])

    def part(self, name: str) -> list[Record]:
        """Return a list of toy.json.

        Raises:
            LeaveOut: If an older version wrote the file without it.

        """
        if name not in self.content:
            raise LeaveOut(f"{SUMMARY} has no {name!r}: run nuclr toy again.")
        rows: list[Record] = self.content[name]
        return rows

    def slope(self, tau: float, method: str, quantity: str, part: str = "records") -> Record | None:
        """Return the fitted slope of a quantity with its interval, if it could be fitted."""
        key = {"part": part, "tau": tau, "method": method, "quantity": quantity}
        return next((fit for fit in self.part("slopes") if key.items() <= fit.items()), None)


def open_toy_study(path: Path, _: Options) -> ToyStudy:
    """Read the folder of `nuclr toy`.

    Raises:
        UserError: If toy.json is damaged or was not written by `nuclr toy`.

    """
    try:
        content: dict[str, Any] = files.parse_json((path / SUMMARY).read_text(encoding="utf-8"))
        records: list[Record] = content["records"]
        temperatures = sorted({r["tau"] for r in records})
        largest = max(r["n"] for r in records)
        seeds = min(r["seeds"] for r in records)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / SUMMARY} was not written by nuclr toy, or is damaged ({error})") from None
    return ToyStudy(
        title="Toy study",
        sentence="A problem in which everything is known: how wrong is a uniform popularity, and how good is one that "
        f"is estimated from scores alone? Up to {numbers.count(largest)} pairs, at least {numbers.count(seeds)} "
        "samples of each size.",
        folder=path,
        content=content,
        records=records,
        temperatures=temperatures,
        largest=largest,
        seeds=seeds,
    )


def curves(
    context: ToyStudy,
    tau: float,
    title: str,
    quantity: str,
    methods: tuple[str, ...],
    *,
    part: str = "records",
    guide: tuple[str, float] | None = None,
    short: bool = False,
    note: str = "",
) -> Chart:
    """Draw the mean of a quantity against n on logarithmic axes, with its fitted slope next to each name.

    Bands are 95 % intervals of the mean.

    Args:
        context: The study.
        tau: Temperature.
        title: Printed above the chart.
        quantity: "error" reads error_mean and error_std.
        methods: The curves.
        part: The list of toy.json.
        guide: A method, and the exponent of a straight line to draw below its curve.
        short: Name methods without their variant.
        note: Printed below the chart.

    """
    series = []
    for method in methods:
        name, color, dashed = METHODS[method]
        rows = [r for r in context.select(tau, method, part) if r.get(f"{quantity}_mean", 0) > 0]
        if not rows:
            continue
        fit = context.slope(tau, method, quantity, part)
        name = short_name(method) if short else name
        label = f"{name}, slope {exponent(fit['slope'])}" if fit else name
        means = [r[f"{quantity}_mean"] for r in rows]
        halves = [1.96 * r[f"{quantity}_std"] / math.sqrt(r["seeds"]) for r in rows]
        band = (
            [max(m - h, m / 5) for m, h in zip(means, halves, strict=True)],
            [m + h for m, h in zip(means, halves, strict=True)],
        )
        series.append(Series(label, sizes_of(rows), means, color, dashed, band))
    if guide:
        rows = context.select(tau, guide[0], part)
        ends = sizes_of([rows[0], rows[-1]])
        start = rows[0][f"{quantity}_mean"] / 2
        line = [start * (n / ends[0]) ** guide[1] for n in ends]
        series.append(Series(f"guide: slope {exponent(guide[1])}", ends, line, GUIDE, dashed=True, dots=False))
    return over_sizes(title, series, "pairs n", note)


def over_sizes(title: str, series: list[Series], x_label: str, note: str = "") -> Chart:
    """Draw curves on two logarithmic axes with a tick at every size."""
    ticks = sorted({x for s in series for x in s.x})
    return line_chart(title, series, x_label, log_x=True, log_y=True, x_ticks=ticks, note=note)


def short_name(method: str) -> str:
    """Return the name of a method without its variant: "NUCLR"."""
    return METHODS[method][0].split(":")[0].split(",")[0]


def sizes_of(rows: list[Record]) -> list[float]:
    """Return the sample sizes of records."""
    return [float(r["n"]) for r in rows]


def exponent(value: float) -> str:
    """Write a slope with two decimals and a true minus sign."""
    return f"{value:.2f}".replace("-", "\u2212")
