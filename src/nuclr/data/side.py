"""One side of a source of pairs: its name, its column, its modality, which pairs share an item, and words for pages."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from nuclr.data.modalities.base import Modality

SideName = Literal["x", "y"]
SIDES: tuple[SideName, SideName] = ("x", "y")


@dataclass(frozen=True, eq=False)
class Side:
    """One side of n pairs.

    Attributes:
        name: the name in tables, metrics and messages, such as "image" or "question".
        key: the column that holds the items; None if the source has no columns.
        modality: what the items are: images, texts, vectors, or what a plugin has registered.
        ids: (n,) int64, the number of the distinct item of each pair. Pairs that share an item are not negatives of
            each other.

    """

    name: str
    key: str | None
    modality: Modality
    ids: np.ndarray = field(repr=False)


# -- words for the items of a side -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SideWords:
    """The words for the items of one side.

    Attributes:
        name: name of the side, as in the names of metrics: "image", "en".
        one: one item: "image", "caption", "en text".
        many: several items: "images", "captions", "en texts".

    """

    name: str
    one: str
    many: str


def name_sides(
    x_name: str,
    x_kind: str,
    y_name: str,
    y_kind: str,
    views: bool = False,
) -> tuple[SideWords, SideWords]:
    """Return the words for both sides.

    Args:
        x_name: name of side x.
        x_kind: its modality.
        y_name: name of side y.
        y_kind: its modality.
        views: True if both sides are views of the same items, which then have one name.

    Example:
        >>> [words.many for words in name_sides("image", "image", "text", "text")]
        ['images', 'captions']
        >>> [words.many for words in name_sides("en", "text", "de", "text")]
        ['en texts', 'de texts']

    """
    if views:
        return _words(x_kind, x_kind), _words(y_kind, y_kind)
    with_image = "image" in (x_name, y_name)
    return _words(x_name, x_kind, with_image), _words(y_name, y_kind, with_image)


def _words(
    name: str,
    kind: str,
    with_image: bool = False,
) -> SideWords:
    one = name if name in (kind, "image") else f"{name} {kind}"
    if name == "text" and with_image:
        one = "caption"
    return SideWords(name, one, one if one.endswith("s") else f"{one}s")
