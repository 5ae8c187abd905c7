"""`nuclr toy`: the paper's toy study."""

from pathlib import Path
from typing import Annotated

import typer

from nuclr.cli.report import write_final_report


def toy(
    out: Annotated[Path, typer.Option(help="Folder for toy.json and the figures.")],
    seeds: Annotated[int, typer.Option(min=2, help="Samples at the largest n; smaller n get up to 5x as many.")] = 40,
    max_n: Annotated[int, typer.Option(min=100, max=3200, help="Largest number of pairs; less is quicker.")] = 3200,
    seed: Annotated[int, typer.Option(min=0, help="First seed of the random numbers.")] = 0,
) -> None:
    """Reproduce the paper's toy study: the error of a uniform popularity and of the estimated one.

    Everything is known exactly in this study: anchors x on a half disc, y on the unit square, p(y|x) proportional to
    exp(x.y/tau). Writes the generalization error of maximum likelihood, of the global contrastive loss (uniform
    popularity) and of NUCLR (estimated popularity), and six figures as PNG and SVG.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from nuclr.studies.toy import study

    sizes = tuple(n for n in study.SIZES if n <= max_n)
    columns = (TextColumn("toy study"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("toy", total=study.total_work(seeds, sizes))
        content = study.write_study(out, seeds, sizes, seed, lambda done: bar.advance(task, done))
    for tau in study.TEMPERATURES:
        typer.echo(f"\ntau = {tau}: |empirical risk - true risk|, mean of {seeds} or more samples")
        typer.echo(f"{'n':>8}" + "".join(f"{method:>12}" for method in study.METHODS))
        for n in sizes:
            errors = {r["method"]: r["error_mean"] for r in content["records"] if (r["tau"], r["n"]) == (tau, n)}
            typer.echo(f"{n:>8}" + "".join(f"{errors[method]:>12.4f}" for method in study.METHODS))
        records = [r for r in content["records"] if r["tau"] == tau and r["method"] == "nuclr"]
        correlations = ", ".join(f"{r['rank_correlation_mean']:.4f} (n = {r['n']})" for r in records)
        typer.echo(f"rank correlation of estimated and true popularity: {correlations}")
    typer.echo(f"\nFigures and {study.SUMMARY} are in {out} ({content['seconds']:.0f} s)")
    write_final_report(out)
