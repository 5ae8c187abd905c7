"""Contrastive learning on paired data that works at small batch sizes, and popularity: which samples are hubs.

Sub-packages are imported on first use, so ``import nuclr`` is fast:

>>> import nuclr
>>> nuclr.build("clip", temperature=0.07).temperature
0.07

`build` makes an objective by name (`nuclr.objectives.build`), `solve` finds the exact popularity of every sample
(`nuclr.popularity.solve`), and `train` trains a model on pairs as `nuclr train` does.
"""

import importlib
from typing import TYPE_CHECKING, Any

from nuclr.errors import EXTRAS, missing_extra

if TYPE_CHECKING:
    from nuclr import (
        cli,
        data,
        evaluation,
        export,
        integrations,
        models,
        objectives,
        popularity,
        remote,
        report,
        runs,
        studies,
        training,
    )
    from nuclr.objectives import build
    from nuclr.popularity.solver import solve
    from nuclr.studies.compare import compare
    from nuclr.studies.evaluate import evaluate
    from nuclr.studies.items.hubness_report import hubness_report
    from nuclr.studies.items.popularity_report import popularity_report
    from nuclr.training.loop import train

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "build",
    "cli",
    "compare",
    "data",
    "evaluate",
    "evaluation",
    "export",
    "hubness_report",
    "integrations",
    "models",
    "objectives",
    "popularity",
    "popularity_report",
    "remote",
    "report",
    "runs",
    "solve",
    "studies",
    "train",
    "training",
]

_FUNCTIONS = {
    "build": "nuclr.objectives",
    "compare": "nuclr.studies.compare",
    "evaluate": "nuclr.studies.evaluate",
    "hubness_report": "nuclr.studies.items.hubness_report",
    "popularity_report": "nuclr.studies.items.popularity_report",
    "solve": "nuclr.popularity",
    "train": "nuclr.training.loop",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'nuclr' has no attribute {name!r}")
    try:
        if name in _FUNCTIONS:
            value = getattr(importlib.import_module(_FUNCTIONS[name]), name)
        else:
            value = importlib.import_module(f"nuclr.{name}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise ModuleNotFoundError(f"nuclr.{name}: {missing_extra(package)}", name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
