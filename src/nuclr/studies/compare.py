"""`nuclr compare`: several methods on the same data with the same budget, each tuned over a grid of the same size.

The grid of a method is the paper's temperatures, or its own if its temperature is another quantity (SigLIP), times the
values of one hyperparameter of its own. The registry of objectives has these values; those of an option whose scale
depends on the data (the step size of zeta) are factors on the config's own value. Ablations and batch sizes start from
the setting that tuning chose for the method and change one thing.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.pairs import Labeled, Pairs
from nuclr.data.selection import Source, describe_overlap
from nuclr.errors import UserError
from nuclr.evaluation.intervals import LEVEL, RESAMPLES
from nuclr.evaluation.metrics import Kind, recall_is_near_chance
from nuclr.objectives import entry, names
from nuclr.popularity.correction import BANK_SIZE
from nuclr.runs import config
from nuclr.runs import folder as run_folder
from nuclr.runs.launch import pick_device
from nuclr.runs.settings import Settings, content
from nuclr.studies.demo import SETTINGS
from nuclr.studies.engine.measure import HALVES, SMALLEST, VAL, MeasuredSet, open_test
from nuclr.studies.engine.plan import CELLS, HALVED, LR_FACTOR, Changes, Plan, Row, Study, change, make_run
from nuclr.studies.engine.results import (
    Block,
    Comparison,
    ResultRow,
    differences_of,
    make_comparison,
    registry_columns,
    result_row,
)
from nuclr.studies.engine.tables import settings_text, write_results
from nuclr.training.build import build_parts

TEMPERATURES = (0.01, 0.03, 0.05, 0.07)
OBJECTIVE = "objective."
TEMPERATURE = "objective.temperature"
TITLES = {"compare": "Methods", "ablations": "Ablations", "batch_sizes": "Batch sizes"}  # by the name of the plan
# Settings that the comparison itself sets.
OWNED = {
    "objective.name": "name the methods to compare with methods=A,B,...",
    TEMPERATURE: "it is tuned; give the values to try with --temperatures",
    "optimizer.clip": "a limit is unfair, because CLIP's gradients are about 1/(2 tau) times SogCLR's; remove it",
    "out": "name the folder with --out",
}
PROTOCOLS = {
    "ablations": "An ablation takes the setting that its method was tuned to and changes one thing; it is not tuned "
    "again.",
    "batch_sizes": "All batch sizes use the setting tuned at the config's batch size, the same learning rate and the "
    "same number of epochs, so small batches take more steps.",
}
VIEWS = (
    "Accuracy: each image is classified by a weighted vote of its 20 nearest neighbors among labeled images. In each "
    "class, the first, third, ... images are labeled and the others are classified.",
)
PAIRS = (
    f"Corrected: ranked by score - strength * zeta. zeta is solved on a bank of up to {BANK_SIZE:,} training x and y "
    "and extended to the gallery, or solved on the set itself (transductive: it uses all test queries at once). "
    "Temperature and strength are chosen on the set that the method's settings were tuned on.",
    "Recall: a query is a hit if one of its partners is among the first k; ties count with their expectation over "
    "random orders. Every distinct x and every distinct y is one query.",
)
Grid = dict[str, Sequence[Any]]  # values by key; a method is tuned over all combinations


# -- grids -------------------------------------------------------------------------------------------------------------


def method_grids(
    methods: Sequence[str],
    temperatures: Sequence[float],
    tune: Sequence[str],
    base: Settings,
) -> dict[str, Grid]:
    """Return the grid of each method; all have the same size, so no method gets a larger one than another.

    Args:
        methods: Names of objectives.
        temperatures: Those of all methods that have none of their own in the registry. A method with its own uses the
            first ones, as many as there are here.
        tune: Texts "KEY=V1,V2" or "METHOD.KEY=V1,V2" that replace values of the registry. KEY is an option of the
            objective, "temperature" or "lr_factor".
        base: Settings of all runs, whose own values relative grids are multiples of.

    Raises:
        UserError: If no method has the option, a value is not a number, or the grids would differ in size.

    """
    grids = {method: _registered_grid(method, temperatures, base) for method in methods}
    for text in tune:
        target, _, listed = text.partition("=")
        first, _, rest = target.partition(".")
        named, key = (first, rest) if first in names() else ("", target)
        takers = [m for m in methods if named in ("", m) and (key == LR_FACTOR or key in entry(m).flat_options)]
        if not takers or (key == "temperature" and not named):
            raise UserError(f"--tune {text}: none of {', '.join(methods)} has an option {key!r}, or name its method")
        for method in takers:
            kept = (TEMPERATURE, *(grids[method] if key == "temperature" else ()))
            grid = {name: grids[method][name] for name in kept}
            grids[method] = grid | {_full_key(key): numbers(listed, f"--tune {text}")}
    for method, grid in grids.items():
        for key, values in grid.items():
            if len(set(values)) < len(values):
                option = key.removeprefix(OBJECTIVE)
                raise UserError(f"{key}: {values} for {method} has a value twice; name --tune {method}.{option}=V1,V2")
    sizes = {method: [len(values) for values in grid.values()] for method, grid in grids.items()}
    if any(size != sizes[methods[0]] for size in sizes.values()):
        raise UserError(
            f"--temperatures and --tune: {sizes} values per method; give all the same number (--tune METHOD.KEY=V1,V2)"
        )
    return grids


def _registered_grid(
    method: str,
    temperatures: Sequence[float],
    base: Settings,
) -> Grid:
    record = entry(method)
    option, values = record.tune
    if record.relative:
        own = float(base.objective.options.get(option, record.flat_options[option]))
        # Rounded, so that 10 * 3e-3 gives the same name of a run as 0.03.
        values = tuple(float(f"{own * factor:.12g}") for factor in values)
    own_temperatures = (record.temperatures or tuple(temperatures))[: len(temperatures)]
    return {TEMPERATURE: own_temperatures, _full_key(option): values}


def _full_key(option: str) -> str:
    return option if option == LR_FACTOR else f"{OBJECTIVE}{option}"


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Return the numbers in a comma-separated list such as "0.01,0.03"; `option` is named in messages."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{option}: {text!r} is not a list of numbers, such as 0.01,0.03") from None


# -- the plan ----------------------------------------------------------------------------------------------------------


def plan_comparison(
    config_file: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    methods: Sequence[str] = (),
    seeds: int = 5,
    tests: Sequence[str] = (),
    halves: bool = False,
    temperatures: Sequence[float] = TEMPERATURES,
    tune: Sequence[str] = (),
    ablations: bool = False,
    batch_sizes: Sequence[int] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Check everything that a comparison needs, without training. The arguments are those of `compare`.

    Raises:
        UserError: A setting, a method, a set or a combination of them is wrong.

    """
    has_data = any(text.startswith("data.train=") for text in overrides)
    base = config.load(config_file or ({} if has_data else SETTINGS), overrides, strict=False)
    chosen = list(dict.fromkeys(methods or (ablated() if ablations else names())))
    for method in chosen:
        if method not in names():
            raise UserError(f"methods: {method!r} is unknown; known: {', '.join(names())}")
    if not 1 <= seeds <= 1000:
        raise UserError(f"seeds={seeds}: needs a whole number from 1 to 1000, such as seeds=5")
    if ablations and batch_sizes:
        raise UserError("--ablations and --batch-sizes are two studies; run one, then the other with the same --out")
    grids = method_grids(chosen, temperatures, tune, base)
    _check_overrides(overrides, grids)
    if base.optimizer.clip:
        say(f"optimizer.clip={base.optimizer.clip:g} of the config is ignored, to be fair to all methods")
        base = change(base, "optimizer.clip", 0.0)
    source, held_out = _open_data(change(base, "objective.name", chosen[0]), say)
    if halves and len(np.unique(held_out.sides["x"].ids if held_out.group is None else held_out.group)) < SMALLEST:
        raise UserError(f"--halves needs at least {SMALLEST} items or groups of side x in data.val")
    opened = _open_tests(tests, base)
    kind: Kind = "labels" if base.data.contrasts_views else "retrieval"
    sides = source.pairs.side_names
    held_out_set = MeasuredSet(
        VAL,
        VAL,
        kind,
        sides=sides,
        main=not halves and not opened,
    )
    halved_set = MeasuredSet(
        HALVED,
        HALVED,
        kind,
        sides=sides,
    )
    rows = method_rows(grids, base, (*([halved_set] if halves else []), held_out_set, *opened))
    for row in rows:  # to find values that an objective refuses
        for changes in row.grid:
            make_run(row.base, changes, 0, "").objective.build(2)
    name = "compare"
    if ablations:
        name = "ablations"
        rows = ablation_rows(rows)
    elif batch_sizes:
        name = "batch_sizes"
        rows = batch_rows(rows, batch_sizes)
    shared = {key: value for key, value in content(base).items() if not key.startswith(OBJECTIVE)}
    shared |= {"data": f"{source.pairs.fingerprint} {held_out.fingerprint}", "halves": halves}
    return Plan(
        command="nuclr compare",
        name=name,
        rows=rows,
        seeds=tuple(base.seed + seed for seed in range(seeds)),
        tuning=HALVES if halves else (VAL,),
        detailed=True,
        entries={"all runs": shared} | {method: _entry(method, grid, base) for method, grid in grids.items()},
    )


def _entry(
    method: str,
    grid: Grid,
    base: Settings,
) -> dict[str, Any]:
    """Return the settings of a method's objective, and the values that it is tuned over."""
    own = content(change(base, "objective.name", method))
    fixed = {key: value for key, value in own.items() if key.startswith(OBJECTIVE) and key != "objective.name"}
    return fixed | {key: list(values) for key, values in grid.items()}


def _check_overrides(overrides: Sequence[str], grids: Mapping[str, Grid]) -> None:
    """Refuse settings that the comparison itself sets."""
    for text in overrides:
        key = text.partition("=")[0]
        if key in OWNED:
            raise UserError(f"{key}: {OWNED[key]}")
        for method, grid in grids.items():
            if key in grid and not entry(method).relative:
                option = key.removeprefix(OBJECTIVE)
                raise UserError(f"{key} is tuned for {method}; give values with --tune {method}.{option}=V1,V2")


def _open_data(settings: Settings, say: Callable[[str], None]) -> tuple[Source, Pairs | Labeled]:
    """Open the data and build the model, so that mistakes are reported before anything is trained.

    Returns the training pairs, and the held-out pairs or labeled images that settings are tuned on.
    """
    data = settings.data
    key = "data.classes" if data.contrasts_views else "data.val"
    if not (data.classes if data.contrasts_views else data.val):
        raise UserError(f"{key} is missing; settings are tuned on it: name held-out data with {key}=...")
    source, validation, _ = build_parts(settings, pick_device(settings.device))
    if data.contrasts_views:
        return source, validation.classes
    key, held_out = next(iter(validation.sources.items()))
    if overlap := describe_overlap(source, held_out, key):
        say(overlap)
    return source, held_out.pairs


def _open_tests(texts: Sequence[str], base: Settings) -> list[MeasuredSet]:
    """Open the test sets "PATH" or "NAME=PATH"."""
    tests: dict[str, MeasuredSet] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or "/" in name or ":" in name:
            path = text
            name = text.partition(":")[0] if ":" in text else f"{Path(path).parent.name}_{Path(path).stem}".strip("_")
        if name in tests:
            raise UserError(f"--test {text}: two sets have the same name; name them with --test NAME=PATH")
        tests[name] = open_test(name, path, base.data)
    return list(tests.values())


def method_rows(
    grids: Mapping[str, Grid],
    base: Settings,
    sets: tuple[MeasuredSet, ...],
) -> tuple[Row, ...]:
    """Return one row per method, tuned over its grid and compared with the first method and its relatives."""
    rows = []
    for method, grid in grids.items():
        others = dict.fromkeys((next(iter(grids)), *entry(method).compare_to))
        to = tuple(other for other in others if other != method and other in grids)
        own = change(base, "objective.name", method)
        changes: list[Changes] = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        rows.append(
            Row(
                method,
                entry(method).label,
                own,
                sets,
                tuple(changes),
                to=to,
            )
        )
    return tuple(rows)


def ablated() -> list[str]:
    """Return the objectives that have ablations, each after the objectives that it is compared with."""
    chosen: dict[str, None] = {}
    for name in names():
        if entry(name).ablations:
            chosen |= dict.fromkeys((*entry(name).compare_to, name))
    return list(chosen)


def ablation_rows(methods: Sequence[Row]) -> tuple[Row, ...]:
    """Return the methods' rows and one row per ablation; ablations that equal the base settings are left out.

    Raises:
        UserError: If no method has ablations.

    """
    parents = [row for row in methods if entry(row.method).ablations]
    if not parents:
        raise UserError(f"--ablations: none of the methods has ablations; add one to methods=...: {ablated()}")
    to = tuple(parent.name for parent in parents)
    rows = [dataclasses.replace(row, to=() if row in parents else to) for row in methods]
    for parent in parents:
        for label, changes in entry(parent.method).ablations.items():
            if content(make_run(parent.base, changes, 0, "")) == content(parent.base):
                continue
            name = label if len(parents) == 1 else f"{parent.label}, {label}"
            ablation = dataclasses.replace(
                parent,
                name=name,
                label=name,
                parent=parent.name,
                changes=changes,
                to=(parent.name,),
            )
            rows.append(ablation)
    return tuple(rows)


def batch_rows(methods: Sequence[Row], sizes: Sequence[int]) -> tuple[Row, ...]:
    """Return one row per method and batch size; the methods' own rows are only tuned, at the config's batch size."""
    rows = [dataclasses.replace(row, shown=False) for row in methods]
    for size in sizes:
        for row in methods:
            changed = dataclasses.replace(
                row,
                name=f"{row.name} B={size}",
                label=f"{row.label}, B = {size}",
                parent=row.name,
                changes={"data.batch_size": size},
                to=tuple(f"{other} B={size}" for other in row.to),
            )
            rows.append(changed)
    return tuple(rows)


# -- results -----------------------------------------------------------------------------------------------------------


def compare(
    config_file: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    out: str | Path = "runs/compare",
    workers: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Comparison:
    """Train several methods with several seeds on the same data, tune each over a grid of the same size, and compare.

    Every run is a folder in `out`/cells. The function can be interrupted at any moment; call it again to resume.

    Args:
        config_file: A YAML config; None: the demo's settings, or the defaults if an override names `data.train`.
        overrides: Texts "section.key=value" for all runs.
        out: Folder for the runs and the results: compare.json, compare.md and compare.tex.
        workers: Number of runs at the same time. None: one per CPU core, or one on a GPU.
        say: Called with lines about the progress.
        options: What is compared, all optional:
            methods, objectives to compare; the first is the baseline, which all others are compared with;
            seeds, their number;
            tests, test sets "PATH" or "NAME=PATH", never used for tuning;
            halves=True, to tune on one half of the held-out pairs and report on the other, and the reverse;
            temperatures, that the methods are tuned over;
            tune, texts "[METHOD.]KEY=V1,V2", values to try instead of the registry's;
            ablations=True, to compare ablations of the methods that have some instead of the methods;
            batch_sizes, to compare the methods at these batch sizes.

    Returns:
        The results, which are also written to `out`.

    Raises:
        UserError: A setting, a method, a set or a combination of them is wrong.
        nuclr.runs.launch.Interrupted: On SIGINT or SIGTERM, after all workers have written checkpoints.

    """
    return run_comparison(
        plan_comparison(
            config_file,
            overrides,
            say=say,
            **options,
        ),
        Path(out),
        workers,
        say,
    )


def run_comparison(
    plan: Plan,
    out: Path,
    workers: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Train what is missing, and write the results; see `compare`."""
    study = Study(plan, out, say)
    with study.locked():
        study.run(workers)
        return write_results(out, summarize(study))


def summarize(study: Study) -> Comparison:
    """Return the results, computed from the stored outcome of every query; no model is needed."""
    shown = [row for row in study.plan.rows if row.shown]
    complete = [row for row in shown if study.complete(row)]
    columns = registry_columns(shown[0].sets)
    rows = [result_row(study, row, columns) for row in complete]
    return make_comparison(
        study,
        TITLES[study.plan.name],
        [Block("", columns, tuple(rows))],
        protocol=tuple(protocol(study.plan)),
        settings=dict(study.plan.entries["all runs"]),
        differences=tuple(differences_of(study, complete)),
        notes=tuple(_notes(study, rows)),
        failed={row.name: "not shown, because runs are missing" for row in shown if row not in complete},
    )


def _notes(study: Study, rows: Sequence[ResultRow]) -> list[str]:
    """Return what limits the comparison: pairs that were tuned on, the end of a grid, recall near chance."""
    notes = []
    if any(measured.key == VAL and measured.main for measured in study.plan.rows[0].sets):
        notes.append(
            "Settings were tuned on the same held-out data, so all values are slightly too high; --halves or --test "
            "report on data that tuning has not seen."
        )
    trained = []
    for row in rows:
        planned = study.rows[row.name]
        tried = {changes[TEMPERATURE] for changes in planned.grid if planned.tuned}
        chosen = {changes.get(TEMPERATURE) for changes in row.chosen.values()}
        if len(tried) >= 3 and chosen & {min(tried), max(tried)}:
            notes.append(f"The best temperature of {row.label} is at an end of its grid; a wider one might do better.")
        trained += [run_folder.read_results(study.out / CELLS / name) for name in row.runs]
    if trained and all(results is not None and recall_is_near_chance(results.val) for results in trained):
        notes.append(
            "Recall@10 is hardly above chance, so differences mean little; train longer (schedule.epochs), or start "
            "from a trained model (model.pretrained)."
        )
    return notes


def protocol(plan: Plan) -> list[str]:
    """Return sentences that say how the metrics were obtained."""
    lines = [
        "Percent, mean and standard deviation over the seeds. Bold: the best mean @1 or accuracy, if it differs "
        "significantly from all rows that it is compared with.",
        f"Every method is tuned over a grid of the same size with seed {plan.seeds[0]}. The setting with the "
        "best accuracy or recall@1 (mean of both directions) after the last epoch is then trained with all seeds.",
        *(f"{row.label}: {'; '.join(map(settings_text, row.grid))}" for row in plan.rows if row.tuned),
        "Data, model, epochs, batch size, optimizer and schedules are the same for all methods; gradients are not "
        "clipped, because an absolute limit would clip only the gradients of CLIP, which are about 1/(2 tau) times "
        "those of SogCLR.",
    ]
    if plan.tuning == HALVES:
        lines.append(
            "The held-out data is cut in two halves: settings are tuned on one half and reported on the other, and the "
            "reverse; both results are averaged. Metrics on all of it are for reference: half of it was tuned on."
        )
    if any(measured.path for measured in plan.rows[0].sets):
        lines.append("Test sets were never used for tuning.")
    if plan.name in PROTOCOLS:
        lines.append(PROTOCOLS[plan.name])
    lines += VIEWS if plan.rows[0].base.data.contrasts_views else PAIRS
    lines.append(
        f"Intervals: {LEVEL:.0%}, paired bootstrap over queries and seeds, with the same draws for both methods; what "
        f"belongs together (an item and its partners, or a group) is drawn together; {RESAMPLES} resamples."
    )
    return lines
