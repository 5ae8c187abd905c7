"""A cell on disk: an ordinary run, and next to it the outcome of every query.

Files in the cell's folder, each with arrays named "GROUP/ARRAY" and written atomically:

    outcomes.npz            outcome of every query by set (see `measure`); it marks the cell as done
    corrected_outcomes.npz  the same for popularity-corrected ranking, by (tuned on, reported on, bank)
    state.npz               the part of the objective's state from which the share of false negatives is computed

Checkpoints are deleted once the state is saved; a grid of hundreds of runs would fill the disk.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from nuclr import files
from nuclr.data.builtin import BuiltinPairs
from nuclr.evaluation import Bank, Correction, choose_correction
from nuclr.evaluation.metric_names import score, val_metrics
from nuclr.objectives import entry
from nuclr.popularity.correction import BANK_SIZE
from nuclr.runs import components, folder
from nuclr.runs.features import PairFeatures, encode_side, encode_x, encode_y
from nuclr.runs.launch import pick_device
from nuclr.runs.run import Run
from nuclr.runs.settings import Settings
from nuclr.studies.compare import measure
from nuclr.studies.compare.measure import Hits, TestSet
from nuclr.training import loop

HITS, CORRECTED, STATE = "outcomes.npz", "corrected_outcomes.npz", "state.npz"
KEPT_STATE = ("zeta_x", "zeta_y", "xi_x", "xi_y", "tau_x", "tau_y", "log_scale")
BANKS = ("train", "queries")
CORRECTION_TEMPERATURES = (0.03, 0.05, 0.07, 0.1)
Groups = dict[str, dict[str, np.ndarray]]
SetFold = tuple[str, str]  # (set that settings were tuned on, set that is reported)


def open_cell(cell: Path, settings: Settings, loaders: components.Loaders) -> Run:
    """Return the cell as a run.

    The settings are those of the comparison, not those in config.yaml: `data.root` may have moved in the meantime.
    """
    return Run(cell, settings, best=False, device=pick_device(settings.device), loaders=loaders)


# ---------------------------------------------------------------------------------------------------------------------
# Training and measuring


def is_done(cell: Path, needed: Iterable[str]) -> bool:
    """Return True if the run is finished and its outcome on all needed sets is stored."""
    return folder.is_finished(cell) and set(needed) <= group_names(cell / HITS)


def run_cell(run: Run, tests: list[TestSet], needed: list[str], loaders: components.Loaders) -> None:
    """Train the cell or resume it, save the objective's state, delete checkpoints, and measure the missing sets.

    outcomes.npz is written last because it marks the cell as done; a process killed earlier leaves the rest to be
    redone.
    """
    cell = run.folder
    if not run.finished:
        loop.train(run.settings, cell, resume=True, loaders=loaders)
    checkpoints = cell / folder.CHECKPOINTS
    if checkpoints.is_dir():
        _keep_state(run)
        shutil.rmtree(checkpoints)
    if is_done(cell, needed):
        return
    missing = set(needed) - group_names(cell / HITS)
    hits: dict[str, Hits] = {}
    if missing & {measure.VAL, *measure.HALVES}:
        hits |= measure.held_out_hits(run)
    for test in (test for test in tests if test.key in missing):
        hits[test.key] = measure.test_hits(run, test)
    write_groups(cell / HITS, read_groups(cell / HITS) | hits)


def _keep_state(run: Run) -> None:
    if (run.folder / STATE).is_file():
        return
    state = run.objective_state or {}
    arrays = {name: state[name].float().numpy() for name in KEPT_STATE if name in state}
    write_groups(run.folder / STATE, {"": arrays})


def curve(cell: Path) -> list[tuple[int, float]]:
    """Return (epoch, score) of every evaluation during training.

    The score is the mean recall@1 on the (first) held-out pairs, or the accuracy of nearest neighbors.
    """
    rows = (json.loads(line) for line in (cell / folder.METRICS).read_text(encoding="utf-8").splitlines())
    scores = [(row["epoch"], score(val_metrics(row))) for row in rows]
    return [(epoch, value) for epoch, value in scores if value is not None]


# ---------------------------------------------------------------------------------------------------------------------
# Popularity-corrected retrieval


def corrected_name(fold: SetFold, bank: str) -> str:
    """Return the name of a group in corrected_outcomes.npz."""
    return f"{fold[0]}|{fold[1]}|{bank}"


def is_corrected(cell: Path, folds: Iterable[SetFold]) -> bool:
    """Return True if corrected_outcomes.npz holds all of these folds with every bank."""
    stored = group_names(cell / CORRECTED)
    return all(corrected_name(fold, bank) in stored for fold in folds for bank in BANKS)


def correct_cell(run: Run, tests: list[TestSet], folds: list[SetFold]) -> None:
    """Add the missing folds to corrected_outcomes.npz.

    Temperature and strength of the correction are chosen on the set that the method's settings were tuned on. There are
    two banks: "train" holds training pairs, which carry no information about the test set; "queries" holds the set's
    own queries (transductive).
    """
    stored = read_groups(run.folder / CORRECTED)
    missing = [fold for fold in folds if any(corrected_name(fold, bank) not in stored for bank in BANKS)]
    if not missing:
        return
    features = _features(run, tests, {key for fold in missing for key in fold})
    banks = {
        "train": dict.fromkeys(features, _train_bank(run)),
        "queries": {key: Bank(own.x, own.y) for key, own in features.items()},
    }
    for name, bank in banks.items():
        chosen: dict[str, Correction] = {}
        for tuned, reported in missing:
            if tuned not in chosen:
                at = features[tuned]
                chosen[tuned] = choose_correction(
                    at.x, at.y, at.links, bank[tuned], temperatures=CORRECTION_TEMPERATURES
                )
            stored[corrected_name((tuned, reported), name)] = _corrected_hits(
                features[reported], bank[reported], chosen[tuned]
            )
    write_groups(run.folder / CORRECTED, stored)


def _features(run: Run, tests: list[TestSet], keys: set[str]) -> dict[str, PairFeatures]:
    whole = measure.val_features(run)
    features = {measure.VAL: whole}
    if keys & set(measure.HALVES):
        halves = measure.halves(whole.x_group)
        features |= {key: whole.of_x(rows) for key, rows in zip(measure.HALVES, halves, strict=True)}
    for test in (test for test in tests if test.key in keys):
        features[test.key] = measure.test_features(run, test)
    return features


def _corrected_hits(features: PairFeatures, bank: Bank, chosen: Correction) -> Hits:
    hits = measure.retrieval_hits(features, *chosen.biases(bank, features.x, features.y))
    return {**hits, "correction": np.array([chosen.temperature, chosen.strength])}


def _train_bank(run: Run) -> Bank:
    """Return a bank of up to BANK_SIZE distinct x and y of the training pairs, at even distances."""
    pairs, numbers = run.train.pairs, run.train.numbers
    sides = []
    for side in components.SIDES:
        _, first = np.unique(getattr(pairs, f"{side}_id")[numbers], return_index=True)
        if len(first) > BANK_SIZE:
            first = first[np.linspace(0, len(first) - 1, BANK_SIZE).astype(np.int64)]
        encoder, loader = getattr(run.model, side), run.loader(pairs)
        sides.append(encode_side(encoder, loader, side, numbers[first], run.encoding))
    return Bank(*sides)


# ---------------------------------------------------------------------------------------------------------------------
# Groups of arrays in one .npz file


def read_groups(path: Path) -> Groups:
    """Return all arrays by group; an empty dict if the file does not exist."""
    groups: Groups = {}
    if not path.is_file():
        return groups
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            group, _, key = name.rpartition("/")
            groups.setdefault(group, {})[key] = archive[name]
    return groups


def group_names(path: Path) -> set[str]:
    """Return the names of the groups without reading any array."""
    if not path.is_file():
        return set()
    with np.load(path, allow_pickle=False) as archive:
        return {name.rpartition("/")[0] for name in archive.files}


def write_groups(path: Path, groups: Groups) -> None:
    """Write the groups atomically."""
    arrays = {
        f"{group}/{key}" if group else key: array for group, members in groups.items() for key, array in members.items()
    }
    with files.write_atomically(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


# -- share of false negatives ------------------------------------------------------------------------------------------


FALSE_NEGATIVES = "false_negatives.npz"
FALSE_NEGATIVE_PAIRS = 2000  # training pairs: a matrix of 4 million weights


def has_false_negatives(settings: Settings) -> bool:
    """Return True if the truth is known and the objective weights its negatives by a softmax."""
    builtin = str(settings.data.train).partition(":")[0] == "builtin"
    return builtin and entry(settings.objective.name).softmax_negatives


def false_negative_share(
    scores: Tensor, false: Tensor, excluded: Tensor, tau: Tensor | float, zeta: Tensor | float = 0.0
) -> Tensor:
    """Return the share of the negatives' weight that lies on false negatives, per anchor.

    Args:
        scores: (n, m), scores of anchors and candidates.
        false: (n, m) bool, true for false negatives.
        excluded: (n, m) bool, true for pairs that are not negatives.
        tau: Temperature, a number or (n, 1).
        zeta: Log popularity of the candidates times the temperature, a number or (m,).

    Returns:
        One share per anchor that has negatives.

    """
    logits = ((scores - zeta) / tau).masked_fill(excluded, -torch.inf)
    kept = ~excluded.all(dim=1)
    return (logits[kept].softmax(dim=1) * false[kept]).sum(dim=1)


def measure_false_negatives(run: Run) -> None:
    """Write false_negatives.npz: `weighted`, the mean share of each side, and `uniform`, the share at equal weights."""
    cell = run.folder
    if (cell / FALSE_NEGATIVES).is_file():
        return
    pairs, numbers = run.train.pairs, run.train.numbers[:FALSE_NEGATIVE_PAIRS]
    truth = cast(BuiltinPairs, pairs).truth
    x = encode_x(run.model, run.loader(pairs), numbers, *run.encoding)
    y = encode_y(run.model, run.loader(pairs), numbers, *run.encoding)
    false = torch.from_numpy(truth.false_negatives(numbers))
    y_id = torch.from_numpy(pairs.y_id[numbers])
    excluded = y_id[:, None] == y_id if run.settings.data.mask else torch.eye(len(numbers), dtype=torch.bool)
    false &= ~excluded
    state = read_groups(cell / STATE).get("", {})
    tau = _tau(state, numbers, run.temperature)
    scores = x @ y.T
    sides = [
        false_negative_share(scores, false, excluded, tau["x"], _rows(state, "zeta_y", numbers)),
        false_negative_share(scores.T, false.T, excluded.T, tau["y"], _rows(state, "zeta_x", numbers)),
    ]
    uniform = false.sum() / (~excluded).sum()
    weighted = np.array([float(side.mean()) for side in sides])
    write_groups(cell / FALSE_NEGATIVES, {"": {"weighted": weighted, "uniform": np.array(float(uniform))}})


def _tau(state: dict[str, np.ndarray], numbers: np.ndarray, temperature: float) -> dict[str, Tensor | float]:
    """Return the temperature of each side's anchors: individual ones, the learnt one, or the one of the settings."""
    if "tau_x" in state:
        return {side: torch.from_numpy(state[f"tau_{side}"][numbers])[:, None] for side in ("x", "y")}
    learnt = float(np.exp(-state["log_scale"])) if "log_scale" in state else temperature
    return {"x": learnt, "y": learnt}


def _rows(state: dict[str, np.ndarray], name: str, numbers: np.ndarray) -> Tensor | float:
    return torch.from_numpy(state[name][numbers]) if name in state else 0.0
