"""Standard test sets: their layout on disk, which part is the test split, and the names of their classes.

Nothing is downloaded, and no list of class names is copied into this file. Class names come from the folders, from a
list that is part of the data set, or from a `classes.json` that the user puts next to the folders. The templates are
our own wording.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RetrievalSet:
    """Images with several captions each, in Karpathy's split.

    Attributes:
        title: Name to show.
        lists: Possible names of the JSON file.
        images: Subfolders that the file names in the JSON may be relative to.
        split: Which part is the test split.
        sizes: Number of images and captions of the test split, to detect an incomplete copy.
        layout: Which files to put where, for messages.

    """

    title: str
    lists: tuple[str, ...]
    images: tuple[str, ...]
    split: str
    sizes: tuple[int, int]
    layout: str


@dataclass(frozen=True)
class ClassificationSet:
    """Labeled images, one folder per class.

    Attributes:
        title: Name to show.
        folders: Subfolders that may hold the class folders.
        classes: Number of classes.
        wordnet: Whether the class folders are named by WordNet IDs (n01440764), which need class names.
        listed: File that lists the test images as CLASS/IMAGE, with or without suffix. None: all images are the test.
        templates: Prompts, with {} for the class name.
        layout: Which files to put where, for messages.

    """

    title: str
    folders: tuple[str, ...]
    classes: int
    wordnet: bool
    listed: str | None
    templates: tuple[str, ...]
    layout: str


RETRIEVAL = {
    "mscoco": RetrievalSet(
        title="MSCOCO",
        lists=("dataset_coco.json", "dataset.json"),
        images=(".", "images"),
        split="test",
        sizes=(5000, 25010),
        layout="dataset_coco.json (Karpathy's split) and the folder val2014/ with the images of COCO 2014",
    ),
    "flickr30k": RetrievalSet(
        title="Flickr30k",
        lists=("dataset_flickr30k.json", "dataset.json"),
        images=("flickr30k-images", "flickr30k_images", "images", "."),
        split="test",
        sizes=(1000, 5000),
        layout="dataset_flickr30k.json (Karpathy's split) and the folder flickr30k-images/ with the images",
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
    "cifar100": ClassificationSet(
        title="CIFAR-100",
        folders=("test", "."),
        classes=100,
        wordnet=False,
        listed=None,
        templates=_OBJECTS,
        layout="the test images as PNG, one folder per class: test/apple/*.png, test/aquarium_fish/*.png, ...",
    ),
    "imagenet1k": ClassificationSet(
        title="ImageNet-1k",
        folders=("val", "."),
        classes=1000,
        wordnet=True,
        listed=None,
        templates=_OBJECTS,
        layout="the validation images, one folder per class: val/n01440764/*.JPEG, ...; and LOC_synset_mapping.txt "
        "or classes.json, a dict from folder to name",
    ),
    "imagenet-r": ClassificationSet(
        title="ImageNet-R",
        folders=(".", "imagenet-r"),
        classes=200,
        wordnet=True,
        listed=None,
        templates=_RENDITIONS,
        layout="the unpacked archive: n01443537/*.jpg, ...; and its README.txt, or classes.json, a dict from folder to "
        "name",
    ),
    "dtd": ClassificationSet(
        title="DTD",
        folders=("images",),
        classes=47,
        wordnet=False,
        listed="labels/test1.txt",
        templates=("a photo of a {} texture.", "a {} surface.", "a close view of something {}.", "a {} pattern."),
        layout="the unpacked archive: images/banded/*.jpg, ... and labels/test1.txt",
    ),
    "food101": ClassificationSet(
        title="Food-101",
        folders=("images",),
        classes=101,
        wordnet=False,
        listed="meta/test.txt",
        templates=("a photo of {}, a dish.", "a plate of {}.", "{}, ready to eat.", "a serving of {} on a table."),
        layout="the unpacked archive: images/apple_pie/*.jpg, ... and meta/test.txt",
    ),
}
