"""The default temperature and strength of `PopularityCorrection` compared with tuned ones, on held-out pairs.

    python benchmarks/default_correction.py RUN... [--texts TRAIN.npz VAL.npz] [--out FILE.json]

Each run contributes its validation pairs, with its training pairs as the bank. Runs on the same training data form one
data set, and their recall is averaged. `--texts` adds a data set without training: the y of embedding files in which
every x has the same number of y. The first y of each x searches the other ones, and the reverse.

Validation pairs are split into two halves, each with its own gallery. On one half, the setting with the highest mean
reciprocal rank is chosen twice: one for all data sets together (the default), and one per data set (tuned). Recall@1 in
percent, the mean of both directions, is reported on the other half. Then the halves change places.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.evaluation.ranks import query_ranks
from nuclr.popularity.correction import (
    BANK_SIZE,
    DEFAULT_STRENGTH,
    DEFAULT_TEMPERATURE_FACTOR,
    PopularityCorrection,
    score_std,
)
from nuclr.runs.run import Run
from nuclr.studies.compare.measure import halves
from nuclr.studies.evaluate.subject import query_bank, subject_of_run

FACTORS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)  # temperatures in standard deviations of the scores
STRENGTHS = (0.5, 0.75, 1.0, 1.25)
PLAIN = (0.0, 0.0)
SHIPPED = (DEFAULT_TEMPERATURE_FACTOR, DEFAULT_STRENGTH)

Half = tuple[Tensor, Tensor, Tensor]  # x, y, links
Outcomes = dict[tuple[float, float], list[tuple[float, float]]]  # setting -> (recall@1, reciprocal rank) of each run


def run_pairs(path: Path) -> tuple[str, tuple[Tensor, Tensor], list[Half]]:
    """Return the training data of a run, its bank, and both halves of its validation pairs."""
    run = Run.open(path, device="cpu")
    if run.val is None:
        raise SystemExit(f"{path}: needs a run with held-out pairs (data.val)")
    bank = query_bank(subject_of_run(run), run.train.pairs, run.train.numbers, BANK_SIZE)
    whole = run.features(run.val)
    parts = [whole.of_x(rows) for rows in halves(whole.x_group)]
    return str(run.settings.data.train), bank, [(half.x, half.y, half.links) for half in parts]


def text_pairs(train: Path, val: Path) -> tuple[str, tuple[Tensor, Tensor], list[Half]]:
    """Return the first y of each x as side x and its other y as side y."""

    def sides(path: Path) -> tuple[Tensor, Tensor]:
        with np.load(path) as file:
            grouped = normalize(torch.from_numpy(file["y"]).float(), dim=1).unflatten(0, (len(file["x"]), -1))
        return grouped[:, 0], grouped[:, 1:]

    (bank_x, bank_y), (x, y) = sides(train), sides(val)
    parts: list[Half] = []
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        own = torch.arange(y[rows].shape[0] * y.shape[1])
        parts.append((x[rows], y[rows].flatten(0, 1), torch.stack([own // y.shape[1], own], dim=1)))
    return f"texts of {val.name}", (bank_x, bank_y.flatten(0, 1)), parts


def outcomes(bank: tuple[Tensor, Tensor], parts: list[Half]) -> list[dict[tuple[float, float], tuple[float, float]]]:
    """Return, per half, (recall@1, mean reciprocal rank) of every setting, the mean of both directions."""
    rows: list[dict[tuple[float, float], list[tuple[float, float]]]] = [{}, {}]
    for side in (0, 1):
        queries, candidates = bank if side else bank[::-1]
        scale = score_std(queries, candidates)
        for factor in (0.0, *FACTORS):
            fix = PopularityCorrection(max(factor, 1e-9) * scale, 1.0)
            if factor:
                fix.fit(queries, candidates, max_iterations=300)
            for half, (x, y, links) in zip(rows, parts, strict=True):
                asked, gallery, own = (x, y, links) if side else (y, x, links.flip(1))
                zeta = fix.bias(gallery) if factor else torch.zeros(len(gallery))
                for strength in STRENGTHS if factor else (0.0,):
                    ranks = query_ranks(asked, gallery, own, strength * zeta)
                    quality = 100 * float(ranks.hits(1).mean()), 100 * float((1 / ranks.expected()).mean())
                    half.setdefault((factor, strength), []).append(quality)
    return [{key: tuple(np.mean(values, axis=0).tolist()) for key, values in half.items()} for half in rows]


def compare(sets: dict[str, list[Outcomes]]) -> Iterator[dict[str, Any]]:
    """Yield a row per half and data set."""

    def mean(name: str, half: int, setting: tuple[float, float], column: int) -> float:
        return float(np.mean([run[column] for run in sets[name][half][setting]]))

    settings = [(factor, strength) for factor in FACTORS for strength in STRENGTHS]
    for tuning, reporting in ((0, 1), (1, 0)):
        chosen = max(settings, key=lambda s: sum(mean(name, tuning, s, 1) for name in sets))
        for name in sets:
            tuned = max(settings, key=lambda s: mean(name, tuning, s, 1))
            columns = {"plain": PLAIN, "default": chosen, "shipped": SHIPPED, "tuned": tuned}
            recall = {key: mean(name, reporting, setting, 0) for key, setting in columns.items()}
            yield {"half": reporting, "data": name, "settings": columns, "recall@1": recall}


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--texts", nargs=2, type=Path, metavar=("TRAIN.npz", "VAL.npz"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "default_correction.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    sources = [run_pairs(run) for run in options.runs] + ([text_pairs(*options.texts)] if options.texts else [])
    sets: dict[str, list[Outcomes]] = {}
    for name, bank, parts in sources:
        for half, measured in zip(sets.setdefault(name, [{}, {}]), outcomes(bank, parts), strict=True):
            for setting, quality in measured.items():
                half.setdefault(setting, []).append(quality)
        print(f"{name} done", file=sys.stderr, flush=True)
    rows = list(compare(sets))
    print(
        f"{'data':30}{'half':>6}{'plain':>8}{'default':>9}{'shipped':>9}{'tuned':>8}{'default - tuned':>17}  settings"
    )
    for row in rows:
        recall, chosen = row["recall@1"], row["settings"]
        gap = recall["default"] - recall["tuned"]
        print(
            f"{row['data']:30}{row['half']:>6}{recall['plain']:>8.2f}{recall['default']:>9.2f}{recall['shipped']:>9.2f}"
            f"{recall['tuned']:>8.2f}{gap:>+17.2f}  default {chosen['default']}, tuned {chosen['tuned']}"
        )
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
