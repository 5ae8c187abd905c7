"""`nuclr compare`: train several methods on the same data with the same budget, tune them alike, and compare them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nuclr.cli.arguments import split_config
from nuclr.cli.report import write_final_report
from nuclr.cli.train import training_errors
from nuclr.errors import printable

if TYPE_CHECKING:
    from nuclr.studies.engine.results import Comparison

EPILOG = """
Examples:

    nuclr compare methods=sogclr,nuclr seeds=2 --out runs/small                    the built-in demo pairs
    nuclr compare CONFIG methods=clip,sogclr,nuclr seeds=5 --halves --out runs/c   any config with any KEY=VALUE
    nuclr compare CONFIG methods=sogclr,nuclr seeds=5 --tune gamma=0.3,0.8         tune gamma for both
"""
RESUME = "run the same command again to resume"
COMPARED = ("methods", "seeds")  # arguments NAME=VALUE that are not settings
_TUNING = "Tuning"
_STUDIES = "Other studies, with the tuned settings"


def compare(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [methods=A,B,...] [seeds=N] [KEY=VALUE]...",
            help="A YAML config file (default: the demo), the methods to compare (the first is the baseline), the "
            "number of seeds (default: 5), and settings to change for all runs.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the results.")] = Path("runs/compare"),
    test: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH",
            help="A test set, never used for tuning: pairs or an embedding file (retrieval), labeled images or .npz "
            "with x, labels, prompts (classification), or NAME:FOLDER as in nuclr evaluate. May be repeated.",
        ),
    ] = None,
    halves: Annotated[
        bool,
        typer.Option(
            "--halves", help="Split data.val in two: tune on one half and report on the other, and the reverse."
        ),
    ] = False,
    temperatures: Annotated[
        str,
        typer.Option(
            rich_help_panel=_TUNING,
            help="Temperatures that the methods are tuned over, except SigLIP: its own are inverse initial scales.",
        ),
    ] = "0.01,0.03,0.05,0.07",
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[METHOD.]KEY=V1,V2",
            rich_help_panel=_TUNING,
            help="Tune this instead of the method's own hyperparameter: an option of the objective, or lr_factor (a "
            "factor on optimizer.lr). METHOD.temperature=V1,V2 are the temperatures of one method.",
        ),
    ] = None,
    ablations: Annotated[
        bool,
        typer.Option(
            "--ablations",
            rich_help_panel=_STUDIES,
            help="Ablations of the methods that have some.",
        ),
    ] = False,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="B1,B2,...",
            rich_help_panel=_STUDIES,
            help="Train all methods at these batch sizes.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of runs at the same time. Default: one per CPU core, or one on a GPU."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, list the settings and the number of runs, and stop.")
    ] = False,
) -> None:
    """Train several methods with several seeds on the same data, tune each over a grid of the same size, and compare.

    Every run is a folder in OUT/cells. The command can be stopped at any moment; run it again to resume, and finished
    runs are not repeated. Writes compare.json, compare.md, compare.tex and the page report.html.
    """
    path, overrides = split_config(arguments, context, COMPARED)
    methods = _pop(overrides, "methods")
    seeds = _pop(overrides, "seeds") or "5"

    from nuclr.studies import compare as study

    plan = study.plan_comparison(
        path,
        overrides,
        methods=[name.strip() for name in methods.split(",")] if methods else (),
        seeds=int(seeds) if seeds.isdecimal() else 0,
        tests=test or (),
        halves=halves,
        temperatures=study.numbers(temperatures, "--temperatures"),
        tune=tune or (),
        ablations=ablations,
        batch_sizes=[int(size) for size in study.numbers(batch_sizes, "--batch-sizes")] if batch_sizes else (),
        say=say,
    )
    if dry_run:
        typer.echo("\n".join([plan.describe(), *study.protocol(plan)]))
        typer.echo("The time of one run: nuclr train with the same CONFIG and settings, and --dry-run")
        return
    with training_errors(RESUME):
        comparison = study.run_comparison(plan, out, workers, say)
    show_results(comparison, out)


def _pop(overrides: list[str], key: str) -> str | None:
    """Remove every "key=..." from the list and return the last value."""
    matches = [text for text in overrides if text.partition("=")[0] == key]
    for text in matches:
        overrides.remove(text)
    return matches[-1].partition("=")[2] if matches else None


def say(text: str) -> None:
    """Print a line about the progress of a study."""
    typer.echo(printable(f"nuclr: {text}"), err=True)


def show_results(comparison: "Comparison", out: Path) -> None:
    """Print the tables of a study and write its page; exit with status 1 if runs failed."""
    from nuclr.studies.engine import tables

    typer.echo(printable(tables.terminal(comparison)))
    typer.echo(f"Tables and runs are in {out}")
    write_final_report(out)
    for name, error in comparison.failed.items():
        say(f"{name} failed: {error}")
    if comparison.failed:
        say(f"{len(comparison.failed)} runs failed; run the same command again to retry them")
        raise typer.Exit(1)
    if comparison.missing:
        say(f"{len(comparison.missing)} runs are not done, such as {comparison.missing[0]}")
