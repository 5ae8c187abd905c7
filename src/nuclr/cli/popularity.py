"""`nuclr popularity`: which samples are popular, of an embedding file or of a run's training pairs."""

import enum
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nuclr.cli import report
from nuclr.errors import UserError


class Weights(enum.StrEnum):
    """What is uniform: the pairs, or the x."""

    PAIRS = "pairs"
    X = "x"


class Align(enum.StrEnum):
    """How x gets into the space of y."""

    NONE = "none"
    RIDGE = "ridge"


class KeepSide(enum.StrEnum):
    """Whose popularity decides whether a pair is kept."""

    Y = "y"
    X = "x"
    BOTH = "both"


_NAMES, _KEEP, _SOLVER = "Names to join", "Keeping pairs in a band of popularity", "Solver"


def popularity(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|RUN",
            help="Embeddings (.npz or .safetensors with x, y and optionally y_to_x), or a trained run.",
        ),
    ],
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature tau; lower tells neighbors apart more sharply. Default: the run's."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the table, the summary and the histogram; what an earlier nuclr popularity wrote there is "
            "replaced. Default: RUN/popularity."
        ),
    ] = None,
    align: Annotated[
        Align, typer.Option(help="ridge: map x to y by a ridge regression on the pairs (for x, y of unequal width).")
    ] = Align.NONE,
    weights: Annotated[
        Weights, typer.Option(help="Where an x has several y: all pairs count the same, or all x do.")
    ] = Weights.PAIRS,
    captions: Annotated[
        Path | None,
        typer.Option(rich_help_panel=_NAMES, help="Captions of the y, in their order: .jsonl, .json or .txt."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_NAMES, help="Folder of the images that --captions names, or .txt with a name for each x."
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_KEEP, help="File for the numbers of the pairs in the band; replaces an earlier list."
        ),
    ] = None,
    min_popularity: Annotated[
        float | None, typer.Option(rich_help_panel=_KEEP, help="Band: lowest popularity; the mean is 1.")
    ] = None,
    max_popularity: Annotated[
        float | None, typer.Option(rich_help_panel=_KEEP, help="Band: highest popularity.")
    ] = None,
    min_quantile: Annotated[
        float | None, typer.Option(rich_help_panel=_KEEP, help="Band: 0.05 drops the least popular 5 %.")
    ] = None,
    max_quantile: Annotated[
        float | None, typer.Option(rich_help_panel=_KEEP, help="Band: 0.95 drops the most popular 5 %.")
    ] = None,
    keep_side: Annotated[
        KeepSide, typer.Option(rich_help_panel=_KEEP, help="Whose popularity must lie in the band.")
    ] = KeepSide.Y,
    top: Annotated[int, typer.Option(min=1, help="How many of the most and least popular to show.")] = 10,
    tolerance: Annotated[
        float, typer.Option(rich_help_panel=_SOLVER, help="Residual at which the solver stops.")
    ] = 1e-4,
    max_iterations: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_SOLVER, help="Give up after so many passes.")
    ] = None,
    device: Annotated[
        str, typer.Option(rich_help_panel=_SOLVER, help="Where to compute: cpu, cuda, cuda:1, ...")
    ] = "cpu",
) -> None:
    """Tell which samples of an embedding file, or of a run's training pairs, are popular (generic) and which are rare.

    Popularity is that under these embeddings at this temperature. Solved for both sides: of the y with the x as
    anchors, and of the x with the y as anchors. Writes popularity.csv (and .parquet where pyarrow is installed),
    popularity.json and a histogram.
    """
    trained = file.is_dir()
    if temperature is None and not trained:
        raise UserError(f"--temperature is missing; {file} is no run, from which it would be known")
    if out is None and not trained:
        raise UserError("--out is missing: the folder for the table, the summary and the histogram")
    if temperature is not None and not (temperature > 0 and math.isfinite(temperature)):
        raise UserError(f"--temperature is {temperature:g}; needs a number above 0, such as 0.05")
    if not 0 < tolerance < 1:
        raise UserError(f"--tolerance is {tolerance:g}; needs a number between 0 and 1")
    limits = {
        "min_popularity": min_popularity,
        "max_popularity": max_popularity,
        "min_quantile": min_quantile,
        "max_quantile": max_quantile,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    if given and keep is None:
        raise UserError(f"--{next(iter(given)).replace('_', '-')} needs --keep FILE, where the kept pairs are written")
    if keep is not None and not given:
        raise UserError("--keep needs a band: --min-popularity, --max-popularity, --min-quantile or --max-quantile")

    from nuclr.studies.popularity import write as folder
    from nuclr.studies.popularity.keep import Band, check_target

    kept = None if keep is None else folder.Keep(keep, Band(**given), keep_side.value)
    numbers = run = None
    if trained:
        if captions is not None or images is not None:
            raise UserError("--captions and --images go with an embedding file; a run knows its own")
        from nuclr.studies.popularity import of_run

        run, out = file, file / "popularity" if out is None else out
        if keep is not None:
            check_target(keep, out)  # before the samples are encoded, which takes long
        found = of_run.prepare(file, out)
        file, captions, numbers = found.embeddings, found.captions, found.numbers
        temperature = found.temperature if temperature is None else temperature
    assert temperature is not None and out is not None
    options: dict[str, Any] = {"tolerance": tolerance, "progress": sys.stderr.isatty()}
    if max_iterations is not None:
        options["max_iterations"] = max_iterations
    content = folder.write(
        file,
        out,
        temperature,
        weights=weights.value,
        align=align.value,
        captions=captions,
        images=images,
        kept=kept,
        top=top,
        device=device,
        numbers=numbers,
        run=run,
        **options,
    )
    _print_popularity(content)
    typer.echo(f"\nTable, summary and histogram are in {out}")
    report.at_the_end(out)
    unfinished = [name for name, side in content["sides"].items() if not side["converged"]]
    for name in unfinished:
        residual = content["sides"][name]["residual"]
        typer.echo(
            f"nuclr: side {name} is not solved: residual {residual:.2g} is above {tolerance:g}; "
            "raise --max-iterations, --tolerance or --temperature",
            err=True,
        )
    if unfinished:
        raise typer.Exit(1)


def _print_popularity(content: dict[str, Any]) -> None:
    if content["align"]["method"] == "ridge":
        explained = content["align"]["explained_variance"]
        typer.echo(f"x was mapped to y by a ridge regression, each x left out in turn (explains {explained:.0%} of y)")
    if content["x_without_y"]:
        typer.echo(f"{content['x_without_y']} x have no y and are left out")
    for name, side in content["sides"].items():
        other = "x" if name == "y" else "y"
        typer.echo(
            f"\n{name}: {side['candidates']:,} candidates, {side['anchors']:,} anchors {other}, residual "
            f"{side['residual']:.1g} after {side['iterations']} passes, {side['seconds']:.1f} s; "
            f"effectively {side['effective_number']:,.0f}"
        )
        for key, title in (("most_popular", "most popular"), ("least_popular", "least popular")):
            typer.echo(f"  {title}")
            for sample in side[key]:
                copies = f"  ({sample['copies']} copies)" if sample["copies"] > 1 else ""
                keys = ("caption",) if name == "y" and "caption" in sample else ("image", "caption")
                label = "  ".join(sample[key] for key in keys if key in sample)
                typer.echo(f"  {sample['popularity']:>10.3g}  {name}[{sample['number']}]  {label}{copies}".rstrip())
    if "keep" in content:
        kept = content["keep"]
        typer.echo(f"\n{kept['pairs']:,} of {kept['of']:,} pairs kept: {kept['file']}")
