"""Open the standard test sets of `test_sets`. A file that is missing, and an incomplete copy, are refused by name."""

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data import check_samples, open_pairs
from nuclr.data.formats.cifar import CifarImages, open_cifar
from nuclr.data.labeled import LabeledImages
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.pairs import Pairs
from nuclr.data.prompts import read_json
from nuclr.errors import UserError
from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL, CaptionLists, ClassificationSet, RetrievalSet
from nuclr.files import read_lines, read_text
from nuclr.remote import is_url

# Lists of WordNet numbers with names, as they come with ImageNet (the contest's and the project's) and ImageNet-R.
NAME_LISTS = ("LOC_synset_mapping.txt", "words.txt", "README.txt")
_NAME_LINE = re.compile(r"^\s*(n\d{8})\s+(\S.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class StandardPairs:
    """A retrieval set: its pairs, the list that they come from, and the split."""

    pairs: Pairs
    path: Path
    split: str


@dataclass(frozen=True)
class StandardClasses:
    """A classification set: its images, the numbers of the test images, where they are, and the templates."""

    images: LabeledImages | CifarImages
    numbers: np.ndarray
    path: Path
    templates: list[str]


def parse_standard(
    text: str, known: Collection[str], option: str, others: Collection[str] = (), other: str = ""
) -> tuple[str, Path] | None:
    """Return name and folder of NAME:FOLDER, with the name of a standard set; None for a path.

    Args:
        text: what the user wrote.
        known: the names that are allowed, of `RETRIEVAL` or of `CLASSIFICATION`.
        option: the option or setting, for messages.
        others: the names that belong to another option.
        other: that option.

    Raises:
        UserError: if the folder is missing or the name is unknown.

    """
    if is_url(text):
        return None
    name, colon, folder = text.partition(":")
    if name in known and not (Path(text).exists() and not colon):
        if not folder:
            layout = (RETRIEVAL.get(name) or CLASSIFICATION[name]).layout
            raise UserError(f"{option} {text}: name its folder, as in {name}:FOLDER; it needs {layout}")
        return name, Path(folder)
    if name in others and colon:
        raise UserError(f"{option} {text}: {name} belongs to {other}")
    if colon and name != "builtin" and not Path(text).exists() and "/" not in name and "{" not in text:
        near = difflib.get_close_matches(name, known)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise UserError(f"{option} {text}: there is no set called {name!r}; {hint}")
    return None


# -- retrieval ---------------------------------------------------------------------------------------------------------


def open_standard_pairs(
    name: str,
    folder: Path,
    split: str = "test",
    allow_outside: bool = False,
    x_name: str | None = None,
    y_name: str | None = None,
) -> StandardPairs:
    """Open MSCOCO or Flickr30k.

    Args:
        name: a key of `RETRIEVAL`.
        folder: the folder with the list and the images.
        split: "test" or "val".
        allow_outside: follow symbolic links that lead out of the folder.
        x_name: the name of side x, "image" by default.
        y_name: the name of side y, "text" by default.

    Raises:
        UserError: if a file is missing, or the copy is incomplete; it names the file.

    """
    known = RETRIEVAL[name]
    if split not in known.sizes:
        raise UserError(f"{known.title}: there is no split {split!r}; allowed: {', '.join(known.sizes)}")
    path, lists = _find_list(known, folder, split)
    root = next((root for root, images in lists.images if (folder / images).is_dir()), None)
    if root is None:
        raise UserError(f"{known.title}: {folder / lists.images[0][1]}: no such folder; it needs {known.layout}")
    inside = split if lists.has_splits else None
    pairs = open_pairs(path, folder / root, split=inside, allow_outside=allow_outside, x_name=x_name, y_name=y_name)
    _refuse_incomplete(known.title, pairs, np.arange(len(pairs)))
    sizes = len(np.unique(pairs.x_id)), len(pairs)
    images, captions = known.sizes[split]
    if sizes[0] != images or captions not in (None, sizes[1]):
        expected = f"{images:,} images" + (f" and {captions:,} captions" if captions is not None else "")
        raise UserError(
            f"{path}: split {split!r} has {sizes[0]:,} images and {sizes[1]:,} captions; it needs {expected}"
        )
    return StandardPairs(pairs, path, split)


def _find_list(known: RetrievalSet, folder: Path, split: str) -> tuple[Path, CaptionLists]:
    if not folder.is_dir():
        raise UserError(f"{known.title}: {folder} does not exist; it needs {known.layout}")
    names = []
    for lists in known.lists:
        for name in lists.files[split]:
            if (folder / name).is_file():
                return folder / name, lists
            names.append(name)
    missing = " or ".join(dict.fromkeys(names))
    raise UserError(f"{known.title}: {folder} has no {missing}; it needs {known.layout}")


# -- classification ----------------------------------------------------------------------------------------------------


def open_standard_classes(name: str, folder: Path, allow_outside: bool = False) -> StandardClasses:
    """Open a classification set.

    Args:
        name: a key of `CLASSIFICATION`.
        folder: the folder with the images, or an archive of CIFAR.
        allow_outside: follow symbolic links that lead out of the folder.

    Raises:
        UserError: if a file is missing, or the copy is incomplete; it names the file.

    """
    known = CLASSIFICATION[name]
    class_folder = next((folder / below for below in known.folders if _class_folders(folder / below, known)), None)
    images: LabeledImages | CifarImages | None = None
    if class_folder is not None:
        names = names_of(class_folder, folder, _class_folders(class_folder, known), known)
        images, path = LabeledImages(class_folder, names, list(known.templates), allow_outside), class_folder
    elif known.archives:
        images = open_cifar(name, folder)
        path = images.path if images is not None else folder
    if images is None:
        raise UserError(f"{known.title}: {_describe(folder, known)}; it needs {known.layout}")
    if len(images.classes) != known.classes:
        raise UserError(f"{path}: has {len(images.classes)} classes; {known.title} has {known.classes}")
    numbers = np.arange(len(images))
    if known.listed is not None:
        numbers = _listed(images, path.parent / known.listed, known)
    _refuse_incomplete(known.title, images, numbers)
    if len(numbers) != known.images:
        raise UserError(f"{path}: has {len(numbers):,} test images; {known.title} has {known.images:,}")
    return StandardClasses(images, numbers, path, list(known.templates))


def _describe(folder: Path, known: ClassificationSet) -> str:
    """Return why a folder does not hold a set."""
    if not folder.exists():
        return f"{folder} does not exist"
    for below in known.folders:
        inner = folder / below
        files = inner.iterdir() if inner.is_dir() else iter(())
        if any(file.suffix.lower() in SUFFIXES for file in files):
            return f"{inner} holds images that are not sorted into class folders"
    return f"{folder} does not have {known.classes} class folders"


def _class_folders(folder: Path, known: ClassificationSet) -> list[str]:
    """Return the folders in `folder` if there are as many as classes, otherwise an empty list."""
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name[0] != ".") if folder.is_dir() else []
    return names if len(names) == known.classes else []


def _listed(images: Any, path: Path, known: ClassificationSet) -> np.ndarray:
    """Return the numbers of the images in the list."""
    if not path.is_file():
        raise UserError(f"{path}: no such list of test images; {known.title} needs {known.layout}")
    listed = {_without_suffix(line.strip()): line.strip() for line in read_lines(path) if line.strip()}
    names = [_without_suffix(images.name(number)) for number in range(len(images))]
    missing = sorted(listed.keys() - set(names))
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise UserError(f"{path}: names an image that does not exist: {listed[missing[0]]}{more}")
    return np.flatnonzero([name in listed for name in names])


def _without_suffix(name: str) -> str:
    return name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in SUFFIXES else name


def _refuse_incomplete(title: str, pairs: Pairs, numbers: np.ndarray) -> None:
    """Refuse a set with a file that cannot be read: results on a part of it could not be compared with others."""
    bad = check_samples(pairs, numbers, max_bad_share=1.0)
    if bad:
        number, reason = next(iter(bad.items()))
        files = len(np.unique(pairs.x_id[list(bad)]))
        more = f"; {files - 1:,} more like it" if files > 1 else ""
        raise UserError(f"{title}: {pairs.name(number)}: {reason}{more}; the set must be complete")


# -- class names -------------------------------------------------------------------------------------------------------


def names_of(class_folder: Path, top: Path, folders: list[str], known: ClassificationSet) -> dict[str, str]:
    """Return the name of every class by folder; `class_folder` holds the folders, `top` the whole set."""
    places = list(dict.fromkeys((class_folder, top)))
    for folder in places:
        if (folder / "classes.json").is_file():
            return _from_json(folder / "classes.json", folders)
    if not known.wordnet:
        return {folder: folder.replace("_", " ") for folder in folders}
    for path in (folder / name for folder in places for name in NAME_LISTS):
        if path.is_file():
            listed = {number: _first(names) for number, names in _NAME_LINE.findall(read_text(path))}
            if listed.keys() >= set(folders):
                return {folder: listed[folder] for folder in folders}
    raise UserError(
        f"{class_folder}: the folders are WordNet numbers ({folders[0]}, ...), which mean nothing to a model; "
        f'add classes.json, {{"{folders[0]}": "name", ...}}, or {NAME_LISTS[0]} to it'
    )


def _from_json(path: Path, folders: list[str]) -> dict[str, str]:
    names = read_json(path, read_text(path))
    if isinstance(names, list) and len(names) == len(folders):
        names = dict(zip(folders, names, strict=True))
    if not isinstance(names, dict) or set(names) != set(folders):
        raise UserError(f"{path}: needs a dict from folder to name for the {len(folders)} folders, or a list of names")
    for name in names.values():
        if not isinstance(name, str) or not name.strip():
            raise UserError(f"{path}: {name!r} is not a class name")
    return {folder: names[folder] for folder in folders}


def _first(names: str) -> str:
    """Return the first of several names of one class."""
    return names.split(",")[0].replace("_", " ").strip()
