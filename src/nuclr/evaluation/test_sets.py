"""Standard test sets: their layout on disk, which part is the test split, and the names of their classes.

Nothing is downloaded, and no list of class names is copied into this file. Class names come from the folders, from a
list that is part of the data set, or from a `classes.json` that the user puts next to the folders. The templates are
our own wording. `standard_sets` opens these sets.
"""

from collections.abc import Mapping
from dataclasses import dataclass


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
    """Labeled images, one folder per class, or the archives of CIFAR.

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
        archives: Whether the set may also be one of the archives in `nuclr.data.formats.cifar`.

    """

    title: str
    folders: tuple[str, ...]
    classes: int
    images: int
    templates: tuple[str, ...]
    layout: str
    wordnet: bool = False
    listed: str | None = None
    archives: bool = False


def _all_splits(*names: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(("test", "val"), names)


RETRIEVAL = {
    "mscoco": RetrievalSet(
        title="MSCOCO",
        lists=(
            CaptionLists(
                files=_all_splits("dataset_coco.json", "dataset.json"),
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
                files=_all_splits("dataset_flickr30k.json", "dataset.json"),
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
        layout="an original archive, unpacked or not (cifar-10-batches-bin/, cifar-10-batches-py/, "
        "cifar-10-binary.tar.gz, cifar-10-python.tar.gz), or the test images as test/airplane/*.png, ...",
        archives=True,
    ),
    "cifar100": ClassificationSet(
        title="CIFAR-100",
        folders=("test", "."),
        classes=100,
        images=10_000,
        templates=_OBJECTS,
        layout="an original archive, unpacked or not (cifar-100-binary/, cifar-100-python/, "
        "cifar-100-binary.tar.gz, cifar-100-python.tar.gz), or the test images as test/apple/*.png, ...",
        archives=True,
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
