"""A name or a path -> a test set: any pairs, any labeled images, or one of the usual sets as it lies on disk."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from nuclr.data import check_samples, open_labeled, open_pairs, usable
from nuclr.data.builtin import BuiltinLabeled
from nuclr.data.formats.embeddings import SUFFIXES, read_embeddings
from nuclr.data.labeled import LabeledImages, read_templates
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL, ClassificationSet, RetrievalSet
from nuclr.files import read_text
from nuclr.studies.evaluate.class_names import names_of
from nuclr.studies.evaluate.vectors import VectorClasses, read_classes

Classes = LabeledImages | BuiltinLabeled | VectorClasses


@dataclass(frozen=True)
class RetrievalTask:
    """Pairs to retrieve; `numbers` those in use, `bad` the others and why; `known`: one of the usual sets."""

    name: str
    path: str
    split: str | None
    pairs: Pairs
    numbers: np.ndarray
    bad: dict[int, str]
    known: bool

    @property
    def duplicates(self) -> str:
        """How captions that occur more than once count by default: "miss" for known sets, as others report them."""
        return "miss" if self.known else "merge"


@dataclass(frozen=True)
class ClassificationTask:
    """Labeled images or vectors; `numbers` those of the test part; `templates` None where prompts are vectors."""

    name: str
    path: str
    classes: Classes
    numbers: np.ndarray
    bad: dict[int, str]
    templates: list[str] | None


def open_retrieval(text: str, root: str | None, split: str | None, max_bad_share: float) -> RetrievalTask:
    """`text` is a path (see `nuclr.data.open_pairs`), or NAME:PATH with the name of a usual set."""
    found = _usual(text, RETRIEVAL, CLASSIFICATION, "--retrieval", "--classification")
    if found is None:
        pairs = cast(Pairs, open_pairs(text, root, split=split))
        _refuse_unlinked(text, root)
        return _retrieval_task(text, text, split, pairs, max_bad_share, known=False)
    name, folder = found
    known = RETRIEVAL[name]
    path, images = _find(known, folder)
    pairs = cast(Pairs, open_pairs(path, images, split=known.split))
    task = _retrieval_task(name, str(path), known.split, pairs, max_bad_share, known=True)
    sizes = len(np.unique(pairs.x_id)), len(pairs)
    if sizes != known.sizes:
        wanted = "{:,} images and {:,} captions".format(*known.sizes)
        raise UserError(
            f"{path}: split {known.split!r} has {sizes[0]:,} images and {sizes[1]:,} captions; {wanted} expected"
        )
    return task


def _retrieval_task(
    name: str, path: str, split: str | None, pairs: Pairs, max_bad_share: float, known: bool
) -> RetrievalTask:
    empty = [n for n, reason in getattr(pairs, "known_bad", {}).items() if reason == "empty caption"]
    bare: np.ndarray = np.setdiff1d(pairs.x_id[empty], np.delete(pairs.x_id, empty))
    if len(bare):
        first = pairs.name(int(np.flatnonzero(pairs.x_id == bare[0])[0]))
        more = f" ({len(bare)} such images)" if len(bare) > 1 else ""
        raise UserError(f"{path}: image {first} has no caption; add one or remove the image{more}")
    bad = check_samples(pairs, max_bad_share=max_bad_share)
    return RetrievalTask(name, path, split, pairs, usable(pairs, bad), bad, known)


def _refuse_unlinked(text: str, root: str | None) -> None:
    """An embedding file with an x that no y belongs to: as a query it has no right answer."""
    path = Path(root) / text if root is not None and (Path(root) / text).exists() else Path(text)
    if path.suffix not in SUFFIXES or not path.is_file():
        return
    found = read_embeddings(path)
    bare: np.ndarray = np.setdiff1d(np.arange(len(found.x)), found.y_to_x.numpy())
    if len(bare):
        more = f" ({len(bare)} such rows)" if len(bare) > 1 else ""
        raise UserError(f"{path}: x row {bare[0]} has no caption: y_to_x never names it; add one or remove it{more}")


def open_classification(
    text: str, classes: Path | None, templates: Path | None, max_bad_share: float, size: int = 32
) -> ClassificationTask:
    """`text`: a folder of classes, `.npz` with x, labels, prompts, "builtin" (of this size), NAME:PATH (usual sets)."""
    found = _usual(text, CLASSIFICATION, RETRIEVAL, "--classification", "--retrieval")
    if found is not None:
        return _usual_classification(*found, templates, max_bad_share)
    if text.partition(":")[0] == "builtin":
        opened: Any = BuiltinLabeled(size=size)
    elif Path(text).suffix == ".npz":
        if classes is not None or templates is not None:
            raise UserError(f"{text}: holds prompts as vectors; --classes and --templates go with images")
        vectors = read_classes(Path(text))
        return ClassificationTask(text, text, vectors, np.arange(len(vectors.labels)), {}, None)
    else:
        opened = open_labeled(text, classes, templates)
    return classification_task(text, text, opened, np.arange(len(opened)), max_bad_share)


def _usual_classification(name: str, folder: Path, templates: Path | None, max_bad_share: float) -> ClassificationTask:
    known = CLASSIFICATION[name]
    place = next((folder / below for below in known.folders if _class_folders(folder / below, known)), None)
    if place is None:
        what = f"has no {known.classes} folders of classes" if folder.is_dir() else "is not there"
        raise UserError(f"{known.title}: {folder} {what}; needs {known.layout}")
    names = names_of(place, folder, _class_folders(place, known), known)
    prompts = list(known.templates) if templates is None else read_templates(templates)
    opened = LabeledImages(place, names, prompts)
    numbers = np.arange(len(opened))
    if known.listed is not None:
        numbers = _listed(opened, folder / known.listed, known)
    return classification_task(name, str(place), opened, numbers, max_bad_share)


def classification_task(
    name: str, path: str, opened: Any, numbers: np.ndarray, max_bad_share: float
) -> ClassificationTask:
    """Labeled images, looked through for bad ones."""
    bad = check_samples(opened, numbers, max_bad_share)
    return ClassificationTask(name, path, opened, usable(opened, bad, numbers), bad, getattr(opened, "templates", None))


def _listed(opened: LabeledImages, path: Path, known: ClassificationSet) -> np.ndarray:
    """Numbers of the pictures in the list."""
    if not path.is_file():
        raise UserError(f"{path}: no such list of test pictures; needs {known.layout}")
    wanted = {str(Path(line.strip()).with_suffix("")) for line in read_text(path).splitlines() if line.strip()}
    names = [str(Path(opened.name(number)).with_suffix("")) for number in range(len(opened))]
    missing = wanted.difference(names)
    if missing:
        raise UserError(f"{path}: names {len(missing)} pictures that are not there, such as {min(missing)}")
    return np.flatnonzero([name in wanted for name in names])


def _class_folders(folder: Path, known: ClassificationSet) -> list[str]:
    """The folders in it, if they are as many as there are classes."""
    found = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name[0] != ".") if folder.is_dir() else []
    return found if len(found) == known.classes else []


def _find(known: RetrievalSet, folder: Path) -> tuple[Path, Path]:
    """The list, and the folder that its names are relative to."""
    path = next((folder / name for name in known.lists if (folder / name).is_file()), None)
    images = next((folder / below for below in known.images if (folder / below).is_dir()), None)
    if path is None or images is None:
        what = "is not complete" if folder.is_dir() else "is not there"
        raise UserError(f"{known.title}: {folder} {what}; needs {known.layout}")
    return path, images


def _usual(text: str, known: Any, others: Any, option: str, other: str) -> tuple[str, Path] | None:
    """(name, folder) of one of the usual sets; None for a path."""
    name, colon, folder = text.partition(":")
    if name in known:
        if not folder:
            raise UserError(f"{option} {text}: say where it is, as in {name}:FOLDER; needs {known[name].layout}")
        return name, Path(folder)
    if name in others:
        raise UserError(f"{option} {text}: {name} goes with {other}")
    if colon and name != "builtin" and not Path(text).exists() and "/" not in name and "{" not in text:
        near = difflib.get_close_matches(name, known)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise UserError(f"{option} {text}: no set is called {name!r}; {hint}")
    return None
