"""The command line: `main`, and one file per command. Heavy imports happen inside the commands, so --help is quick."""

import os
import sys
from typing import Annotated

import typer

from nuclr import __version__
from nuclr.cli import compare, demo, embed, evaluate, export, hubness, popularity, report, table, toy, train
from nuclr.cli.arguments import SETTINGS_CONTEXT
from nuclr.errors import UserError, first_line, printable

app = typer.Typer(
    name="nuclr",
    help="Contrastive learning on pairs that works at small batch sizes, and popularity: which samples are hubs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(context_settings=SETTINGS_CONTEXT)(demo.demo)
app.command(epilog=train.EPILOG, context_settings=SETTINGS_CONTEXT)(train.train)
app.command()(embed.embed)
app.command(epilog=evaluate.EPILOG)(evaluate.evaluate)
app.command(epilog=export.EPILOG)(export.export)
app.command()(popularity.popularity)
app.command(epilog=hubness.EPILOG)(hubness.hubness)
app.command(epilog=compare.EPILOG, context_settings=SETTINGS_CONTEXT)(compare.compare)
app.command(epilog=table.EPILOG)(table.table)
app.command()(toy.toy)
app.command(epilog=report.EPILOG)(report.report)


def main() -> None:
    """Run the command line: a user's mistake gives one or two lines on stderr and status 2, never a traceback."""
    # On shared cores, OpenMP threads that spin while waiting slow a run down by a factor of 20.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        if "" in sys.argv:
            before = sys.argv[sys.argv.index("") - 1]
            raise UserError(f"the argument after {before!r} is empty; is a variable of the shell not set?")
        app()
    except UserError as error:
        typer.echo(printable(f"nuclr: {error}"), err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("nuclr: interrupted", err=True)
        sys.exit(130)
    except train.Stopped as stopped:
        typer.echo(printable(f"nuclr: {stopped}"), err=True)
        sys.exit(stopped.status)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        typer.echo(f"nuclr: not enough memory: {first_line(error)}; a smaller model or batch needs less", err=True)
        sys.exit(1)
    except OSError as error:
        if error.errno is None:
            raise
        path = f"{error.filename}: " if error.filename else ""
        typer.echo(printable(f"nuclr: {path}{error.strerror}"), err=True)
        wrong_path = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)
        sys.exit(2 if wrong_path else 1)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"nuclr {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass
