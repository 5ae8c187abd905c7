r"""Popularity-corrected retrieval compared with corrections of hubness from the literature, on held-out pairs.

    python benchmarks/correction.py --data ../shared/data --out runs/correction [--seeds 2] [--only multi30k]
        [--transductive]

Three data sets, whose models are trained into --out unless they are there:

- Flickr8k: linear heads on image and sentence embeddings (configs/flickr8k_embeddings.yaml) by NUCLR, SogCLR and CLIP
- captions: a ready-made sentence encoder. One caption of each image of Flickr8k searches the other four, and the
  reverse: the first caption, the second one, as many as there are seeds
- Multi30k: English and German descriptions of the same image (configs/multi30k.yaml), SogCLR

Held-out images are split into two halves, each with its own gallery. The setting with the highest mean reciprocal rank
on one half, mean of both directions, is used on the other half, and the other way round. All methods have the same bank
of training queries and training candidates, and 16 settings (benchmarks/peers.py). "ours" is tuned as the library does
it, per direction: `PopularityCorrection().fit(queries, candidates, pairs=...)` with the pairs of the other half chooses
among its default and 16 settings. "ours, default" sees no labels: it is `PopularityCorrection().fit(queries,
candidates)`. The table has recall@1 in percent, averaged over both halves and both directions. The last table averages
the data sets.

With --transductive, the queries of the half are the bank and its gallery the candidates: all queries are known before
the first one is answered, so these values must not be compared with the others. Ours is fitted with transductive=True.

Intervals are 95 % intervals of a paired bootstrap over images and, for trained models, seeds.
"""

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.evaluation.intervals import cut_halves
from nuclr.evaluation.ranks import Ranks, query_ranks, query_ranks_from_scores
from nuclr.popularity import PopularityCorrection
from nuclr.runs.features import PairFeatures
from nuclr.runs.run import Run
from nuclr.studies.tasks import Subject
from peers import PEERS, SETTINGS, Task

CONFIGS = Path(__file__).parent.parent / "configs"
ONE_CAPTION = "data.one_pair_per_x=true"  # per visit of an image: a fifth of the time
CAPTIONS = 5
BOOTSTRAPS = 2000
OURS, DEFAULT = "ours", "ours, default"
SHOWN = ("gain", "ours_minus_it", "default_minus_it")


class Model(NamedTuple):
    """A model of a data set: a config with overrides, or the sentence encoder if `config` is empty."""

    name: str
    config: str = ""
    overrides: tuple[str, ...] = ()


MODELS = {
    "flickr8k": [
        Model("nuclr", "flickr8k_embeddings.yaml", (ONE_CAPTION,)),
        Model("sogclr", "flickr8k_embeddings.yaml", (ONE_CAPTION, "objective.name=sogclr")),
        Model("clip", "flickr8k_embeddings.yaml", (ONE_CAPTION, "objective.name=clip", "objective.temperature=0.07")),
    ],
    "captions": [Model("sentence encoder")],
    "multi30k": [Model("sogclr", "multi30k.yaml")],
}


class Job(NamedTuple):
    """One seed of a model, or one rotation of the captions."""

    data_set: str
    model: Model
    seed: int
    data: Path
    out: Path
    bank_size: int
    transductive: bool

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.out / f"{self.data_set}_{self.model.name}" / f"seed{self.seed}"


class Outcome(NamedTuple):
    """Of one method under one setting on one half.

    Attributes:
        setting: As JSON; of ours, that of each direction.
        quality: Mean reciprocal rank, mean of both directions.
        hits: Sum of the hits of a cluster's queries, (clusters, 2 directions).
        count: Number of a cluster's queries, (clusters, 2 directions).

    """

    setting: str
    quality: float
    hits: np.ndarray
    count: np.ndarray


Outcomes = dict[str, list[Outcome]]  # of each method, one outcome per setting


# -- models ------------------------------------------------------------------------------------------------------------


def train(job: Job) -> None:
    """Train a run unless it is finished."""
    if (job.run / "results.json").exists():
        return
    command = [sys.executable, "-m", "nuclr", "train", str(CONFIGS / job.model.config), *job.model.overrides]
    settings = [f"data.root={job.data / job.data_set}", f"seed={job.seed}", f"out={job.run}", "threads=1"]
    done = subprocess.run(
        [*command, *settings, "report=false", "--resume"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)}\n{done.stderr}")


def run_features(job: Job) -> tuple[tuple[Tensor, Tensor], PairFeatures]:
    """Return the bank of a run and the features of its held-out pairs."""
    run = Run.open(job.run, device="cpu")
    assert run.val is not None
    bank = Subject.of_run(run).query_bank(run.train, job.bank_size)
    return (bank.x, bank.y), run.features(run.val)


def caption_features(job: Job) -> tuple[tuple[Tensor, Tensor], PairFeatures]:
    """Return one caption of each image as x, and its other captions as y."""

    def sides(name: str) -> tuple[Tensor, Tensor]:
        with np.load(job.data / "flickr8k" / "embeddings" / name) as file:
            captions = normalize(torch.from_numpy(file["y"]).float(), dim=1).unflatten(0, (-1, CAPTIONS))
        others = [number for number in range(CAPTIONS) if number != job.seed]
        return captions[:, job.seed], captions[:, others].flatten(0, 1)

    (bank_x, bank_y), (x, y) = sides("train.npz"), sides("dev.npz")
    row = torch.arange(len(y))
    links = torch.stack([row // (CAPTIONS - 1), row], dim=1)
    generator = torch.Generator().manual_seed(0)
    bank = [side[torch.randperm(len(side), generator=generator)[: job.bank_size]] for side in (bank_x, bank_y)]
    numbers = row.numpy()
    first = numbers[:: CAPTIONS - 1]
    return (bank[0], bank[1]), PairFeatures(x, y, links, links, numbers, first, numbers, torch.arange(len(x)))


# -- outcomes ----------------------------------------------------------------------------------------------------------


class Direction(NamedTuple):
    """A search on one half, and the bank."""

    queries: Tensor
    gallery: Tensor
    links: Tensor
    bank_queries: Tensor
    bank_candidates: Tensor


def directions(half: PairFeatures, bank: tuple[Tensor, Tensor] | None) -> tuple[Direction, Direction]:
    """Return x to y and y to x; without a bank, the half itself is the bank."""
    x, y = (half.x, half.y) if bank is None else bank
    return Direction(half.x, half.y, half.links, x, y), Direction(half.y, half.x, half.links.flip(1), y, x)


def our_corrections(
    search: Direction, other: Direction, transductive: bool
) -> tuple[PopularityCorrection, PopularityCorrection]:
    """Return the correction that is tuned on the other half, and the one without labels."""

    def fit(temperature: float | None, strength: float | None, where: Direction, **options: Any) -> Any:
        size = max(len(where.bank_queries), len(where.bank_candidates))
        correction = PopularityCorrection(temperature, strength, bank_size=size)
        return correction.fit(where.bank_queries, where.bank_candidates, transductive=transductive, **options)

    tuned = fit(None, None, other, pairs=(other.queries, other.gallery, other.links))
    if transductive:  # the settings are those of the other half, the queries are not
        tuned = fit(tuned.temperature_, tuned.strength_, search)
    return tuned, fit(None, None, search)


def ranks_by_method(search: Direction, other: Direction, transductive: bool) -> Iterator[tuple[str, str, Ranks]]:
    """Yield (method, setting, ranks) of all methods."""
    queries, gallery, links, bank_queries, bank_candidates = search
    yield "plain", "{}", query_ranks(queries, gallery, links)
    task = Task(queries, gallery, bank_queries, bank_candidates)
    for method, corrected in PEERS.items():
        for setting, scores in corrected(task):
            yield method, json.dumps(setting), query_ranks_from_scores(scores, links)
    for method, correction in zip((OURS, DEFAULT), our_corrections(search, other, transductive), strict=True):
        setting = {"temperature": correction.temperature_, "strength": correction.strength_, "std": task.scale}
        yield method, json.dumps(setting), query_ranks(queries, gallery, links, correction.bias(gallery))


def half_outcomes(half: PairFeatures, other: PairFeatures, bank: tuple[Tensor, Tensor] | None) -> Outcomes:
    """Return the outcome of every method and setting on one half."""
    _, of_x = torch.unique(half.x_group, return_inverse=True)
    of_y = torch.empty(len(half.y), dtype=torch.long)
    of_y[half.links[:, 1]] = of_x[half.links[:, 0]]
    size = int(of_x.max()) + 1
    both_ways = (
        ranks_by_method(search, other_search, bank is None)
        for search, other_search in zip(directions(half, bank), directions(other, bank), strict=True)
    )
    outcomes: Outcomes = {}
    for (method, setting, first), (same, other_setting, second) in zip(*both_ways, strict=True):
        assert same == method
        both = ((first, of_x), (second, of_y))
        quality = float(np.mean([float((1 / ranks.expected()).mean()) for ranks, _ in both]))
        hits = [np.bincount(cluster[ranks.query], ranks.hits(1), size) for ranks, cluster in both]
        count = [np.bincount(cluster[ranks.query], minlength=size) for ranks, cluster in both]
        chosen = setting if setting == other_setting else f"[{setting}, {other_setting}]"
        outcomes.setdefault(method, []).append(Outcome(chosen, quality, np.stack(hits, 1), np.stack(count, 1)))
    return outcomes


def measure(job: Job) -> list[Outcomes]:
    """Return the outcomes on both halves."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a solver that stops at a larger residual: the ranks hardly change
    bank, whole = run_features(job) if job.model.config else caption_features(job)
    first, second = (whole.of_x(rows) for rows in cut_halves(whole.x_group))
    given = None if job.transductive else bank
    return [half_outcomes(first, second, given), half_outcomes(second, first, given)]


# -- tables ------------------------------------------------------------------------------------------------------------


def tuned(parts: list[Outcomes], method: str) -> list[Outcome]:
    """Return the outcome of a method on both halves with the setting that is best on the other half."""
    best = [max(range(len(half[method])), key=lambda number: half[method][number].quality) for half in reversed(parts)]
    return [half[method][number] for half, number in zip(parts, best, strict=True)]


class Resampled(NamedTuple):
    """Recall@1 in percent, and in every resample."""

    value: float
    draws: np.ndarray

    def minus(self, other: "Resampled") -> dict[str, float]:
        """Return the difference with its interval."""
        low, high = np.quantile(self.draws - other.draws, [0.025, 0.975])
        return {"difference": self.value - other.value, "low": float(low), "high": float(high)}


def recall_of(models: list[list[list[Outcome]]], resample_seeds: bool, direction: int | None = None) -> Resampled:
    """Average recall@1 over models, seeds, halves and directions.

    Args:
        models: Per model and seed, the outcomes of both halves.
        resample_seeds: Whether the bootstrap draws the seeds of each model with replacement.
        direction: 0 for x to y, 1 for y to x. None: the mean of both.

    """
    rng = np.random.default_rng(0)  # the same draws for all methods
    columns = slice(None) if direction is None else slice(direction, direction + 1)
    weights = [
        rng.multinomial(len(half.hits), np.full(len(half.hits), 1 / len(half.hits)), BOOTSTRAPS)
        for half in models[0][0]
    ]
    values, draws = [], []
    for seeds in models:
        exact, drawn = [], []
        for outcome in seeds:
            pairs = list(zip(outcome, weights, strict=True))
            exact.append(np.mean([half.hits[:, columns].sum(0) / half.count[:, columns].sum(0) for half in outcome]))
            drawn.append(np.mean([(w @ h.hits / (w @ h.count))[:, columns].mean(1) for h, w in pairs], axis=0))
        times = rng.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), BOOTSTRAPS) / len(seeds)
        share = times if resample_seeds else np.full(times.shape, 1 / len(seeds))
        values.append(np.mean(exact))
        draws.append((np.stack(drawn, axis=1) * share).sum(axis=1))
    return Resampled(100 * float(np.mean(values)), 100 * np.mean(draws, axis=0))


def summarize(measured: dict[str, dict[str, list[list[Outcomes]]]]) -> dict[str, Any]:
    """Return, per data set and for their mean, a row per method.

    Args:
        measured: Per data set and model, one entry per seed: the outcomes on both halves.

    """
    methods = list(next(iter(next(iter(measured.values())).values()))[0][0])
    recalls: dict[str, dict[str, Resampled]] = {}
    tables: dict[str, Any] = {}
    for data_set, models in measured.items():
        outcomes = {m: [[tuned(seed, m) for seed in seeds] for seeds in models.values()] for m in methods}
        trained = data_set != "captions"
        recalls[data_set] = {m: recall_of(outcomes[m], trained) for m in methods}
        tables[data_set] = {
            m: {
                "x_to_y": recall_of(outcomes[m], trained, 0).value,
                "y_to_x": recall_of(outcomes[m], trained, 1).value,
                "by_model": dict(zip(models, (recall_of([o], trained).value for o in outcomes[m]), strict=True)),
                "settings": [json.loads(half.setting) for seeds in outcomes[m] for both in seeds for half in both],
            }
            for m in methods
        }
    if len(measured) > 1:
        # The sets are resampled independently of one another, so their draws are combined in random order.
        orders = [np.random.default_rng(number).permutation(BOOTSTRAPS) for number in range(len(recalls))]
        recalls["mean"] = {
            m: Resampled(
                float(np.mean([of[m].value for of in recalls.values()])),
                np.mean([of[m].draws[order] for of, order in zip(recalls.values(), orders, strict=True)], axis=0),
            )
            for m in methods
        }
        tables["mean"] = {m: {} for m in methods}
    for data_set, of in recalls.items():
        for m in methods:
            tables[data_set][m] |= {
                "recall@1": of[m].value,
                "gain": of[m].minus(of["plain"]),
                "ours_minus_it": of[OURS].minus(of[m]),
                "default_minus_it": of[DEFAULT].minus(of[m]),
            }
    return tables


def show(title: str, table: dict[str, dict[str, Any]]) -> None:
    """Print a table, the best method first."""
    print(f"\n{title}")
    heads = "".join(f"{text:>24}" for text in ("gain over plain", "ours minus it", "default minus it"))
    print(f"{'':18}{'recall@1':>9}{'x to y':>8}{'y to x':>8}{heads}")
    for method, row in sorted(table.items(), key=lambda item: -item[1]["recall@1"]):
        directions = "".join(f"{row[key]:>8.2f}" if key in row else " " * 8 for key in ("x_to_y", "y_to_x"))
        differences = ("{difference:+.2f} [{low:+.2f}, {high:+.2f}]".format(**row[key]) for key in SHOWN)
        cells = "".join(f"{text:>24}" for text in differences)
        print(f"{method:18}{row['recall@1']:>9.2f}{directions}{cells}")


def main() -> None:
    """Train what is missing, print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/correction"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=2, help="of each trained model")
    parser.add_argument("--only", default="", help="data sets whose name contains this text")
    parser.add_argument("--bank-size", type=int, default=3000, help="queries, and candidates")
    parser.add_argument("--transductive", action="store_true", help="the test queries are the bank")
    options = parser.parse_args()
    jobs = [
        Job(data_set, model, seed, options.data, options.out, options.bank_size, options.transductive)
        for data_set, models in MODELS.items()
        if options.only in data_set
        for model in models
        for seed in range(options.seeds)
    ]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, [job for job in jobs if job.model.config]))
    measured: dict[str, dict[str, list[list[Outcomes]]]] = {}
    with ProcessPoolExecutor(2) as processes:
        for job, outcomes in zip(jobs, processes.map(measure, jobs), strict=True):
            measured.setdefault(job.data_set, {}).setdefault(job.model.name, []).append(outcomes)
            print(f"{job.data_set}, {job.model.name}, {job.seed} done", file=sys.stderr, flush=True)
    tables = summarize(measured)
    bank = "the test queries as the bank (transductive)" if options.transductive else "training queries as the bank"
    for data_set, table in tables.items():
        show(f"{data_set}, {bank}, {SETTINGS} settings per method, chosen on the other half", table)
    name = "_".join(["correction", *(["transductive"] if options.transductive else []), *filter(None, [options.only])])
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    content = {"seeds": options.seeds, "bank_size": options.bank_size, "tables": tables}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
