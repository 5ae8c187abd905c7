"""`nuclr popularity`: which samples of an embedding file or folder, or of a run's training pairs, are popular."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nuclr.cli.hubness import shorten
from nuclr.cli.report import write_final_report
from nuclr.errors import UserError

if TYPE_CHECKING:
    from nuclr.studies.items.popularity_report import PopularityReport

EPILOG = """
Examples:

    nuclr popularity pairs.npz --temperature 0.05 --names train.jsonl
    nuclr popularity laion/ --temperature 0.05                      a folder of clip-retrieval
    nuclr popularity images/ texts/ --temperature 0.05              folders of .npy or Parquet files
    nuclr popularity RUN                                            at the run's temperature
"""


def popularity(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|FOLDER|RUN",
            help="Embeddings (.npz or .safetensors with x, y and optionally y_to_x; rows are scaled to unit norm), "
            "their URL, a folder of embeddings of clip-retrieval, or a trained run. With Y, the vectors of the x: also "
            ".npy, Parquet (FILE:COLUMN) and folders of them.",
        ),
    ],
    y: Annotated[
        str | None,
        typer.Argument(help="Vectors of the y, if the first argument holds only the x: row j of both is pair j."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature tau; a lower one distinguishes neighbors more sharply. Default: the run's."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the page, the table and the summary; files of an earlier nuclr popularity are replaced. "
            "Default: popularity, or RUN/popularity."
        ),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(
            help="Names of the y: .txt with one per line, FILE:COLUMN of Parquet or CSV, or the list of pairs that the "
            "embeddings were made from, which names the x too."
        ),
    ] = None,
    x_names: Annotated[str | None, typer.Option(help="Names of the x, in the same forms.")] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of pictures that names are the file names of, for the page."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the most and least popular to show.")] = 10,
) -> None:
    """Report which samples of an embedding file or folder, or of a run's training pairs, are popular or rare.

    The popularity of an item is how many queries would pick it, under these embeddings at this temperature. It is
    solved for both sides: of the y with the x as anchors, and of the x with the y as anchors. Writes report.html,
    popularity.csv with all samples, and popularity.json.
    """
    from nuclr.files import is_run
    from nuclr.studies.items.popularity_report import popularity_report

    if temperature is not None and not (temperature > 0 and math.isfinite(temperature)):
        raise UserError(f"--temperature is {temperature:g}; it needs a number above 0, such as 0.05")
    if images is not None and not images.is_dir():
        raise UserError(f"--images {images}: no such folder")
    if out is None:
        out = Path(file) / "popularity" if is_run(file) else Path("popularity")
    report = popularity_report(
        file,
        y,
        temperature=temperature,
        names=names,
        x_names=x_names,
        images=images,
        top=top,
        progress=sys.stderr.isatty(),
        out=out,
    )
    has_page = write_final_report(out, announce=False)
    _print(report)
    typer.echo(f"\n{f'Report page: {out}/report.html; all' if has_page else 'All'} samples are in {out}/popularity.csv")
    for name, side in report.sides.items():
        if side.error is not None:
            typer.echo(f"Side {name} is estimated from a sample; the error of log popularity is about {side.error:.2g}")
        elif not side.converged:
            typer.echo(
                f"nuclr: side {name} did not converge: residual {side.residual:.2g}; raise --temperature", err=True
            )
    if not report.converged:
        raise typer.Exit(1)


def _print(report: "PopularityReport") -> None:
    for name, side in report.sides.items():
        typer.echo(
            f"\n{side.words}: {side.origin.rows:,} candidates, {side.anchors:,} anchors, residual {side.residual:.1g} "
            f"after {side.iterations} passes; effectively {side.effective_number:,.0f}"
        )
        if side.agreement is not None:
            typer.echo(
                f"  rank correlation {side.agreement:.2f} with N_10 of held-out anchors: solved with half of the "
                "anchors, compared with what the other half finds"
            )
        for title, samples in (("most popular", side.most_popular), ("least popular", side.least_popular)):
            typer.echo(f"  {title}")
            for sample in samples:
                copies = f"  ({sample.copies} copies)" if sample.copies > 1 else ""
                number = sample.row if sample.number is None else sample.number
                label = "" if sample.name is None else f"  {shorten(sample.name)}"
                typer.echo(f"  {sample.popularity:>10.3g}  {name}[{number}]{label}{copies}")
