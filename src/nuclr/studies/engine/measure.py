"""The work on one run of a study: train it, and store the outcome of every query on every set.

`outcomes.npz` in the folder of the run has one group of arrays, named "GROUP/ARRAY", per

    set                     "val", its halves "val_a" and "val_b", and every test set: see `retrieval_hits`
    bank|tuned|reported     the same for popularity-corrected ranking, tuned on one set and measured on another

It is written atomically; the run counts as done when all groups that it needs are there.

Halves: the x of the held-out pairs, in a fixed random order, are cut in two; each half is a gallery of its own. The y
of an x are always in its half, and so are all x and y of a group.

This module is also the program of the workers (`nuclr.runs.jobs`).
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr import files
from nuclr.data.labeled import has_labels, is_class_folder
from nuclr.errors import UserError
from nuclr.evaluation import Bank, Correction, choose_correction, cut_halves
from nuclr.evaluation.metrics import Kind, metrics_of
from nuclr.evaluation.neighbors import labeled_halves
from nuclr.evaluation.retrieval import retrieval_ranks
from nuclr.evaluation.test_sets import CLASSIFICATION
from nuclr.evaluation.zero_shot import classify
from nuclr.remote import is_url
from nuclr.runs import components, config, folder
from nuclr.runs.features import PairFeatures
from nuclr.runs.jobs import serve
from nuclr.runs.launch import pick_device
from nuclr.runs.run import Run
from nuclr.runs.settings import Data
from nuclr.studies.tasks import BUILTIN_CLASSES, Subject, Task, open_labels, open_retrieval
from nuclr.training import loop
from nuclr.training.guards import TrainingFailed

OUTCOMES = "outcomes.npz"
VAL = "val"
HALVES = ("val_a", "val_b")
SMALLEST = 4  # x, or groups of x, that can be cut in halves
BANKS = ("train", "queries")
CORRECTION_TEMPERATURES = (0.03, 0.05, 0.07, 0.1)
METRICS = "metrics"  # in a group: keys of the metrics, the columns of the other arrays
Hits = dict[str, np.ndarray]
Groups = dict[str, Hits]


# -- jobs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Work on one run, as values that JSON can hold.

    Attributes:
        name: Name of the run.
        settings: Settings of the run, by section.
        folder: Folder of the run.
        tests: Test sets (fields of `MeasuredSet`).
        needed: Names of the groups in outcomes.npz.
        keep_checkpoints: Whether checkpoints stay after the end.

    """

    name: str
    settings: dict[str, Any]
    folder: str
    tests: list[dict[str, Any]]
    needed: list[str]
    keep_checkpoints: bool = False


def run_job(job: Job, shared: components.Loaders) -> None:
    """Train the run or resume it, and measure what is missing.

    Args:
        job: What to do.
        shared: Loaders kept between the jobs of a worker, so images are decoded once.

    Raises:
        UserError: The training failed, or a set cannot be read.
        Interrupted: A signal stopped the training, which has written a checkpoint.

    """
    settings = config.load(job.settings)  # imports the plugins, which may register the objective
    path = Path(job.folder)
    try:
        if not folder.is_finished(path):
            loop.train(
                settings,
                path,
                resume=True,
                loaders=shared,
            )
    except TrainingFailed as failed:
        raise UserError(str(failed)) from None
    # The settings are those of the study, not those in config.yaml: `data.root` may have moved in the meantime.
    run = Run(
        path,
        settings,
        best=False,
        device=pick_device(settings.device),
        loaders=shared,
    )
    measure_run(run, [MeasuredSet(**test) for test in job.tests], job.needed)
    if not job.keep_checkpoints:
        shutil.rmtree(path / folder.CHECKPOINTS, ignore_errors=True)


def measure_run(
    run: Run,
    tests: Sequence["MeasuredSet"],
    needed: Sequence[str],
) -> None:
    """Add the missing groups to outcomes.npz."""
    stored = read_outcomes(run.folder)
    missing = set(needed) - stored.keys()
    if not missing:
        return
    keys = {key for name in missing for key in name.split("|")}
    features: dict[str, PairFeatures] = {}
    if keys & {VAL, *HALVES}:
        if run.settings.data.contrasts_views:
            stored |= neighbor_hits(run)
        else:
            features |= val_features(run)
    for test in tests:
        if test.key in keys and test.kind == "retrieval":
            features[test.key] = test_features(run, test)
        elif test.key in keys:
            stored[test.key] = class_hits(run, test)
    stored |= {key: retrieval_hits(own) for key, own in features.items()}
    stored |= corrected_hits(run, features, [name for name in sorted(missing) if "|" in name])
    arrays = {f"{group}/{key}": array for group, members in stored.items() for key, array in members.items()}
    with files.write_atomically(run.folder / OUTCOMES) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def read_outcomes(run: Path) -> Groups:
    """Return all arrays in a run's outcomes.npz by group; an empty dict if the file does not exist."""
    groups: Groups = {}
    if (run / OUTCOMES).is_file():
        with np.load(run / OUTCOMES, allow_pickle=False) as archive:
            for name in archive.files:
                group, _, key = name.rpartition("/")
                groups.setdefault(group, {})[key] = archive[name]
    return groups


# -- sets --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredSet:
    """A set that runs are measured on: the held-out data, or a test set.

    Attributes:
        name: Name in tables.
        key: Name in outcomes.npz; another set of the same name, or another protocol, has another key.
        kind: Kind of its metrics: "retrieval", "zero_shot", or "labels" (nearest neighbors) if the model
            takes no texts.
        path: Path of a test set: pairs or an embedding file (retrieval); labeled images or `.npz` with x, labels,
            prompts (classes).
        prompts: Prompt file of zero-shot classification; None for the set's own prompts.
        sides: Names of the sides of pairs.
        main: True if rows are compared on it; metrics on pairs that tuning has seen are only for reference.

    """

    name: str
    key: str
    kind: Kind = "retrieval"
    path: str = ""
    prompts: str | None = None
    sides: tuple[str, str] = ("x", "y")
    main: bool = True


def open_test(
    name: str,
    path: str,
    data: Data,
    kind: Kind | None = None,
    prompts: Path | None = None,
) -> MeasuredSet:
    """Open a test set to check it.

    Args:
        name: Name in tables.
        path: Anything that `nuclr evaluate` takes.
        data: Settings of the data: the root of relative paths and the accepted share of bad samples.
        kind: As in `MeasuredSet`; None: by what is at the path.
        prompts: Prompt file, for zero-shot classification.

    Returns:
        The test set, described by values that JSON can hold.

    Raises:
        UserError: If it cannot be opened, or is of the wrong kind for the model.

    """
    kind = kind or kind_of(path, data)
    if kind == "retrieval" and data.contrasts_views:
        raise UserError(f"{path}: models of data.contrast=views are compared on labeled images (class folders)")
    task = open_task(path, kind, data, prompts)
    content = task.source.pairs.fingerprint
    if prompts is not None and task.texts is not None:
        content = hashlib.sha256(json.dumps([content, task.texts.prompts]).encode()).hexdigest()
    protocol = "" if task.duplicates == "merge" else f"_{task.duplicates}"
    return MeasuredSet(
        name=name,
        key=f"test_{name}_{content[:8]}{protocol}".replace("|", "_").replace("/", "_"),
        kind=kind,
        path=path,
        prompts=str(prompts) if prompts else None,
        sides=task.source.pairs.side_names if kind == "retrieval" else ("x", "y"),
    )


def kind_of(path: str, data: Data) -> Kind:
    """Return the kind of test set that is at a path, as in `MeasuredSet`."""
    labeled = path.partition(":")[0] in (*CLASSIFICATION, BUILTIN_CLASSES)
    if not labeled and (not is_url(path) or path.endswith(".npz")):
        place = components.below(data.root, path)
        labeled = has_labels(place) if place.is_file() else place.is_dir() and is_class_folder(place)
    if not labeled:
        return "retrieval"
    return "labels" if data.contrasts_views else "zero_shot"


def open_task(
    path: str,
    kind: Kind,
    data: Data,
    prompts: Path | None = None,
    size: int = 32,
) -> Task:
    """Open what is measured, for a model whose images have this size."""
    if kind == "retrieval":
        return open_retrieval(path, data)
    if path.partition(":")[0] not in (*CLASSIFICATION, "builtin", BUILTIN_CLASSES):
        path = str(components.below(data.root, path))
    return open_labels(path, data, kind, prompts, size)


def val_features(run: Run) -> dict[str, PairFeatures]:
    """Return the features of all held-out pairs, and of each half if there are at least four x or groups of x."""
    assert run.val is not None  # the command refuses settings without data.val
    whole = run.features(run.val)
    features = {VAL: whole}
    if len(torch.unique(whole.x_group)) >= SMALLEST:
        features |= {name: whole.of_x(x) for name, x in zip(HALVES, cut_halves(whole.x_group), strict=True)}
    return features


def test_features(run: Run, test: MeasuredSet) -> PairFeatures:
    """Return the features of a test set of pairs."""
    subject = Subject.of_run(run)
    task = open_task(test.path, test.kind, run.settings.data)
    subject.check(test.name, task.needs)
    return subject.pair_features(task.source, task.duplicates)


# -- outcomes ----------------------------------------------------------------------------------------------------------


def retrieval_hits(
    features: PairFeatures,
    bias_x: Tensor | None = None,
    bias_y: Tensor | None = None,
) -> Hits:
    """Return the outcome of every query.

    Args:
        features: Of both sides.
        bias_x: (n_x,), subtracted from the scores when x is the gallery.
        bias_y: (n_y,), subtracted from the scores when y is the gallery.

    Returns:
        `x_to_y` (n_x, m) and `y_to_x` (n_y, m): the value of each query for each metric of the registry whose key is in
        `metrics` (m,). `x_to_y_cluster` and `y_to_x_cluster`: number of the cluster that the query belongs to. A
        cluster is an x, or all x of a group, with their y; a y that belongs to several x is in the cluster of the
        first one.

    """
    of_x, of_y = retrieval_ranks(
        features.x,
        features.y,
        features.links,
        bias_x,
        bias_y,
    )
    hits = _values("retrieval", x_to_y=of_x, y_to_x=of_y)
    groups = torch.unique(features.x_group)
    hits["x_to_y_cluster"] = torch.searchsorted(groups, features.x_group[of_x.query]).numpy()
    hits["y_to_x_cluster"] = torch.searchsorted(groups, features.y_group[of_y.query]).numpy()
    return hits


def _values(kind: Kind, **outcomes: Any) -> Hits:
    """Return the value of each query for the metrics that are means; a median has no value per query."""
    metrics = [metric for metric in metrics_of(kind) if not metric.median]
    hits = {METRICS: np.array([metric.key for metric in metrics])}
    for name, outcome in outcomes.items():
        hits[name] = torch.stack([metric.values(outcome).cpu().float() for metric in metrics], dim=1).numpy()
    return hits


def class_hits(run: Run, test: MeasuredSet) -> Hits:
    """Return the outcome on labeled items: `top` (n, m) in place of the two directions."""
    subject = Subject.of_run(run)
    prompts = None if test.prompts is None else Path(test.prompts)
    task = open_task(
        test.path,
        test.kind,
        run.settings.data,
        prompts,
        subject.image_size,
    )
    x, labels = subject.labeled_features(task)
    if test.kind == "zero_shot":
        hits = _values("zero_shot", top=classify(x, subject.class_features(task), labels))
    else:
        hits = _values("labels", top=labeled_halves(x, labels))
    return hits | {"top_cluster": np.arange(len(hits["top"]))}


def neighbor_hits(run: Run) -> Groups:
    """Return the outcome of classification by nearest neighbors on `data.classes`, for models of views.

    The halves are halves of the images to classify, with the same labeled images.
    """
    whole = class_hits(run, MeasuredSet(VAL, VAL, "labels", str(run.settings.data.classes)))
    groups = {VAL: whole}
    for name, half in zip(HALVES, cut_halves(torch.arange(len(whole["top"]))), strict=True):
        groups[name] = whole | {"top": whole["top"][half], "top_cluster": np.arange(len(half))}
    return groups


def corrected_hits(
    run: Run,
    features: Mapping[str, PairFeatures],
    names: Sequence[str],
) -> Groups:
    """Return the outcome of corrected ranking for groups "bank|tuned|reported".

    Temperature and strength of the correction are chosen on the set that the method's settings were tuned on. There are
    two banks: "train" holds training pairs, which carry no information about the test set; "queries" holds the set's
    own queries (transductive).
    """
    groups: Groups = {}
    if not names:
        return groups
    train = Subject.of_run(run).query_bank(run.train)
    chosen: dict[tuple[str, str], Correction] = {}
    for name in names:
        bank, tuned, reported = name.split("|")
        if (bank, tuned) not in chosen:
            at = features[tuned]
            queries = train if bank == "train" else Bank(at.x, at.y)
            chosen[bank, tuned] = choose_correction(
                at.x,
                at.y,
                at.links,
                queries,
                temperatures=CORRECTION_TEMPERATURES,
            )
        own = features[reported]
        queries = train if bank == "train" else Bank(own.x, own.y)
        groups[name] = retrieval_hits(own, *chosen[bank, tuned].biases(queries, own.x, own.y))
    return groups


if __name__ == "__main__":
    serve(Job, run_job)
