"""`nuclr compare`: several methods on the same data and budget, tuned alike, with honest statistics."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nuclr.cli.report import at_the_end
from nuclr.errors import UserError

EPILOG = """
Examples:

    nuclr compare methods=sogclr,nuclr seeds=2 --out runs/small                    the built-in demo pairs
    nuclr compare CONFIG methods=clip,sogclr,nuclr seeds=5 --halves --out runs/c   any config, any KEY=VALUE of it
    nuclr compare CONFIG methods=sogclr,nuclr seeds=5 --tune gamma --out runs/g    gamma 0.3 and 0.8 for both
"""
_TUNING, _STUDIES = "Tuning", "Other studies, with the settings that tuning chose"


def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [methods=A,B,...] [seeds=N] [KEY=VALUE]...",
            help="A YAML file; which methods and how many seeds; then settings to change for all.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs, tables and figures.")] = Path("runs/compare"),
    test: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH",
            help="Pairs or an embedding file (retrieval), labeled images or .npz with x, labels, prompts "
            "(classification), never used for tuning; may be given several times.",
        ),
    ] = None,
    halves: Annotated[
        bool,
        typer.Option(
            "--halves", help="Split data.val by images: tune on one half, report on the other, and the reverse."
        ),
    ] = False,
    baseline: Annotated[
        str | None, typer.Option(help="Method that differences are taken to. Default: clip, or the first.")
    ] = None,
    temperatures: Annotated[
        str, typer.Option(rich_help_panel=_TUNING, help="Values that every method is tuned over.")
    ] = "0.01,0.03,0.05,0.07",
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[METHOD.]KEY=V1,V2",
            rich_help_panel=_TUNING,
            help="Second knob in the place of a method's own: an option of the objective, or lr_factor. 'gamma' alone "
            "is gamma=0.3,0.8.",
        ),
    ] = None,
    ablations: Annotated[
        bool,
        typer.Option(
            "--ablations",
            rich_help_panel=_STUDIES,
            help="NUCLR with one part changed: zeta fixed, no xi, no freezing, zeta_init, estimators, gamma.",
        ),
    ] = False,
    batch_sizes: Annotated[
        str | None,
        typer.Option(metavar="B1,B2,...", rich_help_panel=_STUDIES, help="All methods at these batch sizes."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at once. Default: one a core; one where there is a GPU.")
    ] = None,
) -> None:
    """Train methods with several seeds on the same data, tune each over a grid of the same size, and compare.

    Every run is a folder below OUT/cells. Stop the command at any moment and give it again: it goes on, and nothing
    that was finished is done again. Writes compare.json, table.md, table.csv and figures.
    """
    given = list(arguments or [])
    path = Path(given.pop(0)) if given and "=" not in given[0] else None
    options = {key: _take(given, key) for key in ("methods", "seeds")}
    base = _base(path, given)

    from nuclr.studies.compare import measure as sets
    from nuclr.studies.compare import plan, studies, study
    from nuclr.studies.compare import results as folder
    from nuclr.studies.compare.pool import Stop

    if ablations and batch_sizes is not None:
        raise UserError("--ablations and --batch-sizes are two studies; give one, and then the other in the same --out")
    methods = plan.parse_methods(options["methods"] or ("sogclr,nuclr" if ablations else ",".join(plan.KNOBS)))
    seeds = plan.parse_seeds(options["seeds"] or "5")
    values = plan.parse_temperatures(temperatures)
    base = _fair(base, given)
    knobs = plan.knobs(methods, tune or [])
    _check_overrides(given, methods, knobs)
    tests = [sets.parse_test(text, base.data) for text in test or []]
    if len({one.name for one in tests}) < len(tests):
        raise UserError("--test: two sets have the same name; give them others with --test NAME=PATH")
    data, pairs = _check_data(base, halves)
    wanted = _baseline(baseline, methods)
    rows = studies.method_rows(methods, values, knobs, base.seed, wanted)
    kind = "methods"
    if ablations:
        kind, rows, wanted = "ablations", studies.ablation_rows(rows, base), "nuclr"
    elif batch_sizes is not None:
        kind, rows = "batch_sizes", studies.batch_rows(rows, studies.parse_sizes(batch_sizes, pairs))
    _check_models(rows, base)
    request = study.Request(
        base,
        rows,
        tuple(base.seed + seed for seed in seeds),
        tuple(values),
        knobs,
        tuple(tests),
        halves,
        wanted,
        kind,
        data,
    )
    with folder.opened(out, request):
        started = study.Study(request, out)
        count = workers or _workers(base.device)
        try:
            started.run(count)
            started.examine(count)
        except Stop as stop:
            typer.echo(f"nuclr: {stop}; the same command goes on", err=True)
            sys.exit(stop.status)
        content = folder.summarize(started, shlex.join(["nuclr", *sys.argv[1:]]))
        folder.write(out, request.kind, content)
        typer.echo(folder.tables.terminal(content))
        typer.echo(f"Tables, figures and runs are in {out}")
        at_the_end(out)
    for name, error in started.failed.items():
        typer.echo(f"nuclr: {name} failed: {error}", err=True)
    if started.failed or content["missing"]:
        typer.echo(f"nuclr: {len(started.failed)} runs failed; the same command tries them again", err=True)
        raise typer.Exit(1)


def _take(given: list[str], key: str) -> str | None:
    """The value of key=..., removed from the list; the last one counts."""
    found = [text for text in given if text.partition("=")[0] == key]
    for text in found:
        given.remove(text)
    return found[-1].partition("=")[2] if found else None


def _base(path: Path | None, given: list[str]) -> Any:
    """Settings of all cells; unlike in `config.load`, an option may be that of any method."""
    from nuclr.runs import config
    from nuclr.runs.settings import Settings

    values, source = (config.DEMO, "the demo") if path is None else (config.read(path), str(path))
    settings = config.fill(Settings(), values, source)
    for key, value in map(config.split_override, given):
        settings = config.fill(settings, config.nest(key, value), f"{key}={value}")
    config.check(settings)
    return settings


def _fair(base: Any, given: list[str]) -> Any:
    """No clipping: CLIP's gradients are about 1/(2 tau) times SogCLR's, so no limit is the same for both."""
    import dataclasses

    if base.optimizer.clip == 0:
        return base
    if any(text.startswith("optimizer.clip=") for text in given):
        raise UserError(
            "optimizer.clip: an absolute limit is unfair, as CLIP's gradients are about 1/(2 tau) times SogCLR's; "
            "leave it out"
        )
    typer.echo(f"nuclr: optimizer.clip={base.optimizer.clip:g} of the config is left out, to be fair to all", err=True)
    return dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, clip=0.0))


def _check_overrides(given: list[str], methods: list[str], knobs: dict[str, Any]) -> None:
    from nuclr.runs.settings import objective_keys

    for text in given:
        key = text.partition("=")[0]
        section, _, name = key.partition(".")
        if key == "objective.name":
            raise UserError("objective.name: say which methods to compare with methods=A,B,...")
        if key == "objective.temperature":
            raise UserError("objective.temperature is tuned; give the values to try with --temperatures")
        if key == "out":
            raise UserError("out=...: name the folder with --out")
        if section == "objective" and not any(name in objective_keys(method) for method in methods):
            raise UserError(f"{key}: none of {', '.join(methods)} has such an option")
        for method, knob in knobs.items():
            if knob.key == key:
                raise UserError(
                    f"{key} is tuned for {method}; give the values to try with --tune {method}.{name}=V1,V2"
                )


def _check_data(base: Any, halves: bool) -> tuple[tuple[str, str], int]:
    """Open what all cells read, so that a wrong path is found before anything is trained.

    Returns the fingerprints of the pairs to train and to tune on, and the number of the former.
    """
    from nuclr.runs import components as parts

    data = base.data
    if data.val is None:
        raise UserError("data.val is missing: settings are chosen on held-out pairs; name them with data.val=...")
    source = parts.open_source(data, data.train, data.split, data.keep, check=False)
    held_out = parts.open_source(data, data.val, data.val_split or data.split, check=False)
    images = len(set(held_out.pairs.x_id[held_out.numbers].tolist()))
    if halves and images < 4:
        raise UserError(f"--halves: data.val has only {images} images")
    return (source.pairs.fingerprint, held_out.pairs.fingerprint), len(source.numbers)


def _check_models(rows: Any, base: Any) -> None:
    """Build the model and every objective once: what no single setting shows."""
    from nuclr.runs import components as parts
    from nuclr.runs.launch import pick_device
    from nuclr.training import loop

    first = next(row for row in rows if row.grid).grid[0]
    loop.build(first.settings(base), pick_device(base.device))
    for row in rows:
        for cell in row.grid:
            parts.make_objective(cell.settings(base).objective, 2)


def _baseline(wanted: str | None, methods: list[str]) -> str:
    if wanted is not None and wanted not in methods:
        raise UserError(f"--baseline {wanted}: not among the methods {', '.join(methods)}")
    return wanted or ("clip" if "clip" in methods else methods[0])


def _workers(device: str) -> int:
    """One a core; a GPU is not shared."""
    from nuclr.runs.launch import pick_device

    if pick_device(device).type != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
