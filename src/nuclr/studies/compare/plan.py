"""What is trained: a list of cells, each an ordinary run, named by its content.

Every method is tuned over a grid of the same size: the paper's temperatures times two values of one knob of its own.
The knob is a key of the settings; values of the learning rate are factors of the one in the config.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nuclr.errors import UserError
from nuclr.objectives import OBJECTIVES
from nuclr.runs.folder import FREE_ON_RESUME
from nuclr.runs.settings import Settings, objective_keys, to_dict

TEMPERATURES = (0.01, 0.03, 0.05, 0.07)
GAMMAS = (0.3, 0.8)
LR = "lr_factor"


@dataclass(frozen=True)
class Knob:
    """A setting of a method and the values that tuning tries."""

    key: str
    values: tuple[Any, ...]


KNOBS = {
    "clip": Knob("objective.learn_temperature", (False, True)),
    "siglip": Knob("objective.bias", (-10.0, -5.0)),
    "dcl": Knob("objective.tau_plus", (0.01, 0.1)),
    "cyclip": Knob("objective.within", (0.25, 0.05)),
    "sogclr": Knob(LR, (1.0, 3.0)),
    "isogclr": Knob("objective.rho", (8.0, 6.0)),
    "nuclr": Knob("objective.zeta_lr", (1e-2, 3e-2)),
}


@dataclass(frozen=True)
class Cell:
    """One run: a row of a table (`row`, such as a method), what is changed in the base settings, and a seed."""

    row: str
    method: str
    changes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def settings(self, base: Settings) -> Settings:
        """The settings of the run; everything that a cell does not change is the base's."""
        found = change(base, "objective.name", self.method)
        for key, value in self.changes.items():
            found = change(found, key, value)
        found = dataclasses.replace(found, seed=self.seed, out=None, threads=found.threads or 1)
        return dataclasses.replace(found, name=self.name(found))

    def name(self, settings: Settings) -> str:
        """Folder of the run: what it is, for people, and a hash of all its settings."""
        parts = [f"{key.rpartition('.')[2]}={_short(value)}" for key, value in self.changes.items()]
        return "-".join([self.method, *parts, f"seed={self.seed}", content_hash(settings)])

    def with_seed(self, seed: int) -> "Cell":
        """The same with another seed."""
        return dataclasses.replace(self, seed=seed)


@dataclass(frozen=True)
class Row:
    """A row of a table.

    grid: what tuning chooses from; or `parent`, the row whose choice is taken over with `changes`. to: rows that it is
    compared with. shown: whether it is trained with all seeds, or only tuned for the rows that build on it.
    """

    name: str
    method: str
    label: str
    grid: tuple[Cell, ...] = ()
    parent: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    to: tuple[str, ...] = ()
    shown: bool = True


def change(settings: Settings, key: str, value: Any) -> Settings:
    """`settings` with one key ("section.key" or "key") changed; "lr_factor" multiplies the learning rate."""
    if key == LR:
        key, value = "optimizer.lr", settings.optimizer.lr * value
    section, _, name = key.rpartition(".")
    if not section:
        return dataclasses.replace(settings, **{name: value})
    inner = dataclasses.replace(getattr(settings, section), **{name: value})
    return dataclasses.replace(settings, **{section: inner})


def content(settings: Settings) -> dict[str, Any]:
    """What a run's result depends on, as a flat dict: all but names, places and machinery.

    Values that are the default are left out, so that a setting that a later version adds changes no name.
    """
    usual = _flat(Settings())
    free = FREE_ON_RESUME | {"name", "seed"}
    return {key: value for key, value in _flat(settings).items() if key not in free and usual.get(key, None) != value}


def _flat(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in to_dict(settings).items():
        found |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
    return found


def content_hash(settings: Settings) -> str:
    """Eight digits of a hash of `content`."""
    return hashlib.sha256(json.dumps(content(settings), sort_keys=True).encode()).hexdigest()[:8]


def grid(method: str, temperatures: Sequence[float], knob: Knob, seed: int) -> list[Cell]:
    """The cells that tuning chooses from."""
    return [
        Cell(method, method, {"objective.temperature": temperature, knob.key: value}, seed)
        for temperature in temperatures
        for value in knob.values
    ]


def knobs(methods: Sequence[str], tune: Sequence[str]) -> dict[str, Knob]:
    """The second knob of each method: its own, or the one that --tune names.

    `tune`: "gamma", "KEY=V1,V2" or "METHOD.KEY=V1,V2" with a key of the objective or lr_factor. All knobs have to have
    the same number of values, so that no method gets a larger grid than another.
    """
    found = {method: KNOBS[method] for method in methods}
    for text in tune:
        place, _, given = text.partition("=")
        method, _, key = place.rpartition(".")
        if not given and key == "gamma":
            values: tuple[Any, ...] = GAMMAS
        else:
            values = tuple(_number(part, f"--tune {text}") for part in given.split(","))
        takes = [m for m in methods if key == LR or key in objective_keys(m)]
        takes = [m for m in takes if method in ("", m)]
        if not takes:
            raise UserError(f"--tune {text}: none of {', '.join(methods)} has an option {key!r}")
        found |= {m: Knob(key if key == LR else f"objective.{key}", values) for m in takes}
    sizes = {method: len(knob.values) for method, knob in found.items()}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{method} {size}" for method, size in sizes.items())
        raise UserError(f"--tune: the methods would get grids of unequal size (values of the second knob: {told})")
    return found


def _number(text: str, source: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{source}: {text!r} is no number") from None


def parse_methods(text: str) -> list[str]:
    """From "clip,nuclr" to the names, each known and there once."""
    methods = [part.strip() for part in text.split(",")]
    for method in methods:
        if method not in OBJECTIVES:
            raise UserError(f"methods: {method!r} is unknown; known: {', '.join(OBJECTIVES)}")
    if len(set(methods)) < len(methods):
        raise UserError(f"methods={text}: a method is named twice")
    return methods


def parse_temperatures(text: str) -> list[float]:
    """From "0.01,0.03" to numbers above 0."""
    found = [_number(part, "--temperatures") for part in text.split(",")]
    for value in found:
        if not 0 < value < float("inf"):
            raise UserError(f"--temperatures: {value:g}; needs numbers above 0, such as 0.01,0.03")
    if len(set(found)) < len(found):
        raise UserError(f"--temperatures {text}: a value is given twice")
    return found


def parse_seeds(text: str) -> list[int]:
    """From "5" to the seeds 0 to 4."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= 1000:
        raise UserError(f"seeds={text}: needs a whole number of at least 1, such as seeds=5")
    return list(range(count))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
