"""Standard test sets: their layout on disk, which part is the test split, and the names of their classes.

Nothing is downloaded, and no list of class names is copied into this file. Class names come from the folders, from a
list that is part of the data set, or from a `classes.json` that the user puts next to the folders. The templates are
our own wording. A file that is missing, and an incomplete copy, are refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nuclr.data import Labeled, SideChoice, check_samples, open_pairs
from nuclr.data.formats.cifar import VERSIONS, open_cifar
from nuclr.data.labeled import LabeledImages, class_folders, open_class_folder
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.files import read_lines, read_text
from nuclr.remote import is_url

# Lists of WordNet numbers with names, as they come with ImageNet (the contest's and the project's) and ImageNet-R.
NAME_LISTS = ("LOC_synset_mapping.txt", "words.txt", "README.txt")
_NAME_LINE = re.compile(r"^\s*(n\d{8})\s+(\S.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class CaptionLists:
    """One way in which a retrieval set is distributed.

    Attributes:
        files: Split -> possible names of its JSON file. Karpathy's file holds all splits.
        has_splits: Whether the entries name their split, as Karpathy's do. ALBEF has a file per split.
        images: (root, folder): file names in the list are relative to the root if the folder exists. The first folder
            is the one that messages name.

    """

    files: Mapping[str, tuple[str, ...]]
    has_splits: bool
    images: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RetrievalSet:
    """Images with several captions each, in Karpathy's split.

    Attributes:
        title: Name to show.
        lists: The ways in which it is distributed; the first one that is found is used.
        sizes: Split -> number of images, and of captions if known, to detect an incomplete copy.
        layout: Which files to put where, for messages.

    """

    title: str
    lists: tuple[CaptionLists, ...]
    sizes: Mapping[str, tuple[int, int | None]]
    layout: str


@dataclass(frozen=True)
class ClassificationSet:
    """Labeled images, one folder per class, or the unpacked archives of CIFAR.

    Attributes:
        title: Name to show.
        folders: Subfolders that may hold the class folders.
        classes: Number of classes.
        images: Number of test images, to detect an incomplete copy.
        templates: Prompts, with {} for the class name.
        layout: Which files to put where, for messages.
        wordnet: Whether the class folders are named by WordNet IDs (n01440764), which need class names.
        listed: File that lists the test images as CLASS/IMAGE, with or without suffix, relative to the parent of the
            class folders. None: all images are the test.

    """

    title: str
    folders: tuple[str, ...]
    classes: int
    images: int
    templates: tuple[str, ...]
    layout: str
    wordnet: bool = False
    listed: str | None = None


RETRIEVAL = {
    "mscoco": RetrievalSet(
        title="MSCOCO",
        lists=(
            CaptionLists(
                files=dict.fromkeys(("test", "val"), ("dataset_coco.json", "dataset.json")),
                has_splits=True,
                images=((".", "val2014"), ("images", "images/val2014")),
            ),
            CaptionLists(
                files={"test": ("coco_test.json",), "val": ("coco_val.json",)},
                has_splits=False,
                images=((".", "val2014"), ("images", "images/val2014")),
            ),
        ),
        sizes={"test": (5000, 25010), "val": (5000, None)},
        layout="dataset_coco.json (Karpathy) or coco_test.json (ALBEF), and the folder val2014/ with the images of "
        "COCO 2014",
    ),
    "flickr30k": RetrievalSet(
        title="Flickr30k",
        lists=(
            CaptionLists(
                files=dict.fromkeys(("test", "val"), ("dataset_flickr30k.json", "dataset.json")),
                has_splits=True,
                images=tuple((name, name) for name in ("flickr30k-images", "flickr30k_images", "images", "Images")),
            ),
            CaptionLists(
                files={"test": ("flickr30k_test.json",), "val": ("flickr30k_val.json",)},
                has_splits=False,
                images=((".", "flickr30k-images"), ("images", "images/flickr30k-images")),
            ),
        ),
        sizes={"test": (1000, 5000), "val": (1014, None)},
        layout="dataset_flickr30k.json (Karpathy) or flickr30k_test.json (ALBEF), and the folder flickr30k-images/ "
        "with the images",
    ),
}

_OBJECTS = (
    "a photo of a {}.",
    "a picture showing a {}.",
    "a close view of a {}.",
    "a {} seen from afar.",
    "a blurred photo of a {}.",
    "a bright photo of one {}.",
    "a dark photo of a {}.",
    "there is a {} in this picture.",
)
_RENDITIONS = (
    "a {}.",
    "a drawing of a {}.",
    "a painting of a {}.",
    "a cartoon of a {}.",
    "a sculpture of a {}.",
    "a toy {}.",
    "a {} made of cloth.",
    "graffiti of a {}.",
    "a tattoo of a {}.",
    "a {} in a video game.",
)

CLASSIFICATION = {
    "cifar10": ClassificationSet(
        title="CIFAR-10",
        folders=("test", "."),
        classes=10,
        images=10_000,
        templates=_OBJECTS,
        layout="the unpacked binary archive (cifar-10-batches-bin/), or the test images as test/airplane/*.png, ...",
    ),
    "cifar100": ClassificationSet(
        title="CIFAR-100",
        folders=("test", "."),
        classes=100,
        images=10_000,
        templates=_OBJECTS,
        layout="the unpacked binary archive (cifar-100-binary/), or the test images as test/apple/*.png, ...",
    ),
    "imagenet1k": ClassificationSet(
        title="ImageNet-1k",
        folders=("val", ".", "ILSVRC/Data/CLS-LOC/val"),
        classes=1000,
        images=50_000,
        templates=_OBJECTS,
        layout="the validation images, one folder per class: val/n01440764/*.JPEG, ...; and LOC_synset_mapping.txt "
        "or classes.json, a dict from folder to name",
        wordnet=True,
    ),
    "imagenet-r": ClassificationSet(
        title="ImageNet-R",
        folders=(".", "imagenet-r"),
        classes=200,
        images=30_000,
        templates=_RENDITIONS,
        layout="the unpacked archive: imagenet-r/n01443537/*.jpg, ... and its README.txt, or classes.json, a dict from "
        "folder to name",
        wordnet=True,
    ),
    "dtd": ClassificationSet(
        title="DTD",
        folders=("images", "dtd/images"),
        classes=47,
        images=1880,
        templates=("a photo of a {} texture.", "a {} surface.", "a close view of something {}.", "a {} pattern."),
        layout="the unpacked archive: dtd/images/banded/*.jpg, ... and dtd/labels/test1.txt",
        listed="labels/test1.txt",
    ),
    "food101": ClassificationSet(
        title="Food-101",
        folders=("images", "food-101/images"),
        classes=101,
        images=25_250,
        templates=("a photo of {}, a dish.", "a plate of {}.", "{}, ready to eat.", "a serving of {} on a table."),
        layout="the unpacked archive: food-101/images/apple_pie/*.jpg, ... and food-101/meta/test.txt",
        listed="meta/test.txt",
    ),
}


def parse_standard(
    text: str,
    known: Mapping[str, RetrievalSet | ClassificationSet],
    option: str,
) -> tuple[str, Path] | None:
    """Return name and folder of NAME:FOLDER, with the name of a standard set; None for a path.

    Args:
        text: what the user wrote.
        known: the sets that are allowed, `RETRIEVAL` or `CLASSIFICATION`.
        option: the option or setting, for messages.

    Raises:
        UserError: if the folder is missing or the name is unknown.

    """
    name, colon, folder = text.partition(":")
    is_path = "::" in text or is_url(text) or Path(text).exists()  # "::" separates several tars
    if is_path or name == "builtin" or not (colon or name in known):
        return None
    if name in known and folder:
        return name, Path(folder)
    if name not in known and ("/" in name or "{" in text):
        return None
    example = name if name in known else next(iter(known))
    raise UserError(f"{option} {text}: name a set and its folder, as in {example}:FOLDER; known: {', '.join(known)}")


def open_standard_pairs(
    name: str,
    folder: Path,
    split: str = "test",
    allow_outside: bool = False,
    x_name: str | None = None,
    y_name: str | None = None,
) -> tuple[Pairs, Path]:
    """Open MSCOCO or Flickr30k, and return the pairs and the list that they come from.

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
    found = {folder / file: lists for lists in known.lists for file in lists.files[split] if (folder / file).is_file()}
    if not found:
        raise UserError(f"{known.title}: {folder} has no list of captions; it needs {known.layout}")
    path, lists = next(iter(found.items()))
    root = next((root for root, images in lists.images if (folder / images).is_dir()), None)
    if root is None:
        raise UserError(f"{known.title}: {folder / lists.images[0][1]}: no such folder; it needs {known.layout}")
    pairs = open_pairs(
        path,
        folder / root,
        x=SideChoice(name=x_name),
        y=SideChoice(name=y_name),
        split=split if lists.has_splits else None,
        allow_outside=allow_outside,
    )
    _refuse_incomplete(known.title, pairs, np.arange(len(pairs)))
    sizes = (len(np.unique(pairs.sides["x"].ids)), len(pairs))
    images, captions = known.sizes[split]
    if sizes not in ((images, captions), (images, sizes[1] if captions is None else captions)):
        raise UserError(f"{path}: split {split!r} has {sizes} images and captions; it needs {known.sizes[split]}")
    return pairs, path


def open_standard_classes(
    name: str,
    folder: Path,
    allow_outside: bool = False,
) -> tuple[Labeled, np.ndarray, Path]:
    """Open a classification set, and return its images with templates, the numbers of the test images, and its folder.

    Args:
        name: a key of `CLASSIFICATION`.
        folder: the folder with the images.
        allow_outside: follow symbolic links that lead out of the folder.

    Raises:
        UserError: if a file is missing, or the copy is incomplete; it names the file.

    """
    known = CLASSIFICATION[name]
    places = [folder / below for below in known.folders]
    class_folder = next((place for place in places if len(class_folders(place)) == known.classes), None)
    archive = open_cifar(name, folder) if class_folder is None and name in VERSIONS else None
    images: Labeled
    if class_folder is not None:
        images = _open_folders(
            class_folder,
            folder,
            known,
            allow_outside,
        )
        path = class_folder
    elif archive is not None:
        images = archive
        path = archive.path
    else:
        raise UserError(f"{known.title}: {folder} does not have {known.classes} class folders; it needs {known.layout}")
    images.templates = list(known.templates)
    numbers = np.arange(len(images))
    if known.listed is not None:
        numbers = _listed(images, path.parent / known.listed, known)
    _refuse_incomplete(known.title, images, numbers)
    if (len(images.classes), len(numbers)) != (known.classes, known.images):
        raise UserError(
            f"{path}: has {len(images.classes)} classes and {len(numbers):,} test images; "
            f"{known.title} has {known.classes} and {known.images:,}"
        )
    return images, numbers, path


def _open_folders(
    class_folder: Path,
    top: Path,
    known: ClassificationSet,
    allow_outside: bool,
) -> LabeledImages:
    """Open class folders, with the names of their classes; `top` is the folder of the whole set."""
    if (class_folder / "classes.json").is_file():
        return open_class_folder(class_folder, allow_outside)
    folders = class_folders(class_folder)
    names = {folder: folder.replace("_", " ") for folder in folders}
    if known.wordnet:
        names = {}
        for path in (place / name for place in (class_folder, top) for name in NAME_LISTS):
            if path.is_file():
                # A class has several names, of which the first is used.
                lines = _NAME_LINE.findall(read_text(path))
                names |= {number: text.split(",")[0].replace("_", " ").strip() for number, text in lines}
        if not names.keys() >= set(folders):
            raise UserError(
                f"{class_folder}: the folders are WordNet numbers ({folders[0]}, ...), which mean nothing to a model; "
                f'add classes.json, {{"{folders[0]}": "name", ...}}, or {NAME_LISTS[0]} to it'
            )
    return LabeledImages(
        class_folder,
        {folder: names[folder] for folder in folders},
        [],
        allow_outside,
    )


def _listed(
    images: Labeled,
    path: Path,
    known: ClassificationSet,
) -> np.ndarray:
    """Return the numbers of the images in the list."""
    if not path.is_file():
        raise UserError(f"{path}: no such list of test images; {known.title} needs {known.layout}")
    listed = {_without_suffix(line.strip()): line.strip() for line in read_lines(path) if line.strip()}
    names = [_without_suffix(images.name(number)) for number in range(len(images))]
    missing = sorted(listed.keys() - set(names))
    if missing:
        raise UserError(f"{path}: {len(missing):,} images do not exist, such as {listed[missing[0]]}")
    return np.flatnonzero([name in listed for name in names])


def _without_suffix(name: str) -> str:
    return name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in SUFFIXES else name


def _refuse_incomplete(
    title: str,
    pairs: Pairs,
    numbers: np.ndarray,
) -> None:
    """Refuse a set with a file that cannot be read: results on a part of it could not be compared with others."""
    bad = check_samples(pairs, numbers, max_bad_share=1.0)
    for number, reason in bad.items():
        raise UserError(f"{title}: {pairs.name(number)}: {reason} ({len(bad):,} bad samples); the set must be complete")
