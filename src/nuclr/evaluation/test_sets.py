"""The usual test sets: how each lies on disk, which part of it is the test, what its classes are called.

Nothing is downloaded, and no list of class names is copied here: names come from the folders, from a list that the data
set itself brings, or from a `classes.json` that the user puts beside them. Templates are our own wording.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RetrievalSet:
    """Pictures with several captions each, in Karpathy's split.

    title   for people
    lists   names that the JSON may have
    images  folders, below the set's own, that the names in it may be relative to
    split   which part is the test
    sizes   images and captions of that part, to tell an incomplete copy
    layout  what to put where
    """

    title: str
    lists: tuple[str, ...]
    images: tuple[str, ...]
    split: str
    sizes: tuple[int, int]
    layout: str


@dataclass(frozen=True)
class ClassificationSet:
    """Labeled pictures, one folder a class.

    title      for people
    folders    where the folders of the classes may be, below the set's own
    classes    how many there are
    wordnet    whether the folders are called by WordNet numbers (n01440764), which need names
    listed     file that lists the test pictures as CLASS/PICTURE, with or without suffix; None: all are the test
    templates  prompts, with {} in the class's place
    layout     what to put where
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
        layout="dataset_coco.json (Karpathy's split) and the folder val2014/ with the pictures of COCO 2014",
    ),
    "flickr30k": RetrievalSet(
        title="Flickr30k",
        lists=("dataset_flickr30k.json", "dataset.json"),
        images=("flickr30k-images", "flickr30k_images", "images", "."),
        split="test",
        sizes=(1000, 5000),
        layout="dataset_flickr30k.json (Karpathy's split) and the folder flickr30k-images/ with the pictures",
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
        layout="the test pictures as PNG, one folder a class: test/apple/*.png, test/aquarium_fish/*.png, ...",
    ),
    "imagenet1k": ClassificationSet(
        title="ImageNet-1k",
        folders=("val", "."),
        classes=1000,
        wordnet=True,
        listed=None,
        templates=_OBJECTS,
        layout="the validation pictures, one folder a class: val/n01440764/*.JPEG, ...; and LOC_synset_mapping.txt "
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
