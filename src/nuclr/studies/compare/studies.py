"""Which rows a table has: the methods, NUCLR's ablations, or the methods at several batch sizes.

Ablations and batch sizes take the setting that tuning chose for the method in the base config, and change one thing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nuclr.errors import UserError
from nuclr.runs.settings import Settings
from nuclr.studies.compare.plan import Cell, Knob, Row, content, grid

NAMES = {
    "clip": "CLIP",
    "siglip": "SigLIP",
    "dcl": "DCL",
    "cyclip": "CyCLIP",
    "sogclr": "SogCLR",
    "isogclr": "iSogCLR",
    "nuclr": "NUCLR",
}
# The paper's: what is left of NUCLR without a part of it; then ours.
ABLATIONS: dict[str, dict[str, Any]] = {
    "zeta fixed": {"objective.zeta_lr": 0.0},
    "no xi (zeta in its place)": {"objective.use_xi": False},
    "no freezing": {"schedule.zeta_frozen_epochs": 0},
    "zeta_init 0": {"objective.zeta_init": 0.0},
    "zeta_init -0.05": {"objective.zeta_init": -0.05},
    "xi_rule norm": {"objective.xi_rule": "norm"},
    "xi_rule max": {"objective.xi_rule": "max"},
    "estimator unbiased": {"objective.zeta_estimator": "unbiased"},
    "estimator paper": {"objective.zeta_estimator": "paper"},
    "gamma 0.3": {"objective.gamma": 0.3},
    "gamma 0.8": {"objective.gamma": 0.8},
}
DEFAULTS = {"zeta_init": 0.0, "xi_rule": "norm", "zeta_estimator": "reference", "gamma": 0.8, "use_xi": True}


def method_rows(
    methods: Sequence[str], temperatures: Sequence[float], knobs: Mapping[str, Knob], seed: int, baseline: str
) -> tuple[Row, ...]:
    """A row for each method, tuned over its grid with one seed."""
    return tuple(
        Row(m, m, NAMES[m], tuple(grid(m, temperatures, knobs[m], seed)), to=_against(m, methods, baseline))
        for m in methods
    )


def _against(method: str, methods: Sequence[str], baseline: str) -> tuple[str, ...]:
    """The baseline; and for NUCLR also SogCLR, the step that the paper is about."""
    step = ("sogclr",) if method == "nuclr" and "sogclr" in methods else ()
    found = dict.fromkeys((baseline, *step))
    return tuple(other for other in found if other != method)


def ablation_rows(methods: Sequence[Row], base: Settings) -> tuple[Row, ...]:
    """The tuned methods, NUCLR among them, and NUCLR with one thing changed; what the base has already is left out."""
    if not any(row.name == "nuclr" for row in methods):
        raise UserError("--ablations: NUCLR is what is taken apart; name it among the methods")
    as_it_is = _full(Cell("nuclr", "nuclr").settings(base))
    changed = [
        Row(name, "nuclr", name, parent="nuclr", changes=changes, to=("nuclr",))
        for name, changes in ABLATIONS.items()
        if _full(Cell(name, "nuclr", changes).settings(base)) != as_it_is
    ]
    rows = [Row(r.name, r.method, r.label, r.grid, to=() if r.name == "nuclr" else ("nuclr",)) for r in methods]
    return (*rows, *changed)


def _full(settings: Settings) -> dict[str, Any]:
    """What decides, with the defaults of the objective spelt out."""
    return {f"objective.{key}": value for key, value in DEFAULTS.items()} | content(settings)


def batch_rows(methods: Sequence[Row], sizes: Sequence[int]) -> tuple[Row, ...]:
    """Every method at every batch size; the methods' own rows are only tuned, at the config's batch size."""
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


def parse_sizes(text: str, pairs: int) -> list[int]:
    """From "16,32" to batch sizes that the data has pairs for."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--batch-sizes {text}: needs whole numbers, such as 16,32,64") from None
    for size in sizes:
        if not 2 <= size <= pairs:
            raise UserError(f"--batch-sizes: {size}; needs numbers from 2 to {pairs}, the number of pairs")
    if len(set(sizes)) < len(sizes):
        raise UserError(f"--batch-sizes {text}: a size is given twice")
    return sizes
