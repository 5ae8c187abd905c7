"""The folder of a comparison: `plan.json`, `cells/`, and the results as JSON, tables and figures.

plan.json holds the settings that all cells share. A second command in the same folder must use the same ones; methods,
seeds, test sets, ablations and batch sizes may differ. Cells are named by content, so only missing ones are trained.
"""

import contextlib
import fcntl
import json
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nuclr
from nuclr import files
from nuclr.errors import UserError
from nuclr.popularity.correction import BANK_SIZE
from nuclr.runs.content import content as content_of
from nuclr.studies.compare import figures, row_metrics, tables
from nuclr.studies.compare.statistics import LEVEL, RESAMPLES
from nuclr.studies.compare.study import ComparedSides, Request, Study

COMMAND = "nuclr compare"
PLAN, LOCK = "plan.json", ".lock"
FILES = {"methods": ("compare", "table"), "ablations": ("ablations",) * 2, "batch_sizes": ("batch_sizes",) * 2}


@contextlib.contextmanager
def opened(out: Path, request: Request) -> Iterator[None]:
    """Lock the folder of a comparison, after a check that it is new or has the same settings."""
    files.prepare_folder(out, COMMAND, PLAN, [PLAN, "cells", *(f"{name}.json" for name, _ in FILES.values())])
    with (out / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--out {out}: another nuclr compare is using this folder; wait for it or name another folder"
            ) from None
        _check_plan(out, common(request))
        yield


def common(request: Request) -> dict[str, Any]:
    """Return the settings that all cells share, and the hyperparameter that each method is tuned over."""
    base = {key: value for key, value in content_of(request.base).items() if not key.startswith("objective.")}
    options = request.base.objective.options
    tuned = {"name", "temperature"} | {one.key.removeprefix("objective.") for one in request.tuned.values()}
    base |= {f"objective.{key}": value for key, value in options.items() if key not in tuned}
    base |= {f"--tune for {method}": [one.key, *one.values] for method, one in request.tuned.items()}
    base["data"] = list(request.data)
    base["halves"] = request.halves
    base |= {f"temperatures of {method}": list(values) for method, values in request.temperatures.items()}
    # JSON has no infinity, which xi_init may be
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in base.items()}


def _check_plan(out: Path, now: dict[str, Any]) -> None:
    """Compare the shared settings with those of an earlier command in the same folder, and store them.

    If only one of the two commands has a setting of an objective, the other command does not compare that method, and
    the setting is not checked.
    """
    path = out / PLAN
    before = json.loads(path.read_text(encoding="utf-8"))["settings"] if path.is_file() else {}
    for key in sorted(before.keys() | now.keys()) if before else ():
        if key.startswith(("objective.", "--tune", "temperatures of")) and not (key in before and key in now):
            continue
        if before.get(key) != now.get(key):
            problem = (
                "the data differs from the data of the comparison"
                if key == "data"
                else f"{key} is {now.get(key)!r}, but {before.get(key)!r} in the comparison"
            )
            raise UserError(
                f"{problem} in {out}; use the same settings to resume it, or name another folder with --out"
            )
    with files.user_errors(path):
        files.write_json(path, {"written_by": COMMAND, "version": nuclr.__version__, "settings": before | now})


def protocol(request: Request) -> list[str]:
    """Return sentences that say how the metrics were obtained."""
    tuned = "; ".join(
        f"{method} {one.key.removeprefix('objective.')} {', '.join(map(str, one.values))}"
        for method, one in request.tuned.items()
    )
    methods_of: dict[str, list[str]] = {}
    for method, values in request.temperatures.items():
        methods_of.setdefault(", ".join(f"{value:g}" for value in values), []).append(method)
    temperatures = "; ".join(
        values if len(methods_of) == 1 else f"{values} for {', '.join(methods)}"
        for values, methods in methods_of.items()
    )
    sides, views = request.sides, request.base.data.contrasts_views
    size = len(next(iter(request.temperatures.values()))) * len(next(iter(request.tuned.values())).values)
    best = "accuracy" if views else "recall@1 (mean of both directions)"
    lines = [
        f"Every method is tuned over {size} settings with seed {request.seeds[0]}: temperature "
        f"{temperatures}, times one hyperparameter of its own ({tuned}). The "
        f"setting with the best {best} after the last epoch is then trained with all seeds.",
        "Data, model, epochs, batch size, optimizer and schedules are the same for all methods; gradients are not "
        "clipped, because an absolute limit would clip only the gradients of CLIP, which are about 1/(2 tau) times "
        "those of SogCLR.",
    ]
    if request.halves:
        lines.append(_halves_line(sides, views))
    elif not request.tests:
        same = "images" if views else "held-out pairs"
        lines.append(f"Settings are tuned and reported on the same {same}, so all metrics are slightly too high.")
    if request.tests:
        lines.append("Test sets were never used for tuning.")
    if request.kind == "ablations":
        lines.append(
            "An ablation takes the setting that its method was tuned to and changes one thing; it is not tuned again."
        )
    if request.kind == "batch_sizes":
        lines.append(
            f"All batch sizes use the setting tuned at {request.base.data.batch_size}, the same learning rate and the "
            "same number of epochs, so small batches take more steps."
        )
    if views:
        lines.append(
            "Accuracy: each image is classified by a weighted vote of its 20 nearest neighbors among labeled images. "
            "In each class, the first, third, ... images are labeled and the others are classified."
        )
    else:
        lines += [
            "Corrected: ranked by score - strength * zeta. zeta is solved on a bank of up to "
            f"{BANK_SIZE:,} training {sides.x.many} and {sides.y.many} and extended to the gallery, or solved on the "
            "set itself (transductive: it uses all test queries at once). Temperature and strength are chosen on the "
            "set that the method's settings were tuned on.",
            "Recall: a query is a hit if one of its partners is among the first k; ties count with their expectation "
            f"over random orders. Every distinct {sides.x.one} and every distinct {sides.y.one} is one query.",
        ]
    drawn = "images" if views else f"{sides.clusters} ({sides.partners})"
    lines.append(
        f"Intervals: {LEVEL:.0%}, paired bootstrap over {drawn} and seeds, with the same draws for both methods; "
        f"{RESAMPLES} resamples."
    )
    return lines


def _halves_line(sides: ComparedSides, views: bool) -> str:
    if views:
        return (
            "The images to classify are cut in two halves: settings are tuned on one half and reported on the other, "
            "and the reverse; both results are averaged. The labeled images are the same for both. Metrics on all "
            "images are for reference: half of them were tuned on."
        )
    return (
        f"The held-out {sides.clusters} are cut in two halves: settings are tuned on one half (a gallery of its own) "
        "and reported on the other, and the reverse; both results are averaged. Metrics on all held-out pairs are for "
        "reference: half of these pairs were tuned on."
    )


def summarize(study: Study, command: str) -> dict[str, Any]:
    """Return the content of compare.json, computed from the stored outcome of every query; no model is needed."""
    request = study.request
    rows = study.shown()
    return {
        "written_by": COMMAND,
        "title": {"methods": "Methods", "ablations": "Ablations", "batch_sizes": "Batch sizes"}[request.kind],
        "command": command,
        "version": nuclr.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "unit": "percent",
        "protocol": protocol(request),
        "settings": common(request),
        "seeds": list(request.seeds),
        "baseline": request.baseline,
        "chance": row_metrics.chance(study, rows),
        "sides": list(request.sides.names),
        "sets": [
            {"name": one.name, "label": one.label, "kind": one.kind, "main": one.main}
            for one in request.reported_sets()
        ],
        "averages": list(row_metrics.averages(row_metrics.main_sets(study))),
        "rows": {
            row.name: {
                "method": row.method,
                "label": row.label,
                "metrics": row_metrics.metrics(study, row),
                "corrected": row_metrics.corrections(study, row),
                "false_negatives": row_metrics.false_negative_share(study, row),
                "tuning": row_metrics.tuning(study, row),
                "curve": row_metrics.curves(study, row),
                "runs": {k: [study.outcomes.path(c).name for c in group] for k, group in study.finals(row).items()},
            }
            for row in rows
        },
        "missing": [name for name, row in study.rows.items() if row.shown and row not in rows],
        "differences": row_metrics.differences(study, rows),
        "failed": study.failed,
    }


def write(out: Path, kind: str, content: dict[str, Any]) -> None:
    """Write the JSON, the tables and the figures."""
    summary, table = FILES[kind]
    with files.user_errors(out):
        files.write_json(out / f"{summary}.json", content)
        files.write_text(out / f"{table}.md", tables.markdown(content))
        files.write_text(out / f"{table}.csv", tables.comma_separated(content))
        figures.write(content, out, kind)
