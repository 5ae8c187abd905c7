"""`nuclr table`: the tables of a paper in one command each."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from nuclr.cli.compare import RESUME, say, show_results
from nuclr.cli.train import training_errors
from nuclr.errors import UserError, printable

EPILOG = """
Examples:

    nuclr table configs/tables/table1.yaml --dry-run                      what would run, and how long it takes
    nuclr table configs/tables/table1.yaml data.root=DATA --tests TESTS --out runs/table1
    nuclr table configs/tables/table1.yaml data.root=DATA --tests TESTS --out runs/table1 --commands > jobs.sh
    nuclr table configs/tables/table1.yaml data.root=DATA --tests TESTS --commands --processes 2 | sh
"""
_WHAT = "What to do, instead of training, evaluating and writing the table"


def table(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file with rows, columns and seeds.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change for all runs.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs and the table. Default: runs/NAME of FILE.")
    ] = None,
    tests: Annotated[
        Path, typer.Option(help="Folder that the test sets are relative to: mscoco is TESTS/mscoco, and so on.")
    ] = Path(),
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of runs at the same time. Default: one per CPU core, or one on a GPU."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel=_WHAT,
            help="List the runs with their state and estimated time.",
        ),
    ] = False,
    commands: Annotated[
        bool,
        typer.Option(
            "--commands",
            rich_help_panel=_WHAT,
            help="Print one command per run that is not done, for the scheduler of a cluster, and the command that "
            "writes the table in the end.",
        ),
    ] = False,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            rich_help_panel=_WHAT,
            help="With --commands: processes per training, such as the number of GPUs; torchrun starts them.",
        ),
    ] = 1,
    collect: Annotated[
        bool,
        typer.Option(
            "--collect",
            rich_help_panel=_WHAT,
            help="Write the table from the results that exist.",
        ),
    ] = False,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_WHAT,
            help="Train and measure one run, as --commands prints it, and stop.",
        ),
    ] = None,
) -> None:
    """Train the rows of a table with several seeds, evaluate them on its columns, and write it as a paper prints it.

    The command can be stopped at any moment; run it again to resume. Finished runs and results are not repeated. Writes
    table.md, table.tex, table.json and the page report.html.
    """
    if sum((dry_run, commands, collect, job is not None)) > 1:
        raise UserError("--dry-run, --commands, --collect and --job exclude one another; use one of them")
    if processes > 1 and not commands:
        raise UserError("--processes is an option of --commands; run its output, such as with | sh")

    from nuclr.studies import paper_tables

    changes = overrides or []
    target = out or Path("runs") / file.stem
    study = paper_tables.plan_table(
        file,
        tests,
        target,
        changes,
        say,
    )
    if dry_run:
        typer.echo(printable("\n".join(study.describe())))
        return
    if job is not None:
        with training_errors():
            study.train_one(job)
        return
    if commands:
        base = ["nuclr", "table", str(file), *changes, "--out", str(target), "--tests", str(tests)]
        launcher = ["torchrun", "--standalone", "--nproc_per_node", str(processes), "-m"] if processes > 1 else []
        for name in study.missing():
            typer.echo(shlex.join([*launcher, *base, "--job", name]))
        typer.echo(shlex.join([*base, "--collect"]))
        return
    with training_errors(RESUME):
        comparison = study.train(workers, collect)
    show_results(comparison, target)
