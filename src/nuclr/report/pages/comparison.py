"""The page of `nuclr compare` and `nuclr table`: tables and charts of each study in the folder."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from nuclr import objectives
from nuclr.report import numbers
from nuclr.report.charts import Chart, Color, Row, Series, line_chart, row_chart
from nuclr.report.page import Block, Fold, Options, Page, Section, Table, Text
from nuclr.studies.engine.results import Comparison, Difference, ResultRow
from nuclr.studies.engine.tables import TextTable, chosen_table, read_results, text_tables

FILES = ("compare.json", "ablations.json", "batch_sizes.json", "table.json")
GREY = 8
OTHER_COLOR = 7  # of an objective that is not registered
MOST_INTERVALS = 14  # in one chart
MOST_BANDS = 4  # more on top of one another cannot be read
MOST_VERDICTS = 4


Studies = tuple[Comparison, ...]


def open_folder(path: Path, _: Options) -> Studies:
    """Read the studies in a folder."""
    return tuple(read_results(path / name) for name in FILES if (path / name).is_file())


def make_page(studies: Studies) -> Page:
    """Return the page of a folder: a section per study."""
    first = studies[0]
    labels = ", ".join(dict.fromkeys(row.label for row in first.rows))
    verdicts = [f"{_names(first, one)}: {one.verdict} ({one.set})." for one in first.differences[:MOST_VERDICTS]]
    notes: list[str] = []
    sections = []
    for study in studies:
        notes += study.notes
        notes += [f"A run failed: {name}: {reason}" for name, reason in study.failed.items()]
        if study.missing:
            notes.append(f"{len(study.missing)} runs are not done, such as {study.missing[0]}.")
        show: Callable[[Studies], Iterator[Block]] = partial(show_study, study)
        sections.append(Section(study.kind.replace("_", "-"), study.title, show))
    sections.append(
        Section(
            "repeat",
            "How to repeat this",
            repeat,
            menu="Repeat",
        )
    )
    return Page(
        kind="table" if first.kind == "table" else "comparison",
        title=first.title if first.kind == "table" else "Comparison",
        verdict=" ".join(verdicts) or f"{labels}. Seeds: {len(first.seeds)}.",
        sections=sections,
        notes=notes,
    )


def show_study(study: Comparison, _: Studies) -> Iterator[Block]:
    """Show the tables and charts of one study."""
    yield from (_table(table, study.title) for table in text_tables(study))
    yield from _size_charts(study) if study.kind == "batch_sizes" else _training_charts(study)
    yield from _spread_charts(study) if study.kind == "table" else _difference_charts(study)
    chosen = chosen_table(study)
    if chosen.rows:
        yield Fold(chosen.title, [_table(chosen, "")])


def repeat(studies: Studies) -> Iterator[Block]:
    """Show how values were computed, the command, the state of every run and the settings that all runs share."""
    for study in studies:
        yield Text(study.title, "heading")
        yield from (Text(line) for line in study.protocol)
        yield Text(study.command, "code")
        runs = [[name, state] for row in study.rows for name, state in row.runs.items()]
        yield Fold(f"Runs of {study.title}", [Table(f"State of the runs of {study.title}", ["run", "state"], runs)])
        about = "\n".join(f"{key}: {value}" for key, value in (study.settings | study.versions).items())
        if about:
            yield Fold("Settings of all runs", [Text(about, "code")])


def _table(table: TextTable, title: str) -> Table:
    return Table(
        table.title or title,
        table.header,
        table.rows,
        table.bold,
    )


def _names(study: Comparison, difference: Difference) -> str:
    return f"{study.row(difference.row).label} over {study.row(difference.to).label}"


def _color(row: ResultRow) -> Color:
    return objectives.entry(row.method).color if row.method in objectives.names() else OTHER_COLOR


def _curve(
    name: str,
    x: Sequence[float],
    percent: Sequence[Sequence[float]] | np.ndarray,
    color: Color,
    with_band: bool = True,
) -> Series:
    """Return the mean over seeds of values (seeds, points), with the standard deviation as a band."""
    values = np.array(percent) / 100
    mean = values.mean(axis=0)
    band = None
    if with_band and len(values) > 1:
        std = values.std(axis=0, ddof=1)
        band = ((mean - std).tolist(), (mean + std).tolist())
    return Series(
        name,
        list(map(float, x)),
        mean.tolist(),
        color,
        band=band,
    )


def _training_charts(study: Comparison) -> Iterator[Chart]:
    """Show one chart per block and set of held-out pairs, as the paper's Figure 3 does."""
    for block in study.blocks:
        rows = [row for row in block.rows if row.epochs]
        colors = [_color(row) for row in rows]
        if len(set(colors)) < len(rows):  # ablations are all of one method
            colors = [1 + number % GREY for number in range(len(rows))]
        charts: dict[str, list[Series]] = {}
        for row, color in zip(rows, colors, strict=True):
            for name, runs in row.curves.items():
                series = _curve(row.label, row.epochs, runs, color, len(rows) <= MOST_BANDS)
                charts.setdefault(name, []).append(series)
        for name, lines in charts.items():
            what = f"{name}: validation recall@1" if name else "Recall@1 (mean of directions) or accuracy"
            yield line_chart(
                ", ".join(filter(None, (block.title, f"{what} while training"))),
                lines,
                "epoch",
                percent=True,
                note="Mean over the seeds; bands are one standard deviation." if len(study.seeds) > 1 else "",
            )


def _size_charts(study: Comparison) -> Iterator[Chart]:
    (block,) = study.blocks
    column = next(column for column in block.columns if column.compared)
    by_method: dict[str, dict[float, ResultRow]] = {}
    for row in block.rows:
        by_method.setdefault(row.method, {})[float(row.name.rpartition("=")[2])] = row
    series = []
    for rows in by_method.values():
        sizes = sorted(rows)
        values = [value.per_seed for size in sizes if (value := rows[size].values[column.key])]
        first = rows[sizes[0]]
        series.append(_curve(first.label.partition(",")[0], sizes, np.array(values).T, _color(first)))
    if series:
        yield line_chart(
            f"{column.title} against batch size",
            series,
            "batch size",
            percent=True,
            log_x=True,
            x_ticks=sorted({x for one in series for x in one.x}),
        )


def _difference_charts(study: Comparison) -> Iterator[Chart]:
    by_set: dict[str, list[Difference]] = {}
    for one in study.differences:
        by_set.setdefault(one.set, []).append(one)
    colors = {"better": 3, "worse": 2}
    for name, differences in by_set.items():
        rows = []
        for one in differences[:MOST_INTERVALS]:
            value, low, high = map(numbers.signed, (one.points.difference, one.points.low, one.points.high))
            rows.append(
                Row(
                    name=_names(study, one),
                    values=[one.points.difference],
                    label=f"{value}  [{low}, {high}]",
                    color=colors.get(one.verdict, GREY),
                    bar=(one.points.low, one.points.high),
                )
            )
        yield row_chart(f"Differences, {name}", rows, "points")


def _spread_charts(study: Comparison) -> Iterator[Chart]:
    for block in study.blocks:
        for column in [column for column in block.columns if column.of] or block.columns[-1:]:
            rows = []
            for row in block.rows:
                value = row.values.get(column.key)
                if value and value.per_seed:
                    rows.append(Row(row.label, list(value.per_seed), f"{value.mean:.2f}", _color(row)))
            if rows:
                title = ": ".join(filter(None, (block.title, column.title)))
                yield row_chart(title, rows, "percent", "Dots are runs, the line is their mean.")
