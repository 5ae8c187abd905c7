"""The interface that every source of pairs has: `Pairs`, its samples, and bad samples; labeled items and views.

A source has n pairs, numbered 0 to n - 1 by their position in the source. A question with five answers gives five pairs
with consecutive numbers. The number of a pair never changes: it does not depend on the reading order, on resuming, on
the number of processes, or on broken samples next to it. The objectives can therefore keep one row of state per pair.
"""

import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from nuclr.data.side import SIDES, Side, SideName, SideWords, name_sides
from nuclr.errors import BadSample, UserError

__all__ = ["SIDES", "BadSample", "Labeled", "Pairs", "Sample", "Side", "SideName", "ViewPairs"]


class Sample(NamedTuple):
    """One pair, as `pairs[number]` returns it.

    `x` and `y` are each an RGB image, a text, a vector (d,), or the item of another modality. `x_id` and `y_id` are
    equal for pairs that share their x or their y.
    """

    x: Any
    y: Any
    number: int
    x_id: int
    y_id: int


class Pairs(ABC):
    """A source of n numbered pairs with random access, safe to read from several threads.

    `len(pairs)` and `pairs[number]` make it a map-style dataset: `torch.utils.data.DataLoader(pairs, collate_fn=...)`
    works. The program itself reads batches with `nuclr.data.Loader`.

    Attributes:
        sides: the two sides, "x" and "y": name, column, modality and ids of each.
        group: (n,) int64, equal for pairs whose x and y all belong together, as those of a row with several x and
            several y do. None if pairs share at most an x or a y.
        views: whether x and y are the same image, of which training makes different views.
        fingerprint: a hash of the list of pairs (not of the pixels), by which a resumed run recognizes its data.
        label: the source in a few characters, for `repr`.
        folder: the folder that holds the data; None if the source does not read files, so that no sample is bad.
        known_bad: number -> reason, for samples that the list alone shows to be bad, such as empty texts.

    Example:
        >>> from nuclr.data import open_pairs
        >>> pairs = open_pairs("builtin:n=100,seed=0")
        >>> pairs
        BuiltinPairs('seed=0,split=train', 100 pairs, image to text)
        >>> sample = pairs[3]
        >>> sample.x.size, sample.y, sample.number
        ((32, 32), 'pink shape over water', 3)

    """

    sides: dict[SideName, Side]
    fingerprint: str
    label: str
    group: np.ndarray | None = None
    views: bool = False
    folder: Path | None = None
    known_bad: dict[int, str]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of pairs, n."""

    @property
    def modalities(self) -> tuple[str, str]:
        """The names of the modalities of x and y, such as ("image", "text")."""
        return self.sides["x"].modality.name, self.sides["y"].modality.name

    @property
    def side_names(self) -> tuple[str, str]:
        """The names of the sides x and y, such as ("question", "answer")."""
        return self.sides["x"].name, self.sides["y"].name

    @property
    def words(self) -> tuple[SideWords, SideWords]:
        """What tables and pages call the items of x and y, such as "images" and "captions"."""
        x = self.sides["x"]
        y = self.sides["y"]
        return name_sides(
            x.name,
            x.modality.name,
            y.name,
            y.modality.name,
            self.views,
        )

    @abstractmethod
    def item(self, side: SideName, number: int) -> Any:
        """Return one item of a pair: a PIL image, a text, a vector (d,), or the item of another modality.

        An image is opened but not decoded yet, so that the caller can decode it at a smaller size.

        Args:
            side: "x" or "y".
            number: the number of the pair.

        Raises:
            BadSample: if the item cannot be read.

        """

    @abstractmethod
    def name(self, number: int) -> str:
        """Return the file, line or row of a pair, for messages and reports."""

    def item_name(self, side: SideName, number: int) -> str | None:
        """Return the name of one item of a pair, or None if it does not have a name of its own."""
        return self.name(number) if side == "x" or self.views else None

    def stamp(self) -> str:
        """Return a hash of the sizes and modification times of all files behind the pairs."""
        return ""

    def identity(self, side: SideName, number: int) -> str | None:
        """Return what identifies an item in other sources as well: the path of its file, or its text."""
        item = self.item(side, number) if self.sides[side].modality.in_memory else None
        return item if isinstance(item, str) else None

    def items(self, side: SideName, numbers: np.ndarray) -> Sequence[Any] | np.ndarray:
        """Return one side of several pairs: b items, or an array (b, d) of vectors.

        Args:
            side: "x" or "y".
            numbers: (b,), numbers of pairs.

        Raises:
            BadSample: if an item cannot be read.

        """
        return [self.item(side, number) for number in numbers.tolist()]

    def __getitem__(self, number: SupportsIndex) -> Sample:
        """Return one pair, with images decoded as upright RGB.

        Args:
            number: from 0 to n - 1.

        Raises:
            IndexError: if `number` is negative or too large.
            TypeError: if `number` is not a whole number.
            BadSample: if the sample is bad.

        """
        try:
            position = operator.index(number)
        except TypeError:
            raise TypeError(f"pairs[number]: number is {number!r}; needs one whole number") from None
        if not 0 <= position < len(self):
            raise IndexError(f"pairs[{position}]: there is no such pair; allowed: 0 to {len(self) - 1}")
        x = self.sides["x"]
        y = self.sides["y"]
        return Sample(
            x.modality.decode(self.item("x", position)),
            y.modality.decode(self.item("y", position)),
            position,
            int(x.ids[position]),
            int(y.ids[position]),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r}, {len(self):,} pairs, {' to '.join(self.modalities)})"


class Labeled(Pairs):
    """Items with classes: x is an image or a vector, and y the name of its class.

    Attributes:
        keys: the classes as the data set writes them, such as names of folders.
        classes: the names of the classes.
        templates: prompts with {} for the name of a class; empty if the data set does not have any.

    """

    keys: Sequence[str]
    classes: Sequence[str]
    templates: Sequence[str] = ()

    @property
    def labels(self) -> np.ndarray:
        """(n,) int64, the position of each item's class in `classes`."""
        return self.sides["y"].ids

    def prompts(self) -> list[list[str]]:
        """Return, for each class, its name in every template."""
        return fill_templates(self.templates, self.classes)


def fill_templates(templates: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Return, for each name of a class, every template with the name instead of {}."""
    return [[template.replace("{}", name) for template in templates] for name in names]


class ViewPairs(Pairs):
    """Pairs whose x and y are the same image.

    Every distinct image of the source is one pair, in the order of their first pairs.

    Args:
        source: pairs with images on one side.

    Raises:
        UserError: if no side of the source holds images.

    Example:
        >>> from nuclr.data import open_pairs
        >>> ViewPairs(open_pairs("builtin:n=100"))
        ViewPairs('seed=0,split=train', 100 pairs, image to image)

    """

    views = True

    def __init__(self, source: Pairs) -> None:
        sides = [name for name in SIDES if source.sides[name].modality.has_crops]
        if not sides:
            held = " and ".join(f"{kind}s" for kind in dict.fromkeys(source.modalities))
            raise UserError(
                f"{source.label}: data.contrast=views needs images, and this source holds {held}; "
                "name the column of images with data.x.key, or leave out data.contrast"
            )
        self._source = source
        self._side = sides[0]
        side = source.sides[self._side]
        _, first = np.unique(side.ids, return_index=True)
        self._numbers = np.sort(first)
        ids = np.arange(len(first))
        self.sides = {"x": replace(side, name="view 1", ids=ids), "y": replace(side, name="view 2", ids=ids)}
        self.label = source.label
        self.fingerprint = hashlib.sha256(f"views {source.fingerprint}".encode()).hexdigest()
        self.known_bad: dict[int, str] = {}  # an empty caption, for example, does not make the image bad
        self.folder = source.folder

    def __len__(self) -> int:
        return len(self._numbers)

    def item(self, side: SideName, number: int) -> Any:  # noqa: ARG002
        """Return the image, not decoded yet; it is the same on both sides."""
        return self._source.item(self._side, int(self._numbers[number]))

    def name(self, number: int) -> str:
        """Return the name of the image in the source."""
        return self._source.name(int(self._numbers[number]))

    def stamp(self) -> str:
        """Return the stamp of the source."""
        return self._source.stamp()
