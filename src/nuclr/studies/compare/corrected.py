"""Popularity-corrected retrieval of a trained cell, beside the plain one: `corrected.npz` in its folder.

Temperature and strength of the correction are chosen where the method's own settings were (on `tuned`), and the
outcome is stored for the sets that are reported. Two banks: "train", training pairs, which know nothing of the test
set; "queries", the set's own (transductive).
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nuclr.evaluation.correction import BANK_SIZE, Bank, Correction, choose
from nuclr.models import DualEncoder
from nuclr.runs import components as parts
from nuclr.runs import folder
from nuclr.runs.launch import pick_device
from nuclr.runs.settings import Settings
from nuclr.studies.compare import measure as sets
from nuclr.studies.compare.arrays import read_groups, write_groups

CORRECTED = "corrected.npz"
BANKS = ("train", "queries")
TEMPERATURES = (0.03, 0.05, 0.07, 0.1)
Fold = tuple[str, str]


def name_of(fold: Fold, bank: str) -> str:
    """Name in corrected.npz: where it was tuned, where it is reported, with which bank."""
    return f"{fold[0]}|{fold[1]}|{bank}"


def is_done(cell: Path, folds: Iterable[Fold]) -> bool:
    """Whether all of these are stored."""
    stored = read_groups(cell / CORRECTED)
    return all(name_of(fold, bank) in stored for fold in folds for bank in BANKS)


def correct_cell(
    settings: Settings, cell: Path, tests: list[sets.TestSet], folds: list[Fold], loaders: parts.Loaders
) -> None:
    """Add what is missing to corrected.npz."""
    stored = read_groups(cell / CORRECTED)
    missing = [fold for fold in folds if any(name_of(fold, bank) not in stored for bank in BANKS)]
    if not missing:
        return
    model = DualEncoder.from_pretrained(cell / folder.MODEL).to(pick_device(settings.device))
    data = settings.data
    source = parts.open_source(data, str(data.train), data.split, data.keep, check=False)
    train = sets.embed_source(model, settings, source, parts.make_loader(data, source.pairs, model, loaders))
    features = _features(model, settings, tests, {key for fold in missing for key in fold}, loaders)
    banks = {
        "train": dict.fromkeys(features, Bank(_some(train.x), _some(train.y))),
        "queries": {key: Bank(own.x, own.y) for key, own in features.items()},
    }
    for bank, of in banks.items():
        chosen: dict[str, Correction] = {}
        for tuned, reported in missing:
            if tuned not in chosen:
                at = features[tuned]
                chosen[tuned] = choose(at.x, at.y, at.pairs, of[tuned], temperatures=TEMPERATURES)
            stored[name_of((tuned, reported), bank)] = _apply(features[reported], of[reported], chosen[tuned])
    write_groups(cell / CORRECTED, stored)


def _features(
    model: DualEncoder, settings: Settings, tests: list[sets.TestSet], keys: set[str], loaders: parts.Loaders
) -> dict[str, sets.Features]:
    data = settings.data
    whole = sets.open_features(model, settings, str(data.val), data.val_split or data.split, loaders)
    found = {sets.VAL: whole}
    if keys & set(sets.HALVES):
        found |= {k: whole.of_images(rows) for k, rows in zip(sets.HALVES, sets.halves(len(whole.x)), strict=True)}
    for test in (test for test in tests if test.key in keys):
        found[test.key] = sets.test_features(model, settings, test)
    return found


def _apply(features: sets.Features, bank: Bank, chosen: Correction) -> sets.Hits:
    hits = sets.retrieval_hits(features, *chosen.biases(bank, features.x, features.y))
    return {**hits, "correction": np.array([chosen.temperature, chosen.strength])}


def _some(rows: Tensor) -> Tensor:
    """A bank of bounded size: rows at even distances."""
    if len(rows) <= BANK_SIZE:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, BANK_SIZE).long()]
