"""Test sets by name or path: any pairs, any labeled images, vectors with labels, or a standard test set on disk.

A BEIR folder is read by `nuclr.data.formats.beir.read_beir`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr.data import check_samples, open_labeled, usable
from nuclr.data.builtin import BuiltinLabeled
from nuclr.data.formats.cifar import CifarImages
from nuclr.data.formats.embeddings import SUFFIXES, read_embeddings
from nuclr.data.labeled import LabeledImages
from nuclr.data.open import locate
from nuclr.data.pairs import Pairs
from nuclr.data.prompts import ClassTexts, Prompts, read_prompts
from nuclr.errors import UserError
from nuclr.evaluation.standard_sets import open_standard_classes, open_standard_pairs, parse_standard
from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL
from nuclr.files import read_npz
from nuclr.remote import is_url, local_copy
from nuclr.runs.components import open_pairs_like_run
from nuclr.runs.settings import Data
from nuclr.runs.side_words import words_of_pairs

VECTOR_KEYS = ("x", "labels", "prompts")


@dataclass(frozen=True)
class VectorClasses:
    """Vectors with labels: `x` (n, d_x), `prompts` (c, m, d_y), float32 and finite; `labels` (n,), int64, in [0, c)."""

    x: Tensor
    labels: Tensor
    prompts: Tensor


@dataclass(frozen=True)
class LabeledVectors:
    """Vectors with labels and without prompts: `x` (n, d_x), float32 and finite; `labels` (n,), int64."""

    x: Tensor
    labels: Tensor


Images = LabeledImages | CifarImages | BuiltinLabeled


@dataclass(frozen=True)
class RetrievalTask:
    """Pairs to retrieve: `numbers` in use, `bad` samples with reasons; `known` for a standard test set."""

    name: str
    path: str
    split: str | None
    pairs: Pairs
    numbers: np.ndarray
    bad: dict[int, str]
    known: bool

    @property
    def duplicates(self) -> str:
        """Default treatment of repeated y: "miss" for standard sets, as in published results, else "merge"."""
        return "miss" if self.known else "merge"


@dataclass(frozen=True)
class ClassificationTask:
    """Labeled images or vectors: `numbers` of the test part; `texts` of the classes, None if prompts are vectors."""

    name: str
    path: str
    classes: Images | VectorClasses
    numbers: np.ndarray
    bad: dict[int, str]
    texts: ClassTexts | None


@dataclass(frozen=True)
class ProbeTask:
    """Labeled images or vectors for neighbors and a linear probe: `numbers` in use, `bad` samples with reasons."""

    name: str
    path: str
    classes: Images | LabeledVectors
    numbers: np.ndarray
    bad: dict[int, str]


def open_retrieval(
    text: str,
    root: str | None,
    split: str | None,
    max_bad_share: float,
    allow_outside: bool = False,
    columns: Data | None = None,
) -> RetrievalTask:
    """Open a path (see `nuclr.data.open_pairs`), or NAME:PATH with the name of a standard test set.

    Args:
        text: the path or name.
        root: the folder that names are relative to.
        split: the split, if the pairs have several.
        max_bad_share: the share of bad samples that is accepted.
        allow_outside: read files outside of the root as well.
        columns: settings of a run, whose columns, modalities and names of sides are used if the pairs have them.

    """
    standard = parse_standard(text, RETRIEVAL, "--retrieval", CLASSIFICATION, "--classification")
    if standard is None:
        trained = columns if columns is not None and not columns.contrasts_views else Data()
        data = dataclasses.replace(trained, allow_outside=allow_outside)
        pairs = open_pairs_like_run(data, text, root, split)
        _refuse_unlinked(text, root)
        return _retrieval_task(text, text, split, pairs, max_bad_share, known=False)
    name, folder = standard
    opened = open_standard_pairs(name, folder, "test", allow_outside)
    return _retrieval_task(name, str(opened.path), opened.split, opened.pairs, 0.0, known=True)


def _retrieval_task(
    name: str, path: str, split: str | None, pairs: Pairs, max_bad_share: float, known: bool
) -> RetrievalTask:
    x, y = words_of_pairs(pairs)
    reasons = {f"empty {word}" for word in (y.one, pairs.y_name, pairs.y_key)}
    empty = [n for n, reason in getattr(pairs, "known_bad", {}).items() if reason in reasons]
    bare: np.ndarray = np.setdiff1d(pairs.x_id[empty], np.delete(pairs.x_id, empty))
    if len(bare):
        first = pairs.name(int(np.flatnonzero(pairs.x_id == bare[0])[0]))
        more = f" ({len(bare)} such {x.many})" if len(bare) > 1 else ""
        where = f"{path}: {x.one} {first}" if x.kind == "image" else f"{path}, {first}: {pairs.x_name}"
        raise UserError(f"{where} has no {y.one}; add one or remove the {x.one}{more}")
    bad = check_samples(pairs, max_bad_share=max_bad_share)
    return RetrievalTask(name, path, split, pairs, usable(pairs, bad), bad, known)


def _refuse_unlinked(text: str, root: str | None) -> None:
    """Refuse an embedding file with an x that has no y: as a query it has no right answer."""
    place = locate(root, text)
    if not place.endswith(SUFFIXES):
        return
    path = local_copy(place) if is_url(place) else Path(place)
    if not path.is_file():
        return
    embeddings = read_embeddings(path)
    bare: np.ndarray = np.setdiff1d(np.arange(len(embeddings.x)), embeddings.y_to_x.numpy())
    if len(bare):
        more = f" ({len(bare)} such rows)" if len(bare) > 1 else ""
        raise UserError(f"{place}: x row {bare[0]} has no y: y_to_x never names it; add one or remove it{more}")


def open_classification(
    text: str, prompts: Path | None, max_bad_share: float, size: int = 32, allow_outside: bool = False
) -> ClassificationTask:
    """Open labeled images or vectors for zero-shot classification.

    Args:
        text: a folder of classes, `.npz` with x, labels and prompts, "builtin", or NAME:PATH (standard sets).
        prompts: a prompt file, see `nuclr.data.prompts`; by default, the set's own prompts.
        max_bad_share: the share of bad samples that is accepted.
        size: height and width of built-in images.
        allow_outside: follow symbolic links that lead out of the folder.

    """
    standard = parse_standard(text, CLASSIFICATION, "--classification", RETRIEVAL, "--retrieval")
    if standard is not None:
        name, folder = standard
        opened = open_standard_classes(name, folder, allow_outside)
        texts = class_texts(opened.images, prompts, name, opened.templates)
        return ClassificationTask(name, str(opened.path), opened.images, opened.numbers, {}, texts)
    if text.partition(":")[0] == "builtin":
        return classification_task(text, text, BuiltinLabeled(size=size), max_bad_share, prompts)
    if Path(text).suffix == ".npz":
        if prompts is not None:
            raise UserError(f"{text}: holds prompts as vectors; --prompts {prompts} belongs to images")
        vectors = read_classes(Path(text))
        return ClassificationTask(text, text, vectors, np.arange(len(vectors.labels)), {}, None)
    return classification_task(text, text, open_labeled(text, allow_outside), max_bad_share, prompts)


def classification_task(
    name: str, path: str, images: Images, max_bad_share: float, prompts: Path | None = None
) -> ClassificationTask:
    """Return a task on labeled images without bad samples."""
    bad = check_samples(images, max_bad_share=max_bad_share)
    return ClassificationTask(name, path, images, usable(images, bad), bad, class_texts(images, prompts, name))


def class_texts(
    images: Images, file: Path | None, name: str | None = None, templates: Sequence[str] | None = None
) -> ClassTexts:
    """Return the names and prompts of the classes.

    Args:
        images: the labeled images.
        file: a prompt file; None for the set's own prompts.
        name: the test set's name, for prompt files of several sets.
        templates: the set's own templates, if they do not belong to `images`.

    """
    own = list(getattr(images, "templates", ()) if templates is None else templates)
    if file is None and isinstance(images, BuiltinLabeled):
        return ClassTexts(list(images.classes), None, images.prompts())
    prompts = Prompts(templates=own) if file is None else read_prompts(file, name)
    if isinstance(images, BuiltinLabeled):
        return prompts.texts(images.classes, images.classes, ["a {}"])
    return prompts.texts(images.keys, images.classes, own)


def assign_prompts(texts: Sequence[str], sets: Sequence[str]) -> dict[str, Path]:
    """Return the prompt file of each test set that has one.

    Args:
        texts: "FILE", for all test sets, or "NAME=FILE", for one of them, which takes precedence.
        sets: the names of the test sets, or their paths, which are also called by their last part.

    Returns:
        Test set, as in `sets` -> prompt file.

    Raises:
        UserError: if a name is unknown, a set has two files, or there is no test set.

    Example:
        >>> assign_prompts(["all.txt", "dtd=textures.txt"], ["dtd", "data/pets"])
        {'dtd': PosixPath('textures.txt'), 'data/pets': PosixPath('all.txt')}

    """
    named: dict[str, Path] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or Path(text).is_file():
            name, file = "", text
        elif name not in (known := {key for path in sets for key in (path, Path(path).name)}):
            allowed = f"known: {', '.join(sorted(known))}" if known else "there is none"
            raise UserError(f"--prompts {text}: {name!r} is not a set for zero-shot classification; {allowed}")
        if name in named:
            raise UserError(f"--prompts {text}: {f'{name} has' if name else 'the sets have'} {named[name]} already")
        named[name] = Path(file)
    if named and not sets:
        raise UserError("--prompts needs labeled images for zero-shot classification")
    chosen = {path: named.get(path) or named.get(Path(path).name) or named.get("") for path in sets}
    return {path: file for path, file in chosen.items() if file is not None}


def set_name(text: str, known: Mapping[str, Any] = CLASSIFICATION) -> str:
    """Return the name of a standard test set in NAME:FOLDER; a path is returned as it is."""
    name = text.partition(":")[0]
    return name if name in known else text


def open_probe(text: str, max_bad_share: float, size: int = 32, allow_outside: bool = False) -> ProbeTask:
    """Open a folder of classes, `.npz` with x and labels, "builtin" (this size), or NAME:PATH (standard sets)."""
    standard = parse_standard(text, CLASSIFICATION, "--classes", RETRIEVAL, "--retrieval")
    if standard is not None:
        opened = open_standard_classes(*standard, allow_outside)
        return probe_task(standard[0], str(opened.path), opened.images, max_bad_share, opened.numbers)
    if Path(text).suffix == ".npz":
        vectors = read_labeled_vectors(Path(text))
        return ProbeTask(text, text, vectors, np.arange(len(vectors.labels)), {})
    images = BuiltinLabeled(size=size) if text == "builtin" else open_labeled(text, allow_outside)
    return probe_task(text, text, images, max_bad_share)


def probe_task(
    name: str, path: str, images: Images, max_bad_share: float, numbers: np.ndarray | None = None
) -> ProbeTask:
    """Return a task on labeled images, all or those with these numbers, without bad samples.

    Raises:
        UserError: if no class has two images, one for the gallery and one to ask.

    """
    bad = check_samples(images, numbers, max_bad_share)
    kept = usable(images, bad, numbers)
    if np.bincount(np.asarray(images.y_id)[kept]).max(initial=0) < 2:
        raise UserError(f"{path}: no class has two usable images; neighbors need one to ask and one to find")
    return ProbeTask(name, path, images, kept, bad)


# -- vectors with labels -----------------------------------------------------------------------------------------------


def read_classes(path: Path) -> VectorClasses:
    """Read `.npz` with x (n, d_x), labels (n,) and prompts (c, d_y), or (c, m, d_y) for m prompts per class.

    Raises:
        UserError: names what is wrong.

    """
    x, labels, prompts = _read_arrays(path, VECTOR_KEYS)
    prompts = prompts[:, None] if prompts.ndim == 2 else prompts
    _check_vectors(path, "x", x, 2)
    _check_vectors(path, "prompts", prompts, 3)
    _check_labels(path, x, labels)
    if labels.max() >= len(prompts):
        raise UserError(f"{path}: label {labels.max()}; allowed: 0 to {len(prompts) - 1}, the rows of prompts")
    if len(prompts) < 2:
        raise UserError(f"{path}: prompts of {len(prompts)} class; at least two classes are needed")
    return VectorClasses(
        *(torch.from_numpy(array.astype(kind)) for array, kind in ((x, "f4"), (labels, "i8"), (prompts, "f4")))
    )


def read_labeled_vectors(path: Path) -> LabeledVectors:
    """Read `.npz` with x (n, d_x) and labels (n,).

    Raises:
        UserError: names what is wrong.

    """
    x, labels = _read_arrays(path, VECTOR_KEYS[:2])
    _check_vectors(path, "x", x, 2)
    _check_labels(path, x, labels)
    counts = np.unique(labels, return_counts=True)[1]
    if len(counts) < 2 or counts.max() < 2:
        raise UserError(f"{path}: labels needs at least two classes, and two rows of one of them")
    return LabeledVectors(torch.from_numpy(x.astype("f4")), torch.from_numpy(labels.astype("i8")))


def _read_arrays(path: Path, keys: tuple[str, ...]) -> list[np.ndarray]:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    arrays = read_npz(path, keys)
    missing = [key for key in keys if key not in arrays]
    if missing:
        names = ", ".join(arrays)
        raise UserError(f"{path}: no array named {missing[0]!r}; it needs {', '.join(keys)} (found: {names})")
    return [arrays[key] for key in keys]


def _check_vectors(path: Path, key: str, array: np.ndarray, ndim: int) -> None:
    if array.dtype.kind != "f" or array.ndim != ndim or not array.size:
        raise UserError(f"{path}: {key} has shape {array.shape} of {array.dtype}; it needs one vector per row")
    if not np.isfinite(array).all():
        raise UserError(f"{path}: {key} holds a NaN or an infinity; fix or remove it")


def _check_labels(path: Path, x: np.ndarray, labels: np.ndarray) -> None:
    if labels.shape != (len(x),) or labels.dtype.kind not in "iu":
        raise UserError(f"{path}: labels has shape {labels.shape} of {labels.dtype}; it needs {len(x)} whole numbers")
    if labels.min() < 0:
        raise UserError(f"{path}: label {labels.min()}; allowed: whole numbers from 0")
