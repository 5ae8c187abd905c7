"""Measure a trained model on held-out pairs, on halves of them and on test sets: the outcome of every query.

Halves: the x of the held-out pairs, in a fixed random order, are cut in two; each half is a gallery of its own. The y
of an x are always in its half, and so are all x and y of a group.
"""

import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nuclr.data.modalities.image import SUFFIXES as IMAGES
from nuclr.errors import UserError
from nuclr.evaluation.probe import K, knn_hits, split_halves
from nuclr.evaluation.ranks import Ranks, query_ranks
from nuclr.evaluation.retrieval import retrieval_ranks
from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL
from nuclr.models import ImageFormat
from nuclr.remote import is_url
from nuclr.runs.components import below
from nuclr.runs.features import PairFeatures
from nuclr.runs.run import Run
from nuclr.runs.settings import Data
from nuclr.studies.evaluate.subject import class_task_features, pair_features, probe_features, subject_of_run
from nuclr.studies.evaluate.tasks import (
    ClassificationTask,
    ProbeTask,
    VectorClasses,
    assign_prompts,
    open_classification,
    open_probe,
    open_retrieval,
)

KS = (1, 5, 10)
VAL, HALVES = "val", ("val_a", "val_b")
HALVES_SEED = 20250
SMALLEST = 4  # x, or groups of x, that can be cut in halves
BUILTIN_CLASSES = "builtin_classes"
MERGE = "merge"
Hits = dict[str, np.ndarray]


# ---------------------------------------------------------------------------------------------------------------------
# Test sets


@dataclass(frozen=True)
class TestSet:
    """A test set of --test.

    Attributes:
        name: Name in tables.
        path: Pairs or an embedding file (retrieval); labeled images or `.npz` with x, labels, prompts (classes).
        kind: "pairs"; "classes" for zero-shot classification; "labels" for classification by nearest neighbors, if
            the model takes no texts.
        fingerprint: Hash of the content.
        duplicates: What is done with y that occur more than once, as in `nuclr evaluate`.
        prompts: Prompt file of zero-shot classification; None for the set's own prompts.

    """

    name: str
    path: str
    kind: str
    fingerprint: str
    duplicates: str = MERGE
    prompts: str | None = None

    @property
    def key(self) -> str:
        """Name in outcomes.npz; another set of the same name, or another protocol, has another key."""
        protocol = "" if self.duplicates == MERGE else f"_{self.duplicates}"
        return f"test_{self.name}_{self.fingerprint[:8]}{protocol}"


def parse_tests(texts: Sequence[str], prompts: Sequence[str], data: Data) -> list[TestSet]:
    """Open the test sets of --test to check them, with the prompt files of --prompts.

    Raises:
        UserError: If one cannot be opened, two have the same name, or a prompt file does not belong to any of them.

    """
    classes = [_split_name(text)[0] for text in texts if _kind(_split_name(text)[1], data) == "classes"]
    files = assign_prompts(prompts, classes)
    tests = [parse_test(text, data, files.get(_split_name(text)[0])) for text in texts]
    if len({test.name for test in tests}) < len(tests):
        raise UserError("--test: two sets have the same name; name them with --test NAME=PATH")
    return tests


def _split_name(text: str) -> tuple[str, str]:
    """Return the name in tables and the path of "NAME=PATH" or "PATH"."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name or ":" in name:
        name, path = "", text
    stem, set_name = Path(path), path if is_url(path) else path.partition(":")[0]
    name = name or (set_name if set_name != path else "_".join(part for part in (stem.parent.name, stem.stem) if part))
    return name.replace("/", "_"), path


def _kind(path: str, data: Data) -> str:
    return "pairs" if not _is_classes(path, data) else "labels" if data.contrasts_views else "classes"


def parse_test(text: str, data: Data, prompts: Path | None = None) -> TestSet:
    """Open the test set of --test to check it.

    Args:
        text: "PATH" or "NAME=PATH"; PATH may be anything that `nuclr evaluate` takes.
        data: Settings of the data: the root of relative paths and the accepted share of bad samples.
        prompts: Prompt file, for zero-shot classification.

    Returns:
        The test set, described by values that JSON can hold.

    Raises:
        UserError: If it cannot be opened.

    """
    name, path = _split_name(text)
    duplicates, kind = MERGE, _kind(path, data)
    if data.contrasts_views and kind == "pairs":
        raise UserError(
            f"--test {text}: models of data.contrast=views are compared on labeled images, one folder per class"
        )
    try:
        if kind == "pairs":
            task = open_retrieval(path, data.root, None, data.max_bad_share, data.allow_outside, data)
            fingerprint, duplicates = task.pairs.fingerprint, task.duplicates
        elif kind == "labels":
            fingerprint = getattr(_open_labels(path, data, 32).classes, "fingerprint", "")
        else:
            labeled = _open_classes(path, data, 32, prompts)
            vectors = isinstance(labeled.classes, VectorClasses)
            fingerprint = _file_hash(below(data.root, path)) if vectors else getattr(labeled.classes, "fingerprint", "")
            if prompts is not None:
                texts = json.dumps([fingerprint, labeled.texts.prompts if labeled.texts else None])
                fingerprint = hashlib.sha256(texts.encode()).hexdigest()
    except UserError as error:
        raise UserError(f"--test {text}: {error}") from None
    return TestSet(name, path, kind, fingerprint, duplicates, None if prompts is None else str(prompts))


def _is_classes(path: str, data: Data) -> bool:
    if is_url(path) and not path.endswith(".npz"):
        return False
    set_name, file = path.partition(":")[0], below(data.root, path)
    if set_name in RETRIEVAL or set_name == "builtin":
        return False
    if set_name in CLASSIFICATION or set_name == BUILTIN_CLASSES:
        return True
    if file.suffix == ".npz" and zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            return "labels.npy" in archive.namelist()
    folders = [inner for inner in file.iterdir() if inner.is_dir()] if file.is_dir() else []
    return len(folders) > 1 and any(image.suffix.lower() in IMAGES for image in folders[0].iterdir())


def _open_classes(path: str, data: Data, size: int, prompts: Path | None = None) -> ClassificationTask:
    if path == BUILTIN_CLASSES:
        return open_classification("builtin", prompts, data.max_bad_share, size)
    named = path.partition(":")[0] in CLASSIFICATION
    location = path if named else str(below(data.root, path))
    return open_classification(location, prompts, data.max_bad_share, allow_outside=data.allow_outside)


def _open_labels(path: str, data: Data, size: int) -> ProbeTask:
    named = path == "builtin" or path.partition(":")[0] in CLASSIFICATION
    location = path if named else str(below(data.root, path))
    return open_probe(location, data.max_bad_share, size, data.allow_outside)


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Features


def halves(group: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the x in each half, in ascending order.

    Args:
        group: (n_x,), equal for x that must be in one half (`PairFeatures.x_group`).

    """
    distinct, number = torch.unique(group, return_inverse=True)
    order = torch.from_numpy(np.random.default_rng(HALVES_SEED).permutation(len(distinct)))
    in_first = torch.zeros(len(distinct), dtype=torch.bool)
    in_first[order[: len(distinct) // 2]] = True
    return in_first[number].nonzero().squeeze(1), (~in_first[number]).nonzero().squeeze(1)


def val_features(run: Run) -> PairFeatures:
    """Return the features of the held-out pairs."""
    assert run.val is not None  # the command refuses settings without data.val
    return run.features(run.val)


def test_features(run: Run, test: TestSet) -> PairFeatures:
    """Return the features of a test set of pairs."""
    data, subject = run.settings.data, subject_of_run(run)
    task = open_retrieval(test.path, data.root, None, data.max_bad_share, data.allow_outside, data)
    subject.check_kinds(test.name, task.pairs)
    return pair_features(subject, task.pairs, task.numbers, test.duplicates)


# ---------------------------------------------------------------------------------------------------------------------
# Hits


def retrieval_hits(features: PairFeatures, bias_x: Tensor | None = None, bias_y: Tensor | None = None) -> Hits:
    """Return the outcome of every query.

    Args:
        features: Of both sides.
        bias_x: (n_x,), subtracted from the scores when x is the gallery.
        bias_y: (n_y,), subtracted from the scores when y is the gallery.

    Returns:
        `x_to_y` (n_x, 3) and `y_to_x` (n_y, 3): probability that a partner is among the first 1, 5 and 10.
        `x_to_y_cluster` and `y_to_x_cluster`: number of the cluster that the query belongs to. A cluster is an x, or
        all x of a group, with their y; a y that belongs to several x is in the cluster of the first one.

    """
    of_x, of_y = retrieval_ranks(features.x, features.y, features.links, bias_x, bias_y)
    owner = torch.full((len(features.y),), len(features.x))
    owner.scatter_reduce_(0, features.links[:, 1], features.links[:, 0], "amin")
    _, cluster = torch.unique(features.x_group, return_inverse=True)
    return {
        "x_to_y": _hits(of_x),
        "x_to_y_cluster": cluster[of_x.query].numpy(),
        "y_to_x": _hits(of_y),
        "y_to_x_cluster": cluster[owner[of_y.query]].numpy(),
    }


def _hits(ranked: Ranks) -> np.ndarray:
    return np.asarray(torch.stack([ranked.hits(k) for k in KS], dim=1).float().numpy())


def held_out_hits(run: Run) -> dict[str, Hits]:
    """Return the outcome on all held-out pairs, and on each half if there are at least four x or groups of x.

    With `data.contrast=views`, the outcome is that of classification by nearest neighbors on `data.classes`. Its halves
    are halves of the images to classify, with the same labeled images.
    """
    if run.settings.data.contrasts_views:
        whole = label_hits(run, str(run.settings.data.classes))
        cut = halves(torch.arange(len(whole["top"])))
        parts = ({"top": whole["top"][half], "top_cluster": np.arange(len(half))} for half in cut)
        return {VAL: whole, **dict(zip(HALVES, parts, strict=True))}
    features = val_features(run)
    hits = {VAL: retrieval_hits(features)}
    if len(torch.unique(features.x_group)) >= SMALLEST:
        for name, rows in zip(HALVES, halves(features.x_group), strict=True):
            hits[name] = retrieval_hits(features.of_x(rows))
    return hits


def test_hits(run: Run, test: TestSet) -> Hits:
    """Return the outcome on a test set.

    Classes give `top` (n, 3): the probability that the right class is among the first 1, 5 and 10.
    """
    if test.kind == "pairs":
        return retrieval_hits(test_features(run, test))
    if test.kind == "labels":
        return label_hits(run, test.path)
    prompts = None if test.prompts is None else Path(test.prompts)
    task = _open_classes(test.path, run.settings.data, _image_size(run), prompts)
    x, classes, labels = class_task_features(subject_of_run(run), task)
    ranked = query_ranks(x, classes, torch.stack([torch.arange(len(x)), labels], dim=1))
    return {"top": _hits(ranked), "top_cluster": ranked.query.numpy()}


def label_hits(run: Run, path: str) -> Hits:
    """Return `top` (m, 3) of the second half of labeled images, classified by their neighbors in the first half."""
    task = _open_labels(path, run.settings.data, _image_size(run))
    x, labels = probe_features(subject_of_run(run), task)
    first, second = split_halves(labels)
    hits = knn_hits(x[first], labels[first], x[second], labels[second], min(K, len(first)), tops=KS)
    return {"top": hits.float().numpy(), "top_cluster": np.arange(len(second))}


def _image_size(run: Run) -> int:
    return run.model.x.inputs.size if isinstance(run.model.x.inputs, ImageFormat) else 32
