"""`nuclr toy`: the paper's toy study."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nuclr.cli.report import write_final_report

if TYPE_CHECKING:
    from nuclr.studies.toy.study import ToyStudy

PRINTED = (
    ("risk", "error", "|empirical risk - true risk|"),
    ("risk", "error_term", "error term (1/n) sum_ij |1/q~_j - 1/q_j| exp((s_ij - 1)/tau)"),
    ("learning", "excess_risk", "excess true risk of the learned W in s = x^T W y"),
    ("learning", "zero_one", "excess zero-one loss of the learned W"),
    ("views", "error", "error of Z with m samples y of each x, one popularity per view or a shared one"),
)


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
    loss (uniform popularity) and of NUCLR (estimated popularity), the error term of the popularity, and the model that
    each loss learns.
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
    for tau in toy_study.TEMPERATURES:
        for part, quantity, title in PRINTED:
            typer.echo(f"\ntau = {tau}: {title}, mean over samples")
            _print_table(study, tau, part, quantity)
    typer.echo(f"\n{toy_study.SUMMARY} is in {out} ({study.seconds:.0f} s)")
    write_final_report(out)


def _print_table(
    study: "ToyStudy",
    tau: float,
    part: str,
    quantity: str,
) -> None:
    """Print one row per size and one column per method, with the fitted slopes below."""
    rows: dict[int, dict[str, float]] = {}
    for record in study.records:
        if (record.part, record.tau) == (part, tau) and quantity in record.mean:
            rows.setdefault(record.n, {})[record.method] = record.mean[quantity]
    methods = next(iter(rows.values()))
    typer.echo(f"{'n':>8}" + "".join(f"{method:>14}" for method in methods))
    for n, values in rows.items():
        typer.echo(f"{n:>8}" + "".join(f"{value:>14.5f}" for value in values.values()))
    cells = []
    for method in methods:
        slope = study.slope(part, tau, method, quantity)
        cells.append(f"{slope[0]:.2f} +- {slope[1]:.2f}" if slope else "-")
    typer.echo(f"{'slope':>8}" + "".join(f"{cell:>14}" for cell in cells))
