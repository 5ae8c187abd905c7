"""A comparison small enough for a test: vectors, two epochs, with jobs run in this process."""

from collections import deque
from pathlib import Path

from nuclr.runs import config
from nuclr.runs.settings import Settings
from nuclr.studies.compare import plan, pool, study
from tests.training.runs import write_vectors

YAML = """
name: tiny
data: {{root: {root}, train: train.npz, val: val.npz, batch_size: 16}}
model: {{width: 8}}
optimizer: {{lr: 0.03}}
schedule: {{epochs: 2, zeta_frozen_epochs: 1}}
"""


def write_config(folder: Path) -> Path:
    write_vectors(folder / "train.npz")
    write_vectors(folder / "val.npz", images=20, seed=1)
    write_vectors(folder / "test.npz", images=12, seed=2)
    path = folder / "tiny.yaml"
    path.write_text(YAML.format(root=folder))
    return path


def base(folder: Path):
    return config.load(write_config(folder))


def rows(methods, temperatures=(0.03,), baseline=None):
    grids = plan.temperature_grids(methods, temperatures, [f"{m}.temperature=0.03" for m in methods if m == "siglip"])
    tuned = plan.own_hyperparameters(methods, [], Settings())
    return plan.method_rows(methods, grids, tuned, 0, baseline or methods[0])


def request(settings, chosen, seeds=(0, 1), **options):
    methods = list(dict.fromkeys(row.method for row in chosen))
    grids = {row.method: (0.03,) for row in chosen}
    tuned = plan.own_hyperparameters(methods, [], Settings())
    return study.Request(settings, tuple(chosen), seeds, grids, tuned, **options)


class InlinePool:
    """A Pool without processes."""

    def __init__(self, size, logs, done):
        self.done, self.waiting = done, deque()

    def add(self, job):
        self.waiting.append(job)

    def running(self):
        return []

    def run(self):
        shared = {}
        while self.waiting:
            job = self.waiting.popleft()
            pool.run_job(job, shared)
            self.done(job, None)
