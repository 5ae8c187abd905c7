"""The page of `nuclr table`: the table of each block, the distance from published values, and every run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nuclr import files, objectives
from nuclr.errors import UserError
from nuclr.report import numbers
from nuclr.report.charts.lines import Chart, Color
from nuclr.report.charts.spreads import Spread, spread_chart
from nuclr.report.render import Context, LeaveOut, Options, Page, Section, Table, Tile

FILE = "table.json"
OTHER_COLOR = 7  # of a row whose objective is not known
DONE = "done"

Content = dict[str, Any]  # of table.json


@dataclass
class TableContext(Context):
    """The content of table.json."""

    table: Content = field(kw_only=True)


@dataclass(frozen=True)
class Summary:
    """Content of the section "summary"."""

    tiles: list[Tile]


@dataclass(frozen=True)
class Results:
    """Content of the section "results": a title and a table per block, and charts of the values of every run."""

    blocks: list[tuple[str, Table]]
    charts: list[Chart]


@dataclass(frozen=True)
class PublishedValues:
    """Content of the section "published"."""

    source: str
    blocks: list[tuple[str, Table]]


@dataclass(frozen=True)
class Runs:
    """Content of the section "runs"."""

    table: Table
    tests: Table
    protocol: list[str]
    command: str


def _open(path: Path, _: Options) -> TableContext:
    try:
        content: Content = files.parse_json((path / FILE).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("blocks"), list) or not content["blocks"]:
            raise ValueError("it has no blocks")
    except (OSError, ValueError) as error:
        raise UserError(f"{path / FILE} was not written by nuclr table, or is damaged ({error})") from None
    states = [state for block in content["blocks"] for row in block["rows"] for state in row["runs"].values()]
    waiting = sum(state != DONE for state in states)
    notes = [f"{waiting} of {len(states)} runs are not done; the table has the others."] if waiting else []
    rows = sum(len(block["rows"]) for block in content["blocks"])
    seeds = len(content["seeds"])
    trained = f", {seeds} seed{'s' if seeds > 1 else ''} each" if seeds else ""
    return TableContext(title=content["title"], sentence=f"{rows} rows{trained}.", notes=notes, table=content)


def table_summary(context: TableContext) -> Summary:
    """Return the best row of every block in its last column, the mean if there is one."""
    tiles = []
    for block in context.table["blocks"]:
        title = block["columns"][-1]
        rows = [row for row in block["rows"] if row["cells"][title] is not None]
        if rows:
            best = max(rows, key=lambda row: row["cells"][title]["mean"])
            value = f"{best['cells'][title]['mean']:.1f}{numbers.SPACE}%"
            where = f"{block['title']}, {title}" if block["title"] else title
            tiles.append(Tile(where, value, f"{best['label']}, the best of {len(rows)}"))
    return Summary(tiles)


def table_results(context: TableContext) -> Results:
    """Return the tables, and a chart of the last column of each block."""
    blocks = [(block["title"] or context.table["title"], _result_table(block)) for block in context.table["blocks"]]
    charts = [chart for block in context.table["blocks"] if (chart := _chart(block)) is not None]
    return Results(blocks, charts)


def _result_table(block: Content) -> Table:
    rows, best = [], set()
    for r, row in enumerate(block["rows"]):
        rows.append([row["label"], *(_text(row["cells"][title]) for title in block["columns"])])
        best |= {(r, c) for c, title in enumerate(block["columns"], start=1) if title in row["best"]}
    return Table(["", *block["columns"]], rows, frozenset(best))


def _text(value: Content | None) -> str:
    return numbers.MISSING if value is None else value["text"]


def _chart(block: Content) -> Chart | None:
    title = block["columns"][-1]
    rows = [
        Spread(row["label"], row["cells"][title]["per_seed"], _color(row["objective"]))
        for row in block["rows"]
        if row["cells"][title] is not None
    ]
    name = f"{block['title']}: {title}" if block["title"] else title
    return spread_chart(name, rows, "percent", "Dots are runs, the line is their mean.") if rows else None


def _color(objective: str | None) -> Color:
    return objectives.entry(objective).color if objective in objectives.names() else OTHER_COLOR


def published_values(context: TableContext) -> PublishedValues:
    """Return ours, the published values and the differences of the rows that have published values."""
    blocks = []
    for block in context.table["blocks"]:
        rows = [
            [f"{row['label']}, {title}", _text(row["cells"][title]), _text(value), _difference(row, title)]
            for row in block["rows"]
            for title, value in row["published"].items()
        ]
        if rows:
            shown = Table(["", "here", "published", "difference"], rows)
            blocks.append((block["title"] or context.table["title"], shown))
    if not blocks:
        raise LeaveOut  # the table file has none
    return PublishedValues(context.table["published_in"], blocks)


def _difference(row: Content, title: str) -> str:
    return numbers.signed(row["differences"][title]) if title in row["differences"] else numbers.MISSING


def table_runs(context: TableContext) -> Runs:
    """Return the state of every run, the test sets, and how values were computed."""
    runs = [
        [name, state]
        for block in context.table["blocks"]
        for row in block["rows"]
        for name, state in row["runs"].items()
    ]
    tests = dict.fromkeys((t["title"], t["test"], t["metric"]) for b in context.table["blocks"] for t in b["tests"])
    return Runs(
        Table(["run", "state"], runs),
        Table(["column", "test set", "metric"], [list(test) for test in tests]),
        context.table["protocol"],
        context.table["command"],
    )


PAGE = Page(
    kind="table",
    files=(FILE,),
    open=_open,
    sections=[
        Section("summary", "Summary", "sections/tiles.html", table_summary, heading=False),
        Section("results", "Results", "sections/table_results.html", table_results),
        Section("published", "Published values", "sections/table_published.html", published_values),
        Section("runs", "Runs and test sets", "sections/table_runs.html", table_runs, menu="Runs"),
    ],
)
