"""The command line. Heavy imports happen inside the commands, so that --help answers at once."""

import enum
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nuclr import __version__
from nuclr.errors import UserError

app = typer.Typer(
    name="nuclr",
    help="Contrastive learning on paired data that works at small batch sizes, and tells which data is popular.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point: a user's mistake is one or two lines on stderr and status 2, never a traceback."""
    try:
        app()
    except UserError as error:
        typer.echo(f"nuclr: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("nuclr: interrupted", err=True)
        sys.exit(130)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nuclr {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def toy(
    out: Annotated[Path, typer.Option(help="Folder for toy.json and the figures.")],
    seeds: Annotated[int, typer.Option(min=2, help="Samples at the largest n; smaller n get up to 5x as many.")] = 40,
    max_n: Annotated[int, typer.Option(min=100, max=3200, help="Largest number of pairs; less is quicker.")] = 3200,
    seed: Annotated[int, typer.Option(min=0, help="Start of the random numbers.")] = 0,
) -> None:
    """Reproduce the paper's toy study: how wrong is a uniform popularity, and how right the estimated one.

    Everything is known exactly here: anchors x on a half disc, y on the unit square, p(y|x) proportional to
    exp(x.y/tau). Writes the generalisation error of maximum likelihood, of the global contrastive loss (uniform
    popularity) and of NUCLR (estimated popularity), and six figures, as PNG and SVG.
    """
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from nuclr.experiments.toy import folder, study

    sizes = tuple(n for n in study.SIZES if n <= max_n)
    columns = (TextColumn("toy study"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_progress_console()) as bar:
        task = bar.add_task("toy", total=study.work(seeds, sizes))
        content = folder.write(out, seeds, sizes, seed, lambda done: bar.advance(task, done))
    for tau in study.TEMPERATURES:
        typer.echo(f"\ntau = {tau}: |empirical risk - true risk|, mean of {seeds} or more samples")
        typer.echo(f"{'n':>8}" + "".join(f"{method:>12}" for method in study.METHODS))
        for n in sizes:
            here = {r["method"]: r["error_mean"] for r in content["records"] if (r["tau"], r["n"]) == (tau, n)}
            typer.echo(f"{n:>8}" + "".join(f"{here[method]:>12.4f}" for method in study.METHODS))
        found = [r for r in content["records"] if r["tau"] == tau and r["method"] == "nuclr"]
        correlations = ", ".join(f"{r['rank_correlation_mean']:.4f} (n = {r['n']})" for r in found)
        typer.echo(f"rank correlation of estimated and true popularity: {correlations}")
    typer.echo(f"\nFigures and {folder.SUMMARY} are in {out} ({content['seconds']:.0f} s)")


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


@app.command()
def popularity(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Embeddings: .npz or .safetensors with x, y and optionally y_to_x.")
    ],
    temperature: Annotated[float, typer.Option(help="Temperature tau; lower tells neighbours apart more sharply.")],
    out: Annotated[Path, typer.Option(help="Folder for the table, the summary and the histogram.")],
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
        Path | None, typer.Option(rich_help_panel=_KEEP, help="File for the numbers of the pairs in the band.")
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
    """Tell which samples of an embedding file are popular (generic) and which are rare.

    Popularity is that under the file's embeddings at this temperature. Solved for both sides: of the y with the x as
    anchors, and of the x with the y as anchors. Writes popularity.csv (and .parquet where pyarrow is installed),
    popularity.json and a histogram.
    """
    if not (temperature > 0 and math.isfinite(temperature)):
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

    from nuclr.experiments.popularity import folder
    from nuclr.experiments.popularity.keep import Band

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
        kept=folder.Keep(keep, Band(**given), keep_side.value) if keep is not None else None,
        top=top,
        device=device,
        **options,
    )
    _print_popularity(content)
    typer.echo(f"\nTable, summary and histogram are in {out}")
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


def _progress_console() -> Any:
    from rich.console import Console

    return Console(stderr=True)
