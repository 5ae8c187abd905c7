"""`nuclr demo`: three promises of this package, shown on built-in pairs in two minutes.

Three methods with three seeds each train the same model. Each run then searches the held-out pairs in both directions,
as they are and with the popularity of training pairs subtracted. The run of NUCLR with the first seed is in the folder
itself, the others are in its folder `seeds`. This module is also the program of the workers.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nuclr import files
from nuclr.data.opening import open_pairs
from nuclr.errors import UserError
from nuclr.evaluation.ranks import rank_correlation
from nuclr.popularity import PopularityCorrection, hubness
from nuclr.runs import folder
from nuclr.runs.jobs import serve
from nuclr.runs.run import Run
from nuclr.runs.settings import Settings
from nuclr.studies.engine import measure
from nuclr.studies.engine.measure import VAL, Job
from nuclr.studies.engine.plan import Plan, Row, Study, change
from nuclr.training.logging import duration

MAIN = "nuclr-authors"
METHODS = ("clip", "sogclr", MAIN)  # one temperature suits all three: docs/results.md
LABELS = {"clip": "CLIP", "sogclr": "SogCLR", MAIN: "NUCLR"}
# Also in configs/demo.yaml; here so that the demo works from a wheel.
SETTINGS: dict[str, Any] = {
    "name": "demo",
    "data": {
        "train": "builtin:n=4000,shapes=2",
        "val": "builtin:n=2000,shapes=2,split=test",
        "batch_size": 16,
    },
    "augment": {"enabled": False},
    "model": {
        "x": {"encoder": "tiny_edges", "head": "mlp", "frozen": True},
        "y": {"encoder": "bag_of_words"},
        "width": 128,
    },
    "objective": {
        "name": MAIN,
        "temperature": 0.15,
        "gamma": 0.8,
        "zeta_init": 0.0,
        "zeta_lr": 3.0e-3,
        "zeta_lr_ratio_x": 1.0,
        "zeta_momentum": 0.0,
        "zeta_velocity_init": "zero",
        "xi_rule": "norm",
        "xi_update": "step",
    },
    "schedule": {"epochs": 8, "warmup_steps": 50, "zeta_frozen_epochs": 2},
    "evaluate": {"every": 4},
}
# Kernels for other instruction sets round differently, and training amplifies that. With these, and one thread per
# worker, the tables are the same on all x86 machines with AVX2.
KERNELS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SEEDS = 3
ROUND_SECONDS = 20  # of a model on one core; the progress lines estimate from the models that are finished
MEASURED = "search.json"
SUMMARY = "demo.json"
BANK = 3000  # training pairs on which popularity is solved
K = 10
SHOWN = 4  # captions that are named as the most popular, and as many as the least popular
DIRECTIONS = {"image_to_text": "picture to caption", "text_to_image": "caption to picture"}


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """A search of the held-out pairs in one direction; pairs of values are before and after correction.

    Attributes:
        queries: Number of queries.
        chance: Recall@1 of random scores.
        recall: Recall@1.
        never_found: Share of items that are in no query's first ten.
        largest: N_10 of the item that is found most often.
        correlation: Rank correlation of popularity with N_10.
        captions: The most popular captions with their N_10, and as many of the least popular ones.

    """

    queries: int
    chance: float
    recall: tuple[float, float]
    never_found: tuple[float, float]
    largest: tuple[int, int]
    correlation: float
    captions: tuple[tuple[str, int], ...] = ()


Results = dict[str, list[dict[str, Search]]]  # by method, per seed: by direction


def run_job(job: Job, shared: dict[Any, Any]) -> None:
    """Train or resume a run, and write search.json; nothing that is done already is done again."""
    measure.run_job(job, shared)
    path = Path(job.folder)
    if not (path / MEASURED).is_file():
        run = Run.open(
            path,
            device=job.settings["device"],
            loaders=shared,
        )
        files.write_json(path / MEASURED, files.to_record(measure_run(run)))


def measure_run(run: Run) -> dict[str, Search]:
    """Search the held-out pairs of a run in both directions, with and without correction.

    Args:
        run: A finished run with held-out pairs.

    Returns:
        The search by direction, such as "image_to_text".

    """
    assert run.val is not None and run.results is not None
    held_out = run.features(run.val)
    bank = run.features(run.train, run.train.numbers[:BANK])
    x, y = run.sides
    val = run.results.val
    there, bias, counts = _search(bank.x, bank.y, held_out.x, held_out.y, held_out.links, val[f"{x}_to_{y}_chance@1"])
    links = held_out.links.flip(1)
    back, _, _ = _search(bank.y, bank.x, held_out.y, held_out.x, links, val[f"{y}_to_{x}_chance@1"])
    order = bias.argsort(descending=True, stable=True).tolist()
    shown = min(SHOWN, len(order) // 2)
    captions = []
    for row in [*order[:shown], *order[-shown:]]:
        captions.append((str(run.val.pairs.item("y", int(held_out.y_number[row]))), int(counts[row])))
    return {f"{x}_to_{y}": dataclasses.replace(there, captions=tuple(captions)), f"{y}_to_{x}": back}


def _search(
    bank_queries: Tensor,
    bank_items: Tensor,
    queries: Tensor,
    gallery: Tensor,
    links: Tensor,
    chance: float,
) -> tuple[Search, Tensor, Tensor]:
    """Return the search, the bias and N_10 of every item."""
    bias = PopularityCorrection().fit(bank_queries, bank_items).bias(gallery)
    k = min(K, len(gallery))
    plain = hubness(queries, gallery, k)
    corrected = hubness(queries, gallery, k, bias=bias)
    search = Search(
        queries=len(queries),
        chance=float(chance),
        recall=(plain.recall(links, 1), corrected.recall(links, 1)),
        never_found=(plain.never_found, corrected.never_found),
        largest=(int(plain.counts.max()), int(corrected.counts.max())),
        correlation=rank_correlation(bias, plain.counts),
    )
    return search, bias, plain.counts


# -- all runs ----------------------------------------------------------------------------------------------------------


class Demo(Study):
    """The runs of the demo.

    Args:
        settings: Settings of the run of NUCLR with the first seed.
        out: Its folder.
        say: Called with lines about the progress.

    """

    program = "nuclr.studies.demo"

    def __init__(
        self,
        settings: Settings,
        out: Path,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        base = dataclasses.replace(settings, report=False)
        rows = [Row(m, LABELS[m], change(base, "objective.name", m), ()) for m in METHODS]
        seeds = tuple(range(settings.seed, settings.seed + SEEDS))
        super().__init__(
            Plan(
                "nuclr demo",
                "demo",
                tuple(rows),
                seeds,
                keep_checkpoints=True,
            ),
            out,
            say,
        )
        self.logs = out / folder.SEEDS / "logs"  # the folder itself must be empty before its run

    def path(self, run: Settings) -> Path:
        """Return the folder of a run."""
        method = run.objective.name
        if (method, run.seed) == (MAIN, self.plan.seeds[0]):
            return self.out
        return self.out / folder.SEEDS / f"{method}-{run.seed}"

    def is_done(self, run: Settings, needed: Collection[str]) -> bool:
        """Return True if the run is finished and its search is stored."""
        return super().is_done(run, needed) and (self.path(run) / MEASURED).is_file()

    def results(self) -> Results:
        """Return the searches of all runs, which are also written to demo.json.

        Raises:
            UserError: A run failed.

        """
        for name, error in self.failed.items():
            raise UserError(f"{name}: {error}")
        results: Results = {}
        for row in self.plan.rows:
            measured = [self.path(run) / MEASURED for run in self.finals(row)[VAL]]
            searches = [
                files.from_record(dict[str, Search], files.parse_json(files.read_bytes(path))) for path in measured
            ]
            results[row.name] = searches
        files.write_json(self.out / SUMMARY, files.to_record(results))
        return results


# -- what is printed ---------------------------------------------------------------------------------------------------


def opening(settings: Settings, cores: int) -> str:
    """Return what is about to happen, and how long it takes."""
    pairs = open_pairs(str(settings.data.train))
    seconds = ROUND_SECONDS * math.ceil(SEEDS * len(METHODS) / cores)
    *others, last = LABELS.values()
    return f'''nuclr demo: {len(pairs):,} small drawings with captions, such as "{pairs.item("y", 0)}"

1. Training at a small batch size. {", ".join(others)} and {last} train the same model on the same pairs,
   {settings.data.batch_size} at a time, with {SEEDS} seeds each: {SEEDS * len(METHODS)} models, \
about {duration(seconds)} on {cores} CPU cores.'''


def closing(
    out: Path,
    page: bool,
    seconds: float,
) -> str:
    """Return where everything is, and commands for the user's own data."""
    lines = [f"\nDone in {seconds:.0f} s. The first {LABELS[MAIN]} run is in {out}, the others are in {out}/seeds."]
    if page:
        lines.append(f"Its page, {out}/report.html, shows curves, examples with mistakes, popular and rare items.")
    commands = {
        "nuclr train data.train=pairs.csv data.val=held_out.csv": "train on your pairs (columns: image, text)",
        "nuclr hubness queries.npy gallery.npy": "correct a search with any model's vectors",
        f"nuclr export {out} --to onnx --out model": "use a trained model elsewhere",
    }
    lines += ["Next:", *(f"   {command:56} {purpose}" for command, purpose in commands.items())]
    return "\n".join(lines)


def results_text(results: Results) -> str:
    """Return the three parts of the results."""
    main = [run["image_to_text"] for run in results[MAIN]]
    chance = [f"{100 * results[MAIN][0][direction].chance:.2f}" for direction in DIRECTIONS]
    lines = [
        f"   Recall@1 in %: how often the first result is the right one, on {main[0].queries:,} pairs not used in "
        "training.",
        f"   Mean ± standard deviation over {SEEDS} seeds; differences are taken seed by seed.",
        _row("", DIRECTIONS.values(), 22),
        _row("chance", chance, 22),
    ]
    recall = {method: [_values(results, method, d, "recall")[0] for d in DIRECTIONS] for method in METHODS}
    for method in METHODS:
        lines.append(_row(LABELS[method], map(_spread, recall[method]), 22))
    for method in METHODS[:-1]:
        gains = [_spread(ours - theirs, "+") for ours, theirs in zip(recall[MAIN], recall[method], strict=True)]
        lines.append(_row(f"{LABELS[MAIN]} - {LABELS[method]}", gains, 22))
    lines += [
        "",
        "2. Search, corrected. Some items are close to far too many queries (hubs), and others are never found. The",
        "   popularity of items is solved on training pairs, without labels, and subtracted from their scores.",
        "   The models stay as they are. N_10 of an item: how many queries have it in their first ten results.",
        _row("", LABELS.values()),
    ]
    for direction, label in DIRECTIONS.items():
        ends = [_values(results, method, direction, "recall") for method in METHODS]
        never = [_values(results, method, direction, "never_found") for method in METHODS]
        largest = [_values(results, method, direction, "largest") / 100 for method in METHODS]
        lines += [
            f"   {label}",
            _row("  recall@1 in %", map(_change, ends)),
            _row("    change", [_spread(after - before, "+") for before, after in ends]),
            _row("  never found, in %", map(_change, never)),
            _row("  N_10 of the worst hub", [_change(values, digits=0) for values in largest]),
        ]
    correlation = _spread(np.array([search.correlation for search in main]), digits=2)
    lines += [
        "",
        f"3. What is popular. The popularity of captions under {LABELS[MAIN]}, solved on training pairs, has a rank",
        f"   correlation of {correlation} with N_10 in the search of the held-out pictures.",
    ]
    captions = main[0].captions
    half = len(captions) // 2
    for label, shown in (("most", captions[:half]), ("least", captions[half:])):
        lines.append(f"   N_10   {label} popular captions")
        lines += [f"   {count:>4}   {text}" for text, count in shown]
    return "\n".join(lines)


def _values(
    results: Results,
    method: str,
    direction: str,
    field: str,
) -> np.ndarray:
    """Return the values of all seeds before and after correction in percent, (2, seeds)."""
    return 100 * np.array([getattr(run[direction], field) for run in results[method]]).T


def _change(values: np.ndarray, digits: int = 1) -> str:
    before, after = values.mean(axis=1)
    return f"{before:.{digits}f} -> {after:.{digits}f}"


def _spread(
    values: np.ndarray,
    sign: str = "",
    digits: int = 1,
) -> str:
    """Return "mean ± standard deviation"."""
    return f"{values.mean():{sign}.{digits}f} ± {values.std(ddof=1):.{digits}f}"


def _row(
    label: str,
    cells: Iterable[str],
    width: int = 15,
) -> str:
    return f"   {label:26}" + "".join(f"{cell:>{width}}" for cell in cells)


if __name__ == "__main__":
    os.environ.update(KERNELS)  # they are read when the first kernel runs
    serve(Job, run_job)
