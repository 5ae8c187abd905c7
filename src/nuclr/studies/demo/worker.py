"""One run of the demo: train it, then search with it before and after correction by popularity."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nuclr import files
from nuclr.evaluation.ranks import rank_correlation
from nuclr.popularity import ConvergenceWarning, PopularityCorrection, hubness
from nuclr.runs import components, config, folder
from nuclr.runs.features import PairFeatures
from nuclr.runs.run import Run
from nuclr.runs.settings import Settings
from nuclr.studies.compare.pool import serve
from nuclr.training.loop import train

MEASURED = "search.json"
BANK = 3000  # training pairs on which popularity is solved
K = 10
SHOWN = 4  # captions that are named as the most popular, and as many as the least popular


@dataclass(frozen=True)
class Job:
    """A run to train and measure: the settings by section, and the folder."""

    settings: dict[str, Any]
    folder: str

    @property
    def name(self) -> str:
        """The folder."""
        return self.folder


def run_job(job: Job, loaders: components.Loaders) -> None:
    """Train or resume a run, and write search.json; nothing that is done already is done again."""
    train_and_measure(config.from_dict(job.settings), Path(job.folder), loaders)


def train_and_measure(settings: Settings, path: Path, loaders: components.Loaders) -> None:
    """Train or resume a run, and write search.json.

    Args:
        settings: of the run.
        path: its folder.
        loaders: shared by all runs of a process, so that pictures are drawn once.

    """
    if not folder.is_finished(path):
        train(settings, path, resume=True, loaders=loaders)
    if not (path / MEASURED).is_file():
        run = Run.open(path, device=settings.device, loaders=loaders)
        files.write_json(path / MEASURED, measure(run))


def measure(run: Run) -> dict[str, Any]:
    """Search the held-out pairs in both directions, as they are and with popularity of training pairs subtracted.

    Args:
        run: a finished run with held-out pairs.

    Returns:
        By direction, such as "image_to_text": the number of `queries`; `recall@1`, `never_found` (the share of items
        that are in no query's first ten) and `largest` (N_10 of the item found most often), each also with the suffix
        `_corrected`; and the rank `correlation` of popularity with N_10. In the direction to side y also `items`: the
        most and the least popular texts with their N_10.

    """
    assert run.val is not None
    held_out, bank = run.features(run.val), run.features(run.train, run.train.numbers[:BANK])
    x, y = run.sides
    there = _search(bank.x, bank.y, held_out.x, held_out.y, held_out.links)
    back = _search(bank.y, bank.x, held_out.y, held_out.x, held_out.links.flip(1))
    there["items"] = _popular_items(run, held_out, there)
    for direction in (there, back):
        del direction["bias"], direction["counts"]
    return {f"{x}_to_{y}": there, f"{y}_to_{x}": back}


def _search(bank_queries: Any, bank_items: Any, queries: Any, gallery: Any, links: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        bias = PopularityCorrection().fit(bank_queries, bank_items, max_iterations=150).bias(gallery)
    k = min(K, len(gallery))
    plain, corrected = hubness(queries, gallery, k), hubness(queries, gallery, k, bias=bias)
    measured: dict[str, Any] = {"queries": len(queries)}
    for suffix, found in (("", plain), ("_corrected", corrected)):
        measured[f"recall@1{suffix}"] = found.recall(links, 1)
        measured[f"never_found{suffix}"] = found.never_found
        measured[f"largest{suffix}"] = int(found.counts.max())
    measured["correlation"] = rank_correlation(bias, plain.counts)
    return measured | {"bias": bias, "counts": plain.counts}


def _popular_items(run: Run, features: PairFeatures, found: dict[str, Any]) -> dict[str, list[tuple[str, int]]]:
    assert run.val is not None
    order = found["bias"].argsort(descending=True, stable=True).tolist()
    shown = min(SHOWN, len(order) // 2)

    def named(rows: list[int]) -> list[tuple[str, int]]:
        pairs = run.val.pairs  # type: ignore[union-attr]
        return [(str(pairs.y(int(features.y_number[row]))), int(found["counts"][row])) for row in rows]

    return {"most": named(order[:shown]), "least": named(order[-shown:])}


if __name__ == "__main__":
    serve(Job, run_job)
