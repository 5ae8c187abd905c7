"""Studies small enough for a test: vectors, two epochs, with jobs run in this process; and made-up results."""

import importlib
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from nuclr.evaluation.intervals import Interval
from nuclr.studies.engine import plan
from nuclr.studies.engine.results import Block, Column, Comparison, Corrected, Difference, ResultRow, Value
from tests.training.runs import write_vectors

YAML = """
name: tiny
data: {{root: {root}, train: train.npz, val: val.npz, batch_size: 16}}
model: {{width: 8}}
optimizer: {{lr: 0.03}}
schedule: {{epochs: 2, zeta_frozen_epochs: 1}}
"""
TABLE = """
title: tiny
seeds: {seeds}
columns:
  - {{title: pairs, test: test.npz, kind: retrieval}}
  - {{title: classes, test: classes.npz, kind: classification}}
rows:
  - {{config: tiny.yaml, overrides: {{objective.name: clip}}}}
  - {{label: ours, config: tiny.yaml, overrides: {{objective.name: nuclr, objective.gamma: 0.5}}}}
"""


def write_config(folder: Path) -> Path:
    """Write vectors for training, validation and test, and a config file."""
    write_vectors(folder / "train.npz")
    write_vectors(folder / "val.npz", images=20, seed=1)
    write_vectors(folder / "test.npz", images=12, seed=2)
    path = folder / "tiny.yaml"
    path.write_text(YAML.format(root=folder))
    return path


def write_table(folder: Path, seeds: int = 1) -> Path:
    """Write the data, a config and a table file of two rows and two columns."""
    write_config(folder)
    rng = np.random.default_rng(3)
    x, prompts = rng.normal(size=(20, 12)).astype("f4"), rng.normal(size=(4, 8)).astype("f4")
    np.savez(folder / "classes.npz", x=x, labels=np.arange(20) % 4, prompts=prompts)
    path = folder / "table.yaml"
    path.write_text(TABLE.format(seeds=seeds))
    return path


class InlinePool:
    """A Pool without processes; jobs whose name starts with one of `broken` fail."""

    broken: tuple[str, ...] = ()

    def __init__(self, size, logs, done, program):
        self.done, self.waiting = done, deque()
        self.run_job = importlib.import_module(program).run_job

    def running(self):
        return []

    def run(self):
        shared = {}
        while self.waiting:
            job = self.waiting.popleft()
            failed = job.name.startswith(self.broken) if self.broken else False
            if not failed:
                self.run_job(job, shared)
            self.done(job, "broken" if failed else None)


@pytest.fixture
def inline(monkeypatch):
    """Run the jobs of studies in this process, which saves the imports of workers."""
    monkeypatch.setattr(plan, "Pool", InlinePool)


def comparison(label: str = "NUCLR", low: float = 0.5, high: float = 2.0) -> Comparison:
    """Return a comparison of two methods whose difference has this interval."""
    metrics = ("image_to_text_R@1", "text_to_image_R@1", "mean_R@1", "mean_R@5", "mean_R@10")
    columns = tuple(Column(f"val/{metric}", metric, "val", metric, metric == "mean_R@1") for metric in metrics)
    middle = (low + high) / 2

    def row(name: str, own: str, mean: float) -> ResultRow:
        value = Value(mean, 0.5, (mean - 0.5, mean + 0.5), 2)
        return ResultRow(
            name=name,
            label=own,
            method=name,
            values={column.key: value for column in columns},
            runs={f"{name}-seed=0": "done"},
            corrected=(Corrected("val", "train", value, Interval(1.25, 0.5, 2.0)),),
            chosen={"val": {"objective.temperature": 0.03}},
            epochs=(1, 2, 3),
            curves={"": ((mean - 2, mean - 1, mean), (mean - 3, mean - 2, mean - 1))},
        )

    return Comparison(
        kind="compare",
        title="Methods",
        command="nuclr compare",
        seeds=(0, 1),
        blocks=(Block("", columns, (row("sogclr", "SogCLR", 20.0), row("nuclr", label, 21.25))),),
        protocol=("Tuned alike.",),
        settings={"data.train": "t"},
        differences=(Difference("nuclr", "sogclr", "val", Interval(middle, low, high)),),
        failed={"clip 1": "killed"},
    )


def paper_table(label: str = "NUCLR", second: tuple[str, ...] = ("COCO", "Mean")) -> Comparison:
    """Return a table of two blocks: a row with published values, and rows without results."""
    ours = ResultRow(
        name=label,
        label=label,
        method="nuclr",
        values={"COCO": Value(21.0, 1.41, (20.0, 22.0), 2), "Mean": Value(20.0, None, (20.0,), 2)},
        runs={"nuclr-seed=0": "done", "nuclr-seed=1": "missing"},
        published={"COCO": Value(20.5, 0.2)},
    )
    other = ResultRow("=CLIP", "=CLIP", "clip", {"COCO": Value(19.0), "Mean": None})
    columns = (Column("COCO", "COCO", "COCO", "mean_R@1"), Column("Mean", "Mean", "Mean", "first"))
    more = tuple(Column(title, title, title, "mean_R@1") for title in second)
    return Comparison(
        kind="table",
        title=label,
        command="nuclr table t.yaml",
        seeds=(0, 1),
        blocks=(Block("CC3M", columns, (ours, other)), Block("CC_12M", more, (other,))),
        protocol=("Percent.",),
        published_in="the paper",
    )
