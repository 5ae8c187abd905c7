"""`nuclr report`, and the page that other commands leave at their end."""

from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
Examples:

    nuclr report runs/demo                            writes runs/demo/report.html
    nuclr report runs/demo --out page.html --no-pictures
"""


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder written by train, compare, popularity or toy.")],
    out: Annotated[Path | None, typer.Option(help="The page to write. Default: RUN/report.html.")] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=10,
            help="Training pairs, drawn at random, on which popularity is solved. Default: 3000, or "
            "fewer where the model is slow.",
        ),
    ] = None,
    gallery: Annotated[int, typer.Option(min=3, max=500, help="Samples of each side in the popularity gallery.")] = 30,
    pictures: Annotated[bool, typer.Option(help="Put small pictures into the page.")] = True,
    model: Annotated[
        bool, typer.Option(help="Encode samples with the trained model; without, the page has numbers and curves only.")
    ] = True,
) -> None:
    """Write one self-contained page about a run: what was learned, and which data is popular.

    It needs no server and no network. What is missing (no held-out pairs, no pictures, a run that was stopped) is said
    on the page.
    """
    from nuclr.report.training import Options
    from nuclr.report.write import write_report

    typer.echo(f"The page: {write_report(run, out, Options(samples, gallery, pictures, model))}")


def write_final_report(run: Path) -> None:
    """Write the page of a command that has just finished; a failure is reported and does not affect the results."""
    from nuclr.report.write import write_report

    try:
        typer.echo(f"The page: {write_report(run)}")
    except Exception as error:
        typer.echo(f"nuclr: no report page ({error}); try again with nuclr report {run}", err=True)
