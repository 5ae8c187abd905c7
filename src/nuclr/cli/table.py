"""`nuclr table`: the tables of a paper in one command each."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nuclr.cli.report import write_final_report
from nuclr.errors import UserError, printable

if TYPE_CHECKING:
    from nuclr.studies.table.plan import PlannedRun

EPILOG = """
Examples:

    nuclr table configs/tables/table1.yaml --dry-run                      what would run, and how long it takes
    nuclr table configs/tables/table1.yaml data.root=DATA --tests TESTS --processes 2 --out runs/table1
    nuclr table configs/tables/table1.yaml data.root=DATA --tests TESTS --out runs/table1 --commands > jobs.sh
    nuclr table --results 'NUCLR=nuclr_*.json' --results 'SogCLR=sogclr_*.json' --out runs/elsewhere
"""
_WHAT = "What to do, instead of training, evaluating and writing the table"


def table(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE] [KEY=VALUE]...",
            help="A YAML file with rows, columns and seeds; then settings to change for all runs.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs, the results and the table. Default: runs/NAME of FILE.")
    ] = None,
    tests: Annotated[
        Path, typer.Option(help="Folder that the test sets are relative to: mscoco is TESTS/mscoco, and so on.")
    ] = Path(),
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Train and evaluate only rows of this label; can be given several times."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes per training, such as the number of GPUs; torchrun starts them.")
    ] = 1,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", rich_help_panel=_WHAT, help="List the runs with their state and estimated time."),
    ] = False,
    commands: Annotated[
        bool,
        typer.Option(
            "--commands",
            rich_help_panel=_WHAT,
            help="Print one line of shell per run that is not done, for the scheduler of a cluster, and the command "
            "that writes the table in the end.",
        ),
    ] = False,
    collect: Annotated[
        bool,
        typer.Option("--collect", rich_help_panel=_WHAT, help="Write the table from the results that exist."),
    ] = False,
    results: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[LABEL=]FILES",
            rich_help_panel=_WHAT,
            help="Instead of FILE: the table of results that `nuclr evaluate --out` wrote elsewhere (a path or a "
            "pattern). Without LABEL, runs that differ only in the seed are one row. Can be given several times.",
        ),
    ] = None,
) -> None:
    """Train the rows of a table with several seeds, evaluate them on its columns, and write it as a paper prints it.

    The command can be stopped at any moment; run it again to resume. Finished runs and results are not repeated. Writes
    table.md, table.tex, table.csv, table.json and the page report.html.
    """
    words = list(arguments or [])
    files = [*(results or []), *(_pop_results(words) if results else [])]
    if sum((dry_run, commands, collect, bool(results))) > 1:
        raise UserError("--dry-run, --commands, --collect and --results exclude one another; use one of them")
    path = Path(words.pop(0)) if words and "=" not in words[0] else None
    if (path is None) == (not results):
        problem = "FILE is missing; name a table file" if path is None else f"--results replaces {path}; leave one out"
        raise UserError(f"{problem}, such as configs/tables/table1.yaml")
    odd = next((word for word in words if "=" not in word), None)
    if odd is not None:
        raise UserError(f"{odd!r} is not an override; overrides are key=value, and there is one table file")

    from nuclr.studies.table import aggregate, evaluations, plan, render, table_folder
    from nuclr.studies.table.table_file import overrides_of, read_table

    description = evaluations.table_of_results(files) if path is None else read_table(path)
    changes = overrides_of(words, "command line")
    target = out or Path("runs") / (path.stem if path is not None else "table")
    runs = plan.plan_runs(description, target, tests, changes)
    chosen = _chosen(runs, only)
    if dry_run:
        _list_runs(chosen, processes)
        return
    command = shlex.join(["nuclr", *sys.argv[1:]])

    def write(_: Any = None) -> dict[str, Any]:
        content = aggregate.summarize(description, runs, tests, command)
        table_folder.write(target, content)
        return content

    with table_folder.opened(target, runs):
        if commands:
            _print_commands(chosen, processes, path, changes, target, tests)
            return
        write()  # first of all: results made elsewhere may be wrong
        failed: dict[str, str] = {}
        if not collect:
            _check_tests(chosen)
            failed = _work(chosen, processes, write)
        content = write()
        typer.echo(printable(render.tables(content)))
        typer.echo(f"The table, its runs and their results are in {target}")
        write_final_report(target)
    for name, error in failed.items():
        typer.echo(printable(f"nuclr: {name} failed: {error}"), err=True)
    missing = aggregate.missing_runs(content)
    if failed:
        typer.echo(f"nuclr: {len(failed)} runs failed; run the same command again to retry them", err=True)
        raise typer.Exit(1)
    if missing:
        typer.echo(f"nuclr: {len(missing)} of {len(runs)} runs are not done, such as {missing[0]}", err=True)


def _pop_results(words: list[str]) -> list[str]:
    """Remove the words that name JSON files and return them: a shell turns a pattern into many words."""
    names = [word for word in words if word.endswith(".json")]
    for name in names:
        words.remove(name)
    return names


def _chosen(runs: Sequence["PlannedRun"], only: list[str] | None) -> list["PlannedRun"]:
    labels = list(dict.fromkeys(run.label for run in runs))
    for label in only or []:
        if label not in labels:
            raise UserError(
                f"--only {label}: no row that is trained has this label; rows: {', '.join(labels) or 'none'}"
            )
    return [run for run in runs if not only or run.label in only]


def _check_tests(runs: Sequence["PlannedRun"]) -> None:
    """Refuse, before anything is trained, test sets that cannot be read."""
    from nuclr.studies.table.columns import problems

    lines = problems((run.located(column), run.settings.data) for run in runs for column in run.missing_columns())
    if lines:
        raise UserError(f"{lines[0]}{f' (and {len(lines) - 1} other test sets)' if len(lines) > 1 else ''}")


def _work(runs: Sequence["PlannedRun"], processes: int, write: Any) -> dict[str, str]:
    from nuclr.studies.compare.pool import Stop
    from nuclr.studies.table.launch import run_missing

    try:
        return run_missing(runs, processes, lambda text: typer.echo(printable(f"table: {text}"), err=True), write)
    except Stop as stop:
        typer.echo(f"nuclr: {stop}; run the same command again to resume", err=True)
        sys.exit(stop.status)


def _list_runs(runs: Sequence["PlannedRun"], processes: int) -> None:
    from nuclr.studies.table import estimate
    from nuclr.studies.table.columns import problems
    from nuclr.studies.table.launch import duration

    states = {run.name: run.state() for run in runs}
    remaining = [run for run in runs if states[run.name] != "done"]
    rows = {estimate.row_key(run) for run in remaining}
    times = estimate.estimate_rows([run for run in runs if estimate.row_key(run) in rows])
    total, unknown = 0.0, 0
    for run in runs:
        where = f"{run.block}, {run.label}" if run.block else run.label
        text = ""
        if states[run.name] != "done":
            seconds = estimate.left(run, times[estimate.row_key(run)])
            total, unknown = total + (seconds or 0.0), unknown + (seconds is None)
            text = f", training {'unknown' if seconds is None else 'about ' + duration(seconds)}"
        typer.echo(printable(f"{where}, seed {run.seed}: {states[run.name]}{text}"))
        if states[run.name] != "done":
            typer.echo(printable(f"    {shlex.join(_next_command(run, processes))}"))
    known = f"about {duration(total)} of training" if len(remaining) > unknown else "an unknown time"
    more = f", without {unknown} whose time is unknown" if unknown and unknown < len(remaining) else ""
    typer.echo(f"{len(remaining)} of {len(runs)} runs are not done: {known}{more}")
    for source in dict.fromkeys(times[estimate.row_key(run)].source for run in remaining):
        typer.echo(printable(f"time: {source}"))
    for line in problems((run.located(column), run.settings.data) for run in remaining for column in run.columns):
        typer.echo(printable(f"before training: {line}"))


def _next_command(run: "PlannedRun", processes: int) -> list[str]:
    """Return the command that a run needs next."""
    return run.evaluate_commands(run.missing_columns())[0][0] if run.trained else run.train_command(processes)


def _print_commands(
    runs: Sequence["PlannedRun"], processes: int, path: Path | None, changes: Sequence[str], out: Path, tests: Path
) -> None:
    for run in runs:
        if run.state() != "done":
            typer.echo(run.shell_line(processes))
    options = ["--out", str(out), "--tests", str(tests), "--collect"]
    typer.echo(shlex.join(["nuclr", "table", str(path), *changes, *options]))
