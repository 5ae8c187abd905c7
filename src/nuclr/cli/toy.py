"""`nuclr toy`: the paper's toy study."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from nuclr.cli.report import write_final_report


def toy(
    out: Annotated[Path, typer.Option(help="Folder for toy.json and the page.")],
    seeds: Annotated[
        int,
        typer.Option(
            min=2,
            help="Samples at the largest n; smaller n get up to 5x as many.",
        ),
    ] = 40,
    max_n: Annotated[
        int,
        typer.Option(
            min=100,
            max=3200,
            help="Largest number of pairs; less is quicker.",
        ),
    ] = 3200,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="First seed of the random numbers.",
        ),
    ] = 0,
) -> None:
    """Reproduce the paper's toy study: the error of a uniform popularity and of the estimated one.

    Everything is known exactly in this study: anchors x on a half disc, y on the unit square, p(y|x) proportional to
    exp(x.y/tau). Writes toy.json and a page: the generalization error of maximum likelihood, of the global contrastive
    loss (uniform popularity) and of NUCLR (estimated popularity), the error term of the popularity, the model that
    each loss learns, and the error with several views of each sample.
    """
    from nuclr import files
    from nuclr.studies.toy import study as toy_study

    files.check_folder(
        out,
        toy_study.COMMAND,
        toy_study.SUMMARY,
        [toy_study.SUMMARY],
    )
    sizes = tuple(n for n in toy_study.SIZES if n <= max_n)
    work = sum(point.repeats * point.n**2 for point in toy_study.plan(seeds, sizes))
    with typer.progressbar(length=work, label="toy study", file=sys.stderr) as bar:
        study = toy_study.run_study(seeds, sizes, seed, bar.update)
    with files.publish_folder(out, toy_study.SUMMARY, toy_study.COMMAND) as new:
        files.write_json(new / toy_study.SUMMARY, study.to_json())
    typer.echo(f"{toy_study.SUMMARY} is in {out} ({study.seconds:.0f} s)")
    write_final_report(out)
