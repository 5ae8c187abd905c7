"""Train with the objectives' extensions and compare them with the plain objectives: views, networks, one pass.

    python benchmarks/extensions.py views --data ../shared/data [--only flickr8k] [--seeds 5] [--out runs/extensions]
    python benchmarks/extensions.py networks --data ../shared/data
    python benchmarks/extensions.py one-pass --data ../shared/data

Each row of a study is a config with overrides. No setting is tuned: rows of a study differ only in what it compares.
Every row is trained with several seeds and measured as in docs/results.md: recall@1 on the two halves of the held-out
pairs, each a gallery of its own, mean of both directions; differences from the study's first row of the same group
with 95 % intervals of a paired bootstrap over queries and seeds. Runs are kept in --out and not repeated. Two runs are
trained at a time, with one thread each.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nuclr import objectives
from nuclr.evaluation.intervals import Bootstrap, fold, per_seed
from nuclr.runs.run import Run
from nuclr.studies.engine.measure import HALVES, Hits, retrieval_hits, val_features

CONFIGS = Path(__file__).parent.parent / "configs"


class Row(NamedTuple):
    """A config with overrides.

    With `corrected`, the scores minus the popularity that the run's network predicts are ranked.
    """

    label: str
    config: str
    overrides: tuple[str, ...]
    corrected: bool = False


def flickr(label: str, *overrides: str) -> Row:
    return Row(label, "flickr8k_embeddings.yaml", ("data.root={data}/flickr8k", *overrides))


def multi30k(label: str, *overrides: str) -> Row:
    return Row(label, "multi30k.yaml", ("data.root={data}/multi30k", *overrides))


def builtin(label: str, *overrides: str) -> Row:
    return Row(
        label,
        "builtin.yaml",
        (
            "data.train=builtin:n=300000,split=train,size=16",
            "data.val=builtin:n=2000,split=val,size=16",
            "model.x.image_size=16",
            "model.y.encoder=bag_of_words",
            "schedule.epochs=1",
            *overrides,
        ),
    )


SOGCLR, NUCLR = ("objective.name=sogclr",), ("objective.name=nuclr-authors",)
# nuclr-authors has tables only
POPULARITY = ("objective.name=nuclr", "objective.popularity=network")
NORMALIZER = ("objective.normalizer=network",)
FAST_ZETA = (*NUCLR, "objective.zeta_lr=0.01", "schedule.zeta_frozen_epochs=0")


STUDIES: dict[str, dict[str, list[Row]]] = {
    "views": {
        f"flickr8k {name}, gamma {gamma}": [
            flickr("1 caption", *extra, f"objective.gamma={gamma}", "data.one_pair_per_x=true"),
            flickr("2 captions", *extra, f"objective.gamma={gamma}", "data.y.views=2"),
            flickr("5 captions", *extra, f"objective.gamma={gamma}", "data.y.views=5"),
        ]
        for gamma in (0.3, 0.8)
        for name, extra in (("SogCLR", SOGCLR), ("NUCLR", NUCLR))
    }
    | {
        f"multi30k {name}": [
            multi30k("1 + 1 texts, 145,000 visits", *extra),
            multi30k("2 + 2 texts, 145,000 visits", *extra, "data.x.views=2", "data.y.views=2", "schedule.epochs=5"),
        ]
        for name, extra in (("SogCLR", SOGCLR), ("NUCLR", FAST_ZETA))
    },
    "networks": {
        "flickr8k NUCLR": [
            flickr("tables"),
            flickr("tables, unbiased estimator", "objective.zeta_estimator=unbiased"),
            flickr("popularity network", *POPULARITY),
            flickr("popularity network", *POPULARITY)._replace(corrected=True),
        ],
        "multi30k NUCLR": [
            multi30k("tables", *FAST_ZETA),
            multi30k("popularity network", *FAST_ZETA, *POPULARITY),
            multi30k("popularity network", *FAST_ZETA, *POPULARITY)._replace(corrected=True),
        ],
    },
    "one-pass": {
        "multi30k": [
            multi30k("CLIP", "objective.name=clip"),
            multi30k("SogCLR, table", *SOGCLR),
            multi30k("SogCLR, network", *SOGCLR, *NORMALIZER),
            multi30k("SogCLR, network, gamma 0.1", *SOGCLR, *NORMALIZER, "objective.gamma=0.1"),
        ],
        "builtin 300000": [
            builtin("CLIP", "objective.name=clip"),
            builtin("SogCLR, table", *SOGCLR),
            builtin("SogCLR, network", *SOGCLR, *NORMALIZER),
        ],
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--only", default="", help="groups whose name contains this text")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/extensions"))
    options = parser.parse_args()
    groups = {name: rows for name, rows in STUDIES[options.study].items() if options.only in name}
    jobs = [
        (row, seed, folder(options.out, options.study, name, row, seed))
        for name, rows in groups.items()
        for seed in range(options.seeds)
        for row in rows
        if not row.corrected
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: train(*job, options.data), jobs))
    results = []
    for name, rows in groups.items():
        print(f"\n{name}, {options.seeds} seeds\n{'':34}recall@1, halves     difference from the first row")
        bootstrap, first = Bootstrap(options.seeds), None
        for row in rows:
            runs = [folder(options.out, options.study, name, row, seed) for seed in range(options.seeds)]
            hits = [measured(run, row.corrected) for run in runs]
            folds = [fold(half, [one[half] for one in hits]) for half in HALVES]
            first = first or folds
            seeds, gap = 100 * per_seed(folds), bootstrap.difference(folds, first)
            curve = 100 * np.mean([by_epoch(run) for run in runs], axis=0)
            label = row.label + ", corrected" * row.corrected
            print(
                f"{label:34}{seeds.mean():6.2f} ± {seeds.std(ddof=min(1, len(seeds) - 1)):.2f}       "
                f"{100 * gap.difference:+.2f} [{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]   by epoch, all pairs: "
                + " ".join(f"{value:.1f}" for value in curve)
            )
            results.append(
                {
                    "study": options.study,
                    "group": name,
                    "row": row.label,
                    "corrected": row.corrected,
                    "seeds": seeds.tolist(),
                    "by_epoch": curve.tolist(),
                }
                | {"gap": gap}
            )
    path = (
        Path(__file__).parent
        / "results"
        / f"extensions_{options.study}{'_' + options.only if options.only else ''}.json"
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1))


def folder(out: Path, study: str, group: str, row: Row, seed: int) -> Path:
    name = f"{group}_{row.label}".replace(" ", "_").replace(",", "").replace("+", "and")
    return out / study / name / f"seed{seed}"


def train(row: Row, seed: int, out: Path, data: str) -> None:
    if (out / "results.json").exists():
        return
    overrides = [text.format(data=data) for text in row.overrides]
    command = [sys.executable, "-m", "nuclr", "train", str(CONFIGS / row.config), *overrides]
    done = subprocess.run(
        [*command, f"seed={seed}", f"out={out}", "threads=1", "report=false", "--resume"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)}\n{done.stderr}")


def measured(folder: Path, corrected: bool) -> dict[str, Hits]:
    run = Run.open(folder)
    features, objective = val_features(run), run.objective
    if not corrected:
        return {name: retrieval_hits(own) for name, own in features.items()}
    assert isinstance(objective, objectives.NUCLR)
    hits = {}
    for name in HALVES:
        half = features[name]
        zeta = [run.temperature * objective.predict_popularity(getattr(half, side), side).log() for side in ("x", "y")]
        hits[name] = retrieval_hits(half, *zeta)
    return hits


def by_epoch(run: Path) -> np.ndarray:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["val/mean_R@1"] for line in lines if "val/mean_R@1" in line])


if __name__ == "__main__":
    main()
