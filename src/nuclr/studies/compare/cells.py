"""A cell on disk: an ordinary run, and beside it what it did on every query.

`hits.npz` holds arrays "SET/ARRAY" (see `sets`), `state.npz` what the share of false negatives needs of the objective;
checkpoints are deleted once the state is kept, as a grid of hundreds of runs would fill the disk.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nuclr.models import DualEncoder
from nuclr.runs import checkpoint, folder
from nuclr.runs import components as parts
from nuclr.runs import settings as s
from nuclr.runs.launch import pick_device
from nuclr.studies.compare import measure as sets
from nuclr.studies.compare.arrays import group_names, read_groups, write_groups
from nuclr.training import loop

HITS, STATE = "hits.npz", "state.npz"
KEPT_STATE = ("zeta_x", "zeta_y", "xi_x", "xi_y", "tau_x", "tau_y", "log_scale")


def settings_from(values: dict[str, Any]) -> s.Settings:
    """The inverse of `settings.to_dict`."""
    sections = {
        "data": s.Data,
        "augment": s.Augmentation,
        "model": s.Model,
        "objective": s.Objective,
        "optimizer": s.Optimizer,
        "schedule": s.Schedule,
        "evaluate": s.Evaluate,
        "log": s.Log,
    }
    return s.Settings(**{key: sections[key](**value) if key in sections else value for key, value in values.items()})


def is_done(cell: Path, needed: Iterable[str]) -> bool:
    """Whether the run is finished and its outcome on all these sets is stored."""
    return folder.is_finished(cell) and set(needed) <= group_names(cell / HITS)


def run_cell(
    settings: s.Settings, cell: Path, tests: list[sets.TestSet], needed: list[str], loaders: parts.Loaders
) -> None:
    """Train or go on training, tidy up, measure; what is there already is not done again.

    The outcome comes last: it marks the cell as done, and whoever is killed before it finds the rest to do again.
    """
    if not folder.is_finished(cell):
        loop.train(settings, cell, resume=True, loaders=loaders)
    checkpoints = cell / folder.CHECKPOINTS
    if checkpoints.is_dir():
        _keep_state(cell)
        shutil.rmtree(checkpoints)
    if not is_done(cell, needed):
        model = DualEncoder.from_pretrained(cell / folder.MODEL).to(pick_device(settings.device))
        missing = set(needed) - group_names(cell / HITS)
        found = measure(model, settings, tests, missing, loaders)
        write_groups(cell / HITS, read_groups(cell / HITS) | found)


def measure(
    model: DualEncoder, settings: s.Settings, tests: list[sets.TestSet], missing: set[str], loaders: parts.Loaders
) -> dict[str, sets.Hits]:
    """The outcome on the missing sets."""
    data = settings.data
    found: dict[str, sets.Hits] = {}
    if missing & {sets.VAL, *sets.HALVES}:
        features = sets.open_features(model, settings, str(data.val), data.val_split or data.split, loaders)
        found |= sets.held_out_hits(features)
    for test in (test for test in tests if test.key in missing):
        found[test.key] = sets.test_hits(model, settings, test)
    return found


def _keep_state(cell: Path) -> None:
    if (cell / STATE).is_file():
        return
    found = checkpoint.load_last(cell / folder.CHECKPOINTS, lambda _: None)
    state = {} if found is None else found["objective"]
    write_groups(cell / STATE, {"": {name: state[name].float().numpy() for name in KEPT_STATE if name in state}})


def curve(cell: Path) -> list[tuple[int, float]]:
    """(epoch, mean recall@1 on the held-out pairs) of every evaluation."""
    rows = (json.loads(line) for line in (cell / folder.METRICS).read_text(encoding="utf-8").splitlines())
    return [(row["epoch"], row["val/mean_R@1"]) for row in rows if "val/mean_R@1" in row]


def seconds(cell: Path) -> float:
    """How long the training took, as its last process saw it."""
    results = folder.read_results(cell)
    return float(results["timing"]["seconds"]) if results else 0.0
