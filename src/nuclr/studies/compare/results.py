"""The folder of a comparison: `plan.json`, `cells/`, and what was found.

plan.json holds all settings that cells have in common. A second command in the same folder has to agree with them;
methods, seeds, test sets, ablations and batch sizes may be others: cells are named by content, so only what is missing
is trained.
"""

import contextlib
import dataclasses
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
from nuclr.errors import UserError
from nuclr.evaluation.correction import BANK_SIZE
from nuclr.studies import output
from nuclr.studies.compare import figures, outcome, tables
from nuclr.studies.compare.plan import content as content_of
from nuclr.studies.compare.statistics import LEVEL, RESAMPLES
from nuclr.studies.compare.study import Request, Study

COMMAND = "nuclr compare"
PLAN, LOCK = "plan.json", ".lock"
FILES = {"methods": ("compare", "table"), "ablations": ("ablations",) * 2, "batch_sizes": ("batch_sizes",) * 2}


@contextlib.contextmanager
def opened(out: Path, request: Request) -> Iterator[None]:
    """The folder, locked, after a look at whether it is new or of the same settings."""
    output.prepare_folder(out, COMMAND, PLAN, [PLAN, "cells", *(f"{name}.json" for name, _ in FILES.values())])
    with (out / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {out}: another nuclr compare is using it") from None
        _check_plan(out, common(request))
        yield


def common(request: Request) -> dict[str, Any]:
    """Settings that all cells share, and the second knob of every method."""
    base = {key: value for key, value in content_of(request.base).items() if not key.startswith("objective.")}
    given = dataclasses.asdict(request.base.objective)
    tuned = {"name", "temperature"} | {knob.key.removeprefix("objective.") for knob in request.knobs.values()}
    base |= {f"objective.{key}": value for key, value in given.items() if value is not None and key not in tuned}
    base |= {f"--tune for {method}": [knob.key, *knob.values] for method, knob in request.knobs.items()}
    base["data"] = list(request.data)
    base["halves"] = request.halves
    base["temperatures"] = list(request.temperatures)
    # JSON has no infinity, which xi_init may be
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in base.items()}


def _check_plan(out: Path, now: dict[str, Any]) -> None:
    """Settings that only one of two commands has are those of methods that the other does not compare."""
    path = out / PLAN
    before = json.loads(path.read_text(encoding="utf-8"))["settings"] if path.is_file() else {}
    for key in sorted(before.keys() | now.keys()) if before else ():
        if key.startswith(("objective.", "--tune")) and not (key in before and key in now):
            continue
        if before.get(key) != now.get(key):
            told = (
                "the data is not that of the comparison"
                if key == "data"
                else f"{key} is {now.get(key)!r}, but {before.get(key)!r} in the comparison that was begun"
            )
            raise UserError(f"{told} in {out}; go on with its own settings, or name another folder with --out")
    output.write_json(path, {"written_by": COMMAND, "version": nuclr.__version__, "settings": before | now})


def protocol(request: Request) -> list[str]:
    """How the figures were made, in sentences."""
    knobs = "; ".join(
        f"{method} {knob.key.removeprefix('objective.')} {', '.join(map(str, knob.values))}"
        for method, knob in request.knobs.items()
    )
    size = len(request.temperatures) * len(next(iter(request.knobs.values())).values)
    lines = [
        f"Every method is tuned over {size} settings with seed {request.seeds[0]}: temperature "
        f"{', '.join(f'{t:g}' for t in request.temperatures)} times one knob of its own ({knobs}). The setting with "
        "the best recall@1 (mean of both directions) after the last epoch is then trained with all seeds.",
        "Data, model, epochs, batch size, optimizer and schedules are the same for all methods; gradients are not "
        "clipped, as an absolute limit would touch CLIP's, which are about 1/(2 tau) times SogCLR's, and no others.",
    ]
    if request.halves:
        lines.append(
            "The held-out images are cut in two halves: tuned on one (as a gallery of its own), reported on the other, "
            "and the reverse, averaged. Figures on all held-out pairs are for reference: half of them were tuned on."
        )
    elif not request.tests:
        lines.append("Tuned and reported on the same held-out pairs: all figures are a little too good.")
    if request.tests:
        lines.append("Test sets were never used for tuning.")
    if request.kind == "ablations":
        lines.append(
            "An ablation has the setting that NUCLR was tuned to, with one thing changed, and is not tuned anew."
        )
    if request.kind == "batch_sizes":
        lines.append(
            f"All batch sizes have the setting that was tuned at {request.base.data.batch_size}, the same learning "
            "rate and the same number of epochs, so small batches take more steps."
        )
    lines += [
        "Corrected: ranked by score - strength * zeta, solved on up to "
        f"{BANK_SIZE:,} training images and captions as the bank and extended to the gallery, or solved "
        "on the set itself (transductive: it uses all test queries at once); temperature and strength chosen where the "
        "method's settings were.",
        "Recall: a query is right where one of its partners is among the first k; ties count by expectation. An image "
        "has one query, each of its captions one.",
        f"Intervals: {LEVEL:.0%}, paired bootstrap over images (an image's captions stay together) and seeds, both "
        f"drawn alike for both methods; {RESAMPLES} resamples.",
    ]
    return lines


def summarize(study: Study, command: str) -> dict[str, Any]:
    """All that was found, from the stored outcome of every query: no model is needed."""
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
        "sets": [{"name": r.name, "label": r.label, "kind": r.kind, "main": r.main} for r in study.reports()],
        "averages": [f"average: {name}" for name in outcome.groups(outcome.main_reports(study))],
        "rows": {
            row.name: {
                "method": row.method,
                "label": row.label,
                "figures": outcome.figures(study, row),
                "corrected": outcome.corrections(study, row),
                "false_negatives": outcome.false_negative_share(study, row),
                "tuning": outcome.tuning(study, row),
                "curve": outcome.curves(study, row),
                "runs": {k: [study.outcomes.path(c).name for c in group] for k, group in study.finals(row).items()},
            }
            for row in rows
        },
        "missing": [name for name, row in study.rows.items() if row.shown and row not in rows],
        "differences": outcome.differences(study, rows),
        "failed": study.failed,
    }


def write(out: Path, kind: str, content: dict[str, Any]) -> None:
    """The JSON, the tables and the figures."""
    summary, table = FILES[kind]
    output.write_json(out / f"{summary}.json", content)
    output.write_text(out / f"{table}.md", tables.markdown(content))
    output.write_text(out / f"{table}.csv", tables.comma_separated(content))
    figures.write(content, out, kind)
