"""What a comparison trains: cells (runs named by their content), rows of the table, and the three kinds of study.

Every method is tuned over a grid of the same size: the paper's temperatures, or its own if its temperature is another
quantity (SigLIP), times the values of one hyperparameter of its own. The registry of objectives has these values; those
of an option whose scale depends on the data (the step size of zeta) are factors on the config's own value. A study
compares methods, runs ablations of a method, or repeats the methods at several batch sizes. Ablations and batch sizes
start from the setting that tuning chose for the method and change one thing.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nuclr.errors import UserError
from nuclr.objectives import entry, names, options
from nuclr.runs import settings as s
from nuclr.runs.content import content, content_hash
from nuclr.runs.settings import Settings

TEMPERATURES = (0.01, 0.03, 0.05, 0.07)
GAMMAS = (0.3, 0.8)
LR_FACTOR = "lr_factor"
TEMPERATURE = "temperature"
BASELINE = "clip"


# ---------------------------------------------------------------------------------------------------------------------
# Cells


@dataclass(frozen=True)
class Cell:
    """One run of the comparison.

    Attributes:
        row: The row of the table that it belongs to, such as a method.
        method: Name of the objective.
        changes: Settings that differ from the base settings, by key.
        seed: Seed of the run.

    """

    row: str
    method: str
    changes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def settings(self, base: Settings) -> Settings:
        """Return the settings of the run: the base settings with the cell's method, changes and seed."""
        settings = change(base, "objective.name", self.method)
        for key, value in self.changes.items():
            settings = change(settings, key, value)
        settings = dataclasses.replace(settings, seed=self.seed, out=None, threads=settings.threads or 1)
        return dataclasses.replace(settings, name=self.name(settings))

    def name(self, settings: Settings) -> str:
        """Return the name of the run's folder: method, changes and seed for the reader, and a hash of all settings."""
        parts = [f"{key.rpartition('.')[2]}={_short(value)}" for key, value in self.changes.items()]
        return "-".join([self.method, *parts, f"seed={self.seed}", content_hash(settings)])


def change(settings: Settings, key: str, value: Any) -> Settings:
    """Return `settings` with one key ("section.key" or "key") changed; "lr_factor" multiplies the learning rate."""
    if key == LR_FACTOR:
        key, value = "optimizer.lr", settings.optimizer.lr * value
    changed: Settings = s.change(settings, key, value)
    return changed


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


# ---------------------------------------------------------------------------------------------------------------------
# Grids


@dataclass(frozen=True)
class Hyperparameter:
    """A setting (its full key, or "lr_factor") and the values that tuning tries.

    Attributes:
        key: The key.
        values: The values.
        relative: True if the values are multiples of the config's own, which may therefore be overridden.

    """

    key: str
    values: tuple[Any, ...]
    relative: bool = False


def own_hyperparameters(methods: Sequence[str], tune: Sequence[str], base: Settings) -> dict[str, Hyperparameter]:
    """Return the hyperparameter that each method is tuned over besides the temperature.

    It is the one in the registry of objectives, unless `tune` replaces it. All of them must have the same number of
    values, so no method gets a larger grid than another.

    Args:
        methods: Names of objectives.
        tune: Values of --tune: "gamma", "KEY=V1,V2" or "METHOD.KEY=V1,V2". KEY is an option of the objective or
            lr_factor. Those of the temperature are for `temperature_grids`.
        base: Settings of all cells, whose own values relative grids are multiples of.

    Raises:
        UserError: If no method has the option, a value is not a number, or the grids would differ in size.

    """
    chosen: dict[str, Hyperparameter] = {}
    for text in tune:
        method, key, listed = _split_tune(text)
        if key == TEMPERATURE:
            continue
        if not listed and key == "gamma":
            values: tuple[Any, ...] = GAMMAS
        else:
            values = tuple(_number(part, f"--tune {text}") for part in listed.split(","))
        takers = [m for m in methods if method in ("", m) and (key == LR_FACTOR or key in options(m))]
        if not takers:
            raise UserError(f"--tune {text}: none of {', '.join(methods)} has an option {key!r}")
        chosen |= {m: _hyperparameter(key, values) for m in takers}
    chosen = {method: chosen.get(method) or _registered(method, base) for method in methods}
    _check_sizes("--tune", {method: len(tuned.values) for method, tuned in chosen.items()})
    return chosen


def _registered(method: str, base: Settings) -> Hyperparameter:
    """Return the hyperparameter in the registry; factors are multiplied with the config's own value."""
    record = entry(method)
    option, values = record.tune
    if not record.relative:
        return _hyperparameter(option, values)
    own = float(base.objective.options.get(option, record.options[option]))
    if own == 0:
        raise UserError(
            f"objective.{option} is 0, and the values tried for {method} are multiples of it; set it to another value, "
            f"or name the values with --tune {method}.{option}=V1,V2"
        )
    multiples = tuple(float(f"{own * factor:.12g}") for factor in values)
    return dataclasses.replace(_hyperparameter(option, multiples), relative=True)


def temperature_grids(
    methods: Sequence[str], temperatures: Sequence[float], tune: Sequence[str]
) -> dict[str, tuple[float, ...]]:
    """Return the temperatures that each method is tuned over, the same number for all.

    Args:
        methods: Names of objectives.
        temperatures: Those of all methods that have none of their own in the registry. Of a method's own, the first so
            many are used.
        tune: Values of --tune; "METHOD.temperature=V1,V2" names the temperatures of one method.

    Raises:
        UserError: If a value is not allowed, or the methods would have different numbers of temperatures.

    """
    chosen = {method: (entry(method).temperatures or tuple(temperatures))[: len(temperatures)] for method in methods}
    for text in tune:
        method, key, listed = _split_tune(text)
        if key != TEMPERATURE:
            continue
        if method not in methods:
            raise UserError(
                f"--tune {text}: name one of the methods, such as --tune {methods[0]}.temperature=0.01,0.03; "
                "--temperatures is for all of them"
            )
        chosen[method] = tuple(parse_temperatures(listed, f"--tune {text}"))
    _check_sizes("--temperatures", {method: len(values) for method, values in chosen.items()})
    return chosen


def _split_tune(text: str) -> tuple[str, str, str]:
    """Return ("nuclr", "gamma", "0.3,0.8") for "nuclr.gamma=0.3,0.8"."""
    target, _, listed = text.partition("=")
    method, _, key = target.rpartition(".")
    return method, key, listed


def _check_sizes(option: str, sizes: Mapping[str, int]) -> None:
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{method} {size}" for method, size in sizes.items())
        raise UserError(
            f"{option}: the methods would get grids of different sizes (values per method: {listed}); give every "
            "method the same number of values, with --tune METHOD.KEY=V1,V2 if it has its own"
        )


def _hyperparameter(option: str, values: tuple[Any, ...]) -> Hyperparameter:
    return Hyperparameter(option if option == LR_FACTOR else f"objective.{option}", values)


def grid(method: str, temperatures: Sequence[float], tuned: Hyperparameter, seed: int) -> tuple[Cell, ...]:
    """Return the cells that tuning chooses from: every temperature with every value of the hyperparameter."""
    return tuple(
        Cell(method, method, {"objective.temperature": temperature, tuned.key: value}, seed)
        for temperature in temperatures
        for value in tuned.values
    )


# ---------------------------------------------------------------------------------------------------------------------
# Rows of the three studies


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: Unique name.
        method: Name of the objective.
        label: Name on tables and figures.
        grid: Cells that tuning chooses from; empty if the row has a parent.
        parent: Row whose chosen setting this row takes over, with `changes`.
        changes: Settings changed in the parent's choice, by key.
        to: Rows that this row is compared with.
        shown: True to train it with all seeds; False if it is only tuned, for the rows that build on it.

    """

    name: str
    method: str
    label: str
    grid: tuple[Cell, ...] = ()
    parent: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    to: tuple[str, ...] = ()
    shown: bool = True


def method_rows(
    methods: Sequence[str],
    temperatures: Mapping[str, Sequence[float]],
    tuned: Mapping[str, Hyperparameter],
    seed: int,
    baseline: str,
) -> tuple[Row, ...]:
    """Return one row per method, tuned over its grid with one seed and compared with the baseline."""
    return tuple(
        Row(m, m, entry(m).label, grid(m, temperatures[m], tuned[m], seed), to=_compared_with(m, methods, baseline))
        for m in methods
    )


def _compared_with(method: str, methods: Sequence[str], baseline: str) -> tuple[str, ...]:
    others = dict.fromkeys((baseline, *entry(method).compare_to))
    return tuple(other for other in others if other != method and other in methods)


def ablated() -> list[str]:
    """Return the objectives that have ablations, each after the objectives that it is compared with."""
    chosen = [(*entry(name).compare_to, name) for name in names() if entry(name).ablations]
    return list(dict.fromkeys(name for group in chosen for name in group))


def ablation_rows(methods: Sequence[Row], base: Settings) -> tuple[Row, ...]:
    """Return the methods' rows and one row per ablation; ablations that equal the base settings are left out.

    Args:
        methods: Rows of `method_rows`.
        base: Settings of all cells.

    Returns:
        The methods' rows, compared with the methods that have ablations, then the ablations, compared with their
        method.

    Raises:
        UserError: If no method has ablations.

    """
    parents = [row.name for row in methods if entry(row.method).ablations]
    if not parents:
        known = ", ".join(name for name in names() if entry(name).ablations)
        raise UserError(f"--ablations: none of the methods has ablations; add one of them to methods=...: {known}")
    rows = [dataclasses.replace(row, to=() if row.name in parents else tuple(parents)) for row in methods]
    for parent in parents:
        unchanged = content(Cell(parent, parent).settings(base))
        for label, changes in entry(parent).ablations.items():
            if content(Cell(label, parent, dict(changes)).settings(base)) == unchanged:
                continue
            name = label if len(parents) == 1 else f"{entry(parent).label}, {label}"
            rows.append(Row(name, parent, name, parent=parent, changes=changes, to=(parent,)))
    return tuple(rows)


def batch_rows(methods: Sequence[Row], sizes: Sequence[int]) -> tuple[Row, ...]:
    """Return one row per method and batch size; the methods' own rows are only tuned, at the config's batch size."""
    tuned = tuple(Row(r.name, r.method, r.label, r.grid, shown=False) for r in methods)
    changed = tuple(
        Row(
            f"{row.name} B={size}",
            row.method,
            f"{row.label}, B = {size}",
            parent=row.name,
            changes={"data.batch_size": size},
            to=tuple(f"{other} B={size}" for other in row.to),
        )
        for size in sizes
        for row in methods
    )
    return (*tuned, *changed)


# ---------------------------------------------------------------------------------------------------------------------
# Values of the command line


def parse_methods(text: str) -> list[str]:
    """Return the objectives named in a comma-separated list such as "clip,nuclr"."""
    methods = [part.strip() for part in text.split(",")]
    for method in methods:
        if method not in names():
            near = difflib.get_close_matches(method, names(), n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names())}"
            raise UserError(f"methods: {method!r} is unknown; {hint}")
    if len(set(methods)) < len(methods):
        raise UserError(f"methods={text}: a method is named twice; name each one once")
    return methods


def parse_temperatures(text: str, option: str = "--temperatures") -> list[float]:
    """Return the temperatures in a comma-separated list such as "0.01,0.03"; `option` is named in messages."""
    temperatures = [_number(part, option) for part in text.split(",")]
    for value in temperatures:
        if not 0 < value < float("inf"):
            raise UserError(f"{option}: {value:g} is not allowed; needs numbers above 0, such as 0.01,0.03")
    if len(set(temperatures)) < len(temperatures):
        raise UserError(f"{option}: {text} has a value twice; give each one once")
    return temperatures


def parse_seeds(text: str) -> list[int]:
    """Return the seeds 0 to 4 for "5"."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= 1000:
        raise UserError(f"seeds={text}: needs a whole number from 1 to 1000, such as seeds=5")
    return list(range(count))


def parse_sizes(text: str, pairs: int) -> list[int]:
    """Return the batch sizes in a comma-separated list such as "16,32"; `pairs` is the largest one allowed."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--batch-sizes {text}: needs whole numbers, such as 16,32,64") from None
    for size in sizes:
        if not 2 <= size <= pairs:
            raise UserError(
                f"--batch-sizes: {size} is not allowed; needs numbers from 2 to {pairs}, the number of pairs"
            )
    if len(set(sizes)) < len(sizes):
        raise UserError(f"--batch-sizes {text}: a size is given twice; give each one once")
    return sizes


def _number(text: str, source: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{source}: {text!r} is not a number") from None
