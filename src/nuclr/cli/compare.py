"""`nuclr compare`: train several methods on the same data with the same budget, tune them alike, and compare them."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nuclr.cli.arguments import split_config
from nuclr.cli.report import write_final_report
from nuclr.errors import UserError, printable

EPILOG = """
Examples:

    nuclr compare methods=sogclr,nuclr seeds=2 --out runs/small                    the built-in demo pairs
    nuclr compare CONFIG methods=clip,sogclr,nuclr seeds=5 --halves --out runs/c   any config with any KEY=VALUE
    nuclr compare CONFIG methods=sogclr,nuclr seeds=5 --tune gamma --out runs/g    tune gamma (0.3, 0.8) for both
"""
COMPARED = ("methods", "seeds")  # arguments NAME=VALUE that are not settings
_TUNING, _STUDIES = "Tuning", "Other studies, with the tuned settings"


def compare(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [methods=A,B,...] [seeds=N] [KEY=VALUE]...",
            help="A YAML config file (default: the demo), the methods to compare, the number of seeds (default: 5), "
            "and settings to change for all runs.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs, tables and figures.")] = Path("runs/compare"),
    test: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH",
            help="A test set, never used for tuning: pairs or an embedding file (retrieval), labeled images or .npz "
            "with x, labels, prompts (classification), or NAME:FOLDER as in nuclr evaluate. May be repeated.",
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FILE",
            help="Prompts for the labeled images of --test, instead of our own, as in nuclr evaluate; NAME= for one of "
            "several sets.",
        ),
    ] = None,
    halves: Annotated[
        bool,
        typer.Option(
            "--halves", help="Split data.val in two: tune on one half and report on the other, and the reverse."
        ),
    ] = False,
    baseline: Annotated[
        str | None, typer.Option(help="Method that the others are compared with. Default: clip, or the first method.")
    ] = None,
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
            "factor on optimizer.lr). 'gamma' alone means gamma=0.3,0.8. METHOD.temperature=V1,V2 are the temperatures "
            "of one method.",
        ),
    ] = None,
    ablations: Annotated[
        bool,
        typer.Option(
            "--ablations",
            rich_help_panel=_STUDIES,
            help="Ablations of the methods that have some. NUCLR: zeta fixed, no xi, no freezing, zeta_init, xi_rule, "
            "estimators, gamma.",
        ),
    ] = False,
    batch_sizes: Annotated[
        str | None,
        typer.Option(metavar="B1,B2,...", rich_help_panel=_STUDIES, help="Train all methods at these batch sizes."),
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
    runs are not repeated. Writes compare.json, table.md, table.csv and figures.
    """
    from nuclr.runs import config

    path, overrides = split_config(arguments, context, COMPARED)
    options = {key: _pop(overrides, key) for key in COMPARED}
    base = config.load(path, overrides, strict=False)

    from nuclr.objectives import entry, names
    from nuclr.studies.compare import comparison_folder, measure, plan
    from nuclr.studies.compare.pool import Stop
    from nuclr.studies.compare.study import Request, Study

    if ablations and batch_sizes is not None:
        raise UserError("--ablations and --batch-sizes are two studies; run one, then the other with the same --out")
    methods = plan.parse_methods(options["methods"] or ",".join(plan.ablated() if ablations else names()))
    seeds = plan.parse_seeds(options["seeds"] or "5")
    values = plan.parse_temperatures(temperatures)
    base = _without_clipping(base, overrides)
    tuned = plan.own_hyperparameters(methods, tune or [], base)
    grids = plan.temperature_grids(methods, values, tune or [])
    _check_overrides(overrides, methods, tuned)
    tests = measure.parse_tests(test or [], prompts or [], base.data)
    data, pairs, sides = _check_data(base, halves)
    reference = _baseline(baseline, methods)
    rows = plan.method_rows(methods, grids, tuned, base.seed, reference)
    kind = "methods"
    if ablations:
        kind, rows = "ablations", plan.ablation_rows(rows, base)
        reference = next(method for method in methods if entry(method).ablations)
    elif batch_sizes is not None:
        kind, rows = "batch_sizes", plan.batch_rows(rows, plan.parse_sizes(batch_sizes, pairs))
    _check_models(rows, base)
    request = Request(
        base=base,
        rows=rows,
        seeds=tuple(base.seed + seed for seed in seeds),
        temperatures=grids,
        tuned=tuned,
        tests=tuple(tests),
        halves=halves,
        baseline=reference,
        kind=kind,
        data=data,
        sides=sides,
    )
    if dry_run:
        typer.echo(request.describe(listed=True))
        typer.echo("The time of one run: nuclr train with the same CONFIG and settings, and --dry-run")
        return
    with comparison_folder.opened(out, request):
        study = Study(request, out)
        count = workers or _workers(base.device)
        try:
            study.run(count)
            study.examine(count)
        except Stop as stop:
            typer.echo(f"nuclr: {stop}; run the same command again to resume", err=True)
            sys.exit(stop.status)
        content = comparison_folder.summarize(study, shlex.join(["nuclr", *sys.argv[1:]]))
        comparison_folder.write(out, request.kind, content)
        typer.echo(comparison_folder.tables.terminal(content))
        typer.echo(f"Tables, figures and runs are in {out}")
        write_final_report(out)
    for name, error in study.failed.items():
        typer.echo(printable(f"nuclr: {name} failed: {error}"), err=True)
    if study.failed or content["missing"]:
        typer.echo(f"nuclr: {len(study.failed)} runs failed; run the same command again to retry them", err=True)
        raise typer.Exit(1)


def _pop(overrides: list[str], key: str) -> str | None:
    """Remove every "key=..." from the list and return the last value."""
    matches = [text for text in overrides if text.partition("=")[0] == key]
    for text in matches:
        overrides.remove(text)
    return matches[-1].partition("=")[2] if matches else None


def _without_clipping(base: Any, overrides: list[str]) -> Any:
    """Switch clipping off: CLIP's gradients are about 1/(2 tau) times SogCLR's, so no limit treats both alike."""
    import dataclasses

    if base.optimizer.clip == 0:
        return base
    if any(text.startswith("optimizer.clip=") for text in overrides):
        raise UserError(
            "optimizer.clip: an absolute limit is unfair, because CLIP's gradients are about 1/(2 tau) times SogCLR's; "
            "remove it"
        )
    typer.echo(
        f"nuclr: optimizer.clip={base.optimizer.clip:g} of the config is ignored, to be fair to all methods", err=True
    )
    return dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, clip=0.0))


def _check_overrides(overrides: list[str], methods: list[str], tuned: dict[str, Any]) -> None:
    from nuclr.objectives import options

    for text in overrides:
        key = text.partition("=")[0]
        section, _, name = key.partition(".")
        if key == "objective.name":
            raise UserError("objective.name: name the methods to compare with methods=A,B,...")
        if key == "objective.temperature":
            raise UserError("objective.temperature is tuned; give the values to try with --temperatures")
        if key == "out":
            raise UserError("out=...: name the folder with --out")
        if section == "objective" and not any(name in options(method) for method in methods):
            raise UserError(f"{key}: none of {', '.join(methods)} has an option {name!r}")
        for method, hyperparameter in tuned.items():
            if hyperparameter.key == key and not hyperparameter.relative:
                raise UserError(
                    f"{key} is tuned for {method}; give the values to try with --tune {method}.{name}=V1,V2"
                )


def _check_data(base: Any, halves: bool) -> tuple[tuple[str, str], int, Any]:
    """Open the data of all cells, so a wrong path is reported before anything is trained.

    Returns the fingerprints of the training and held-out pairs, the number of training pairs, and the sides' words.
    """
    from nuclr.runs import components
    from nuclr.runs.side_words import words_of_pairs
    from nuclr.studies.compare.measure import SMALLEST
    from nuclr.studies.compare.study import ComparedSides

    data = base.data
    if data.contrasts_views:
        if data.classes is None:
            raise UserError(
                "data.classes is missing; models of data.contrast=views are tuned on labeled images; name a folder"
            )
        source = components.open_train(data, check=False)
        labeled = components.open_classes(data, source.pairs)
        words = ComparedSides(*words_of_pairs(source.pairs))
        return (source.pairs.fingerprint, labeled.fingerprint), len(source.numbers), words
    if data.val is None:
        raise UserError("data.val is missing; tuning needs held-out pairs: name them with data.val=...")
    source = components.open_train(data, check=False)
    held_out = components.open_val(data, check=False)
    assert held_out is not None
    if overlap := components.describe_overlap(source, held_out, data.val_key(next(iter(data.val_sets)))):
        typer.echo(printable(f"nuclr: {overlap}"), err=True)
    pairs = held_out.pairs
    sides = ComparedSides(*words_of_pairs(source.pairs), pairs.group is not None)
    clusters = len(set((pairs.x_id if pairs.group is None else pairs.group)[held_out.numbers].tolist()))
    if halves and clusters < SMALLEST:
        raise UserError(
            f"--halves needs at least {SMALLEST} {sides.clusters} in data.val; {data.describe_val()} has {clusters}"
        )
    return (source.pairs.fingerprint, pairs.fingerprint), len(source.numbers), sides


def _check_models(rows: Any, base: Any) -> None:
    """Build the model and every objective once, to find settings that do not fit together."""
    from nuclr.runs import components
    from nuclr.runs.launch import pick_device
    from nuclr.training.validation import build_parts

    first = next(row for row in rows if row.grid).grid[0]
    build_parts(first.settings(base), pick_device(base.device))
    for row in rows:
        for cell in row.grid:
            components.make_objective(cell.settings(base).objective, 2)


def _baseline(named: str | None, methods: list[str]) -> str:
    from nuclr.studies.compare.plan import BASELINE

    if named is not None and named not in methods:
        raise UserError(f"--baseline {named}: not among the methods {', '.join(methods)}")
    return named or (BASELINE if BASELINE in methods else methods[0])


def _workers(device: str) -> int:
    """Return the default number of workers: one per CPU core, or one on a GPU."""
    from nuclr.runs.launch import cpu_cores, pick_device

    return cpu_cores() if pick_device(device).type == "cpu" else 1
