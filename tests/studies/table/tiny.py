"""A table small enough for a test: vectors, two epochs; and results of `nuclr evaluate` with given values."""

import json
import sys
from pathlib import Path

import numpy as np

from tests.studies.compare import tiny

TABLE = """
title: tiny
seeds: {seeds}
columns:
  - {{title: pairs, test: test.npz, kind: retrieval}}
  - {{title: classes, test: classes.npz, kind: classification}}
rows:
  - {{config: tiny.yaml, overrides: {{objective.name: clip}}}}
  - {{label: ours, config: tiny.yaml, overrides: [objective.name=nuclr, objective.gamma=0.5]}}
"""


def write_table(folder: Path, seeds: int = 1) -> Path:
    """Write the data, a config and a table file of two rows and two columns."""
    tiny.write_config(folder)
    rng = np.random.default_rng(3)
    x, prompts = rng.normal(size=(20, 12)).astype("f4"), rng.normal(size=(4, 8)).astype("f4")
    np.savez(folder / "classes.npz", x=x, labels=np.arange(20) % 4, prompts=prompts)
    path = folder / "table.yaml"
    path.write_text(TABLE.format(seeds=seeds))
    return path


def write_results(path: Path, subject: str, values: dict[str, float], fingerprint: str = "f", **about) -> Path:
    """Write results of `nuclr evaluate`: retrieval on mscoco and flickr30k, classification on all other names."""
    retrieval, classification = {}, {}
    for name, value in values.items():
        if name in ("mscoco", "flickr30k"):
            retrieval[name] = {
                "path": name, "fingerprint": fingerprint, "sizes": [5, 25], "duplicates": {"way": "miss"},
                "plain": {"mean_R@1": value, "mean_R@5": 0.9, "image_to_text_R@1": 0.5},
            }  # fmt: skip
        else:
            images = {"images": 10, "class_names": ["a", "b"], "templates": ["a photo of {}"]}
            classification[name] = {"path": name, **images, "plain": {"zero_shot_acc1": value}}
    content = {"written_by": "nuclr evaluate", "subject": {"path": subject, **about}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {"retrieval": retrieval, "classification": classification}))
    return path


def run_inline(command: list[str], log: Path) -> str | None:
    """Take the place of `launch.execute`: run the command in this process, which saves the imports."""
    from nuclr.cli import app

    before, sys.argv = sys.argv, ["nuclr", *command[3:]]
    try:
        app.main()
    except SystemExit as ended:
        return None if not ended.code else f"status {ended.code}"
    finally:
        sys.argv = before
    return None


def _cell(*values: float, text: str) -> dict:
    return {"mean": sum(values) / len(values), "std": 1.0, "per_seed": list(values), "text": text}


def table_content(label: str = "NUCLR", second: tuple[str, ...] = ("COCO", "Mean")) -> dict:
    """Return the content of table.json: two blocks, a row with published values, and rows without results."""
    ours = {
        "label": label, "objective": "nuclr", "runs": {}, "best": ["COCO"],
        "cells": {"COCO": _cell(20, 22, text="21.00 ± 1.41"), "Mean": _cell(20, text="20.00 (1 of 2)")},
        "published": {"COCO": {"mean": 20.5, "std": 0.2, "text": "20.50 ± 0.20"}}, "differences": {"COCO": 0.5},
    }  # fmt: skip
    other = {
        "label": "=CLIP", "objective": "clip", "runs": {}, "best": [], "published": {}, "differences": {},
        "cells": {"COCO": None, "Mean": None},
    }  # fmt: skip
    again = other | {"cells": dict.fromkeys(second)}
    test = {"title": "COCO", "kind": "retrieval", "test": "mscoco", "metric": "mean_R@1"}
    return {
        "title": label, "command": "nuclr table t.yaml", "published_in": "the paper", "protocol": ["Percent."],
        "seeds": [0, 1],
        "blocks": [
            {"title": "CC3M", "columns": ["COCO", "Mean"], "tests": [test], "rows": [ours, other]},
            {"title": "CC_12M", "columns": list(second), "tests": [test], "rows": [again]},
        ],
    }  # fmt: skip
