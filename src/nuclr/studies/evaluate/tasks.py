"""Test sets by name or path: any pairs, any labeled images, vectors with labels, or a standard test set on disk.

A BEIR folder is read by `nuclr.data.formats.beir.read_beir`.
"""

import dataclasses
import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr.data import check_samples, open_labeled, open_pairs, usable
from nuclr.data.builtin import BuiltinLabeled
from nuclr.data.formats.embeddings import SUFFIXES, read_embeddings
from nuclr.data.labeled import LabeledImages, read_templates
from nuclr.data.open import locate
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL, ClassificationSet, RetrievalSet
from nuclr.files import parse_json, read_lines, read_npz, read_text
from nuclr.remote import is_url, local_copy
from nuclr.runs.components import open_pairs_of_run
from nuclr.runs.settings import Data, DataSide
from nuclr.runs.side_words import words_of_pairs

VECTOR_KEYS = ("x", "labels", "prompts")
# Lists of WordNet numbers with names, as they come with ImageNet (the contest's and the project's) and ImageNet-R.
NAME_LISTS = ("LOC_synset_mapping.txt", "words.txt", "README.txt")
_NAME_LINE = re.compile(r"^\s*(n\d{8})\s+(\S.*?)\s*$", re.MULTILINE)


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


Classes = LabeledImages | BuiltinLabeled | VectorClasses


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
    """Labeled images or vectors: `numbers` of the test part; `templates` is None if prompts are vectors."""

    name: str
    path: str
    classes: Classes
    numbers: np.ndarray
    bad: dict[int, str]
    templates: list[str] | None


@dataclass(frozen=True)
class ProbeTask:
    """Labeled images or vectors for neighbors and a linear probe: `numbers` in use, `bad` samples with reasons."""

    name: str
    path: str
    classes: LabeledImages | BuiltinLabeled | LabeledVectors
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
    standard = _standard_set(text, RETRIEVAL, CLASSIFICATION, "--retrieval", "--classification")
    if standard is None:
        trained = columns if columns is not None and not columns.contrasts_views else Data()
        data = dataclasses.replace(trained, allow_outside=allow_outside)
        pairs = _open_pairs(data, text, root, split)
        _refuse_unlinked(text, root)
        return _retrieval_task(text, text, split, pairs, max_bad_share, known=False)
    name, folder = standard
    known = RETRIEVAL[name]
    path, images = _find(known, folder)
    pairs = open_pairs(path, images, split=known.split, allow_outside=allow_outside)
    task = _retrieval_task(name, str(path), known.split, pairs, max_bad_share, known=True)
    sizes = len(np.unique(pairs.x_id)), len(pairs)
    if sizes != known.sizes:
        expected = "{:,} images and {:,} captions".format(*known.sizes)
        raise UserError(
            f"{path}: split {known.split!r} has {sizes[0]:,} images and {sizes[1]:,} captions; it needs {expected}"
        )
    return task


def _open_pairs(data: Data, text: str, root: str | None, split: str | None) -> Pairs:
    """Open pairs with the columns and modalities of a run, or with the usual ones if these do not exist.

    If a side of the run was not read from a column, such as an array of an embedding file, the modality of that side is
    recognized from the new pairs and not taken from the run.
    """
    x, y = (side if side.key is not None else DataSide(name=side.name) for side in (data.x, data.y))
    data = dataclasses.replace(data, x=x, y=y)
    usual = dataclasses.replace(data, x=DataSide(name=data.x.name), y=DataSide(name=data.y.name))
    try:
        return open_pairs_of_run(data, text, root, split)
    except UserError as error:
        if usual == data:
            raise
        try:
            return open_pairs_of_run(usual, text, root, split)
        except UserError:
            raise error from None


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
    text: str,
    classes: Path | None,
    templates: Path | None,
    max_bad_share: float,
    size: int = 32,
    allow_outside: bool = False,
) -> ClassificationTask:
    """Open a folder of classes, `.npz` with x, labels, prompts, "builtin" (this size), or NAME:PATH (standard sets)."""
    standard = _standard_set(text, CLASSIFICATION, RETRIEVAL, "--classification", "--retrieval")
    if standard is not None:
        return _standard_classification(*standard, templates, max_bad_share, allow_outside)
    if text.partition(":")[0] == "builtin":
        opened: Any = BuiltinLabeled(size=size)
    elif Path(text).suffix == ".npz":
        if classes is not None or templates is not None:
            raise UserError(f"{text}: holds prompts as vectors; --class-names and --templates belong to images")
        vectors = read_classes(Path(text))
        return ClassificationTask(text, text, vectors, np.arange(len(vectors.labels)), {}, None)
    else:
        opened = open_labeled(text, classes, templates, allow_outside)
    return classification_task(text, text, opened, np.arange(len(opened)), max_bad_share)


def _standard_classification(
    name: str, folder: Path, templates: Path | None, max_bad_share: float, allow_outside: bool
) -> ClassificationTask:
    known = CLASSIFICATION[name]
    class_folder = next((folder / below for below in known.folders if _class_folders(folder / below, known)), None)
    if class_folder is None:
        what = f"does not have {known.classes} class folders" if folder.is_dir() else "does not exist"
        raise UserError(f"{known.title}: {folder} {what}; it needs {known.layout}")
    names = names_of(class_folder, folder, _class_folders(class_folder, known), known)
    prompts = list(known.templates) if templates is None else read_templates(templates)
    opened = LabeledImages(class_folder, names, prompts, allow_outside)
    numbers = np.arange(len(opened))
    if known.listed is not None:
        numbers = _listed(opened, folder / known.listed, known)
    return classification_task(name, str(class_folder), opened, numbers, max_bad_share)


def classification_task(
    name: str, path: str, opened: Any, numbers: np.ndarray, max_bad_share: float
) -> ClassificationTask:
    """Return a task on labeled images without bad samples."""
    bad = check_samples(opened, numbers, max_bad_share)
    return ClassificationTask(name, path, opened, usable(opened, bad, numbers), bad, getattr(opened, "templates", None))


def open_probe(text: str, max_bad_share: float, size: int = 32, allow_outside: bool = False) -> ProbeTask:
    """Open a folder with one folder of images per class, `.npz` with x and labels, or "builtin" (this size)."""
    if Path(text).suffix == ".npz":
        vectors = read_labeled_vectors(Path(text))
        return ProbeTask(text, text, vectors, np.arange(len(vectors.labels)), {})
    opened: Any = BuiltinLabeled(size=size) if text == "builtin" else open_labeled(text, allow_outside=allow_outside)
    return probe_task(text, text, opened, max_bad_share)


def probe_task(name: str, path: str, opened: Any, max_bad_share: float) -> ProbeTask:
    """Return a task on labeled images without bad samples.

    Raises:
        UserError: if no class has two images, one for the gallery and one to ask.

    """
    bad = check_samples(opened, max_bad_share=max_bad_share)
    numbers = usable(opened, bad)
    if np.bincount(np.asarray(opened.y_id)[numbers]).max(initial=0) < 2:
        raise UserError(f"{path}: no class has two usable images; neighbors need one to ask and one to find")
    return ProbeTask(name, path, opened, numbers, bad)


def _listed(opened: LabeledImages, path: Path, known: ClassificationSet) -> np.ndarray:
    """Return the numbers of the images in the list."""
    if not path.is_file():
        raise UserError(f"{path}: no such list of test images; the set needs {known.layout}")
    listed = {str(Path(line.strip()).with_suffix("")) for line in read_lines(path) if line.strip()}
    names = [str(Path(opened.name(number)).with_suffix("")) for number in range(len(opened))]
    missing = listed.difference(names)
    if missing:
        raise UserError(f"{path}: names {len(missing)} images that do not exist, such as {min(missing)}")
    return np.flatnonzero([name in listed for name in names])


def _class_folders(folder: Path, known: ClassificationSet) -> list[str]:
    """Return the folders in `folder` if there are as many as classes, otherwise an empty list."""
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name[0] != ".") if folder.is_dir() else []
    return names if len(names) == known.classes else []


def _find(known: RetrievalSet, folder: Path) -> tuple[Path, Path]:
    """Return the list, and the folder that names in it are relative to."""
    path = next((folder / name for name in known.lists if (folder / name).is_file()), None)
    images = next((folder / below for below in known.images if (folder / below).is_dir()), None)
    if path is None or images is None:
        what = "is not complete" if folder.is_dir() else "does not exist"
        raise UserError(f"{known.title}: {folder} {what}; it needs {known.layout}")
    return path, images


def _standard_set(text: str, known: Any, others: Any, option: str, other: str) -> tuple[str, Path] | None:
    """Return (name, folder) of a standard test set; None for a path."""
    if is_url(text):
        return None
    name, colon, folder = text.partition(":")
    if name in known:
        if not folder:
            raise UserError(f"{option} {text}: name its folder, as in {name}:FOLDER; it needs {known[name].layout}")
        return name, Path(folder)
    if name in others:
        raise UserError(f"{option} {text}: {name} belongs to {other}")
    if colon and name != "builtin" and not Path(text).exists() and "/" not in name and "{" not in text:
        near = difflib.get_close_matches(name, known)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise UserError(f"{option} {text}: there is no set called {name!r}; {hint}")
    return None


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


# -- class names -------------------------------------------------------------------------------------------------------


def names_of(class_folder: Path, top: Path, folders: list[str], known: ClassificationSet) -> dict[str, str]:
    """Return the name of every class by folder; `class_folder` holds the folders, `top` the whole set."""
    for folder in dict.fromkeys((class_folder, top)):
        if (folder / "classes.json").is_file():
            return _from_json(folder / "classes.json", folders)
    if not known.wordnet:
        return {folder: folder.replace("_", " ") for folder in folders}
    for path in (folder / name for folder in dict.fromkeys((class_folder, top)) for name in NAME_LISTS):
        if path.is_file():
            listed = {number: _first(names) for number, names in _NAME_LINE.findall(read_text(path))}
            if listed.keys() >= set(folders):
                return {folder: listed[folder] for folder in folders}
    raise UserError(
        f"{class_folder}: the folders are WordNet numbers ({folders[0]}, ...), which mean nothing to a model; "
        f'add classes.json, {{"{folders[0]}": "name", ...}}, or {NAME_LISTS[0]} to it'
    )


def _from_json(path: Path, folders: list[str]) -> dict[str, str]:
    try:
        names = parse_json(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    if isinstance(names, list) and len(names) == len(folders):
        names = dict(zip(folders, names, strict=True))
    if not isinstance(names, dict) or set(names) != set(folders):
        raise UserError(f"{path}: needs a dict from folder to name for the {len(folders)} folders, or a list of names")
    if odd := next((name for name in names.values() if not isinstance(name, str) or not name.strip()), None):
        raise UserError(f"{path}: {odd!r} is not a class name")
    return {folder: names[folder] for folder in folders}


def _first(names: str) -> str:
    """Return the first of several names of one class."""
    return names.split(",")[0].replace("_", " ").strip()
