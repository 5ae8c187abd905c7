"""`nuclr report`, and the page that other commands write when they end."""

from pathlib import Path
from typing import Annotated

import typer

from nuclr.errors import printable

EPILOG = """
Examples:

    nuclr report runs/demo                            writes runs/demo/report.html
    nuclr report runs/demo --out page.html --no-pictures
"""


def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A folder written by train, compare, table, popularity, hubness or toy.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The page to write. Default: RUN/report.html.")] = None,
    pictures: Annotated[bool, typer.Option(help="Put small pictures into the page.")] = True,
    model: Annotated[
        bool,
        typer.Option(help="Encode samples with the trained model. Without it, the page has only numbers and curves."),
    ] = True,
) -> None:
    """Write one self-contained HTML page about a run: what was learned, and which data is popular.

    It needs no server and no network. The run may be unfinished. The page lists what is missing, such as held-out pairs
    or pictures.
    """
    from nuclr.report import Options, write_report

    typer.echo(f"Report page: {write_report(run, out, Options(pictures, model))}")


def write_final_report(run: Path, announce: bool = True) -> bool:
    """Write the page of a command that has just ended. If that fails, print a message; the command has succeeded.

    Args:
        run: The folder of the command.
        announce: Print where the page is.

    Returns:
        Whether the page was written.

    """
    from nuclr.report import write_report

    try:
        page = write_report(run)
    except Exception as error:
        message = f"nuclr: the report page could not be written ({error}); try again with nuclr report {run}"
        typer.echo(printable(message), err=True)
        return False
    if announce:
        typer.echo(f"Report page: {page}")
    return True
