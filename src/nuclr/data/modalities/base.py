"""The interface of a modality, and the registry of modalities.

A modality is the kind of data on one side of a pair: how a cell of a column is read, when a sample is bad, how items
form a batch, and how an item is shown on a page. The rest of the program handles both sides of a pair through their
modalities. Another modality is one file outside of the package, named by the setting `plugins`:

    class Waveform(Modality):
        name = "waveform"

        def read(self, cell, folder):  # a path to a .npy file, or a list of numbers
            array = np.load(io.BytesIO(folder.read(cell))) if isinstance(cell, str) else cell
            return array.astype(np.float32)

        def collate(self, items, options=None):
            return torch.from_numpy(np.stack(items))

        def show(self, item):
            return item

    register_modality(Waveform())

A column holds it with `data.x.modality=waveform`, or without this setting if `recognize` returns True for its cells.
"""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from nuclr.errors import BadSample
from nuclr.image_files import read_file

Shown = Image.Image | str | np.ndarray  # what a page can show: a picture, a text, numbers


class WrongCellError(BadSample):
    """A cell of a type that a column cannot hold; a list with such a cell is refused."""


@dataclass(frozen=True)
class Folder:
    """The folder that names of files in a column are relative to.

    Attributes:
        path: the folder.
        inside: the folder that files must be in after all symbolic links are followed, itself without links (see
            `boundary`). None allows all folders (setting `data.allow_outside`).

    """

    path: Path
    inside: Path | None

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Args:
            name: the name, relative to the folder.

        Raises:
            BadSample: if the file is missing, empty, too large, not a regular file, outside of `inside`, or cannot be
                read.

        """
        return read_file(self.path / name, self.inside)


class Modality(ABC):
    """The kind of data on one side of a pair.

    A *cell* is a value in a column: a text (often the name of a file), bytes, or a list of numbers, which arrives as a
    float64 array. An *item* is what the cell stands for: a PIL image, a text, a vector, or an object of your own.
    `read`, `check` and `collate` are called from several threads.

    Attributes:
        name: the name in settings (`data.x.modality`), in lower case.
        decodes: whether `read` does work that is worth a thread, such as reading and decoding a file. If False on both
            sides, batches are made without threads.
        in_memory: whether lists hold the items themselves, checked when the list is read. Items of other modalities
            are read and checked once before the first epoch.
        in_files: whether every item is a file, named in a list or stored as bytes. Otherwise cells may also be other
            texts and lists of numbers.
        has_crops: whether items are images: training takes random crops of them, and the views of an item are
            augmentations of it instead of other items.

    """

    name: str
    decodes: bool = True
    in_memory: bool = False
    in_files: bool = False
    has_crops: bool = False

    @abstractmethod
    def read(self, cell: Any, folder: Folder) -> Any:
        """Return the item of a cell.

        Args:
            cell: a text, bytes, or a float64 array.
            folder: reads files by their names: `folder.read(cell)`.

        Raises:
            BadSample: if it cannot be read.

        """

    @abstractmethod
    def collate(self, items: Sequence[Any] | np.ndarray, options: Any = None) -> Tensor | list[Any]:
        """Return the batch of b items: a tensor (b, ...), or a list of b items.

        Args:
            items: the items, from `read`.
            options: the side's options from `Loader`; None for the modality's defaults.

        """

    def show(self, item: Any) -> Shown:
        """Return what a page shows for an item: a picture, a text, or an array of numbers; by default `decode`."""
        shown: Shown = self.decode(item)
        return shown

    def check(self, item: Any) -> None:  # noqa: B027 (a modality may have nothing to check)
        """Check an item before the first epoch.

        Raises:
            BadSample: if it cannot be used.

        """

    def decode(self, item: Any) -> Any:
        """Return an item ready for use, such as an image that was only opened; by default the item itself.

        Raises:
            BadSample: if it cannot be decoded.

        """
        return item

    def width(self, item: Any) -> int | None:  # noqa: ARG002
        """Return the number of coordinates of an item; None if items do not all have the same."""
        return None

    def augment(
        self,
        batch: Any,
        seed: int,  # noqa: ARG002
        epoch: int,  # noqa: ARG002
        step: int,  # noqa: ARG002
        rank: int = 0,  # noqa: ARG002
        world: int = 1,  # noqa: ARG002
    ) -> Any:
        """Return a random variation of a batch in training; by default the batch itself.

        Random numbers should be drawn for the global batch from (seed, epoch, step), of which this process takes part
        `rank` of `world`. Then resumed runs and runs on several processes augment in the same way.
        """
        return batch

    def recognize(self, cells: Sequence[Any]) -> bool:  # noqa: ARG002
        """Return whether a column with these cells (texts, bytes or lists of numbers) holds this modality."""
        return False


_REGISTRY: dict[str, Modality] = {}


def register_modality(modality: Modality) -> None:
    """Add a modality, usually from a plugin; one of the same name is replaced.

    Args:
        modality: the object. Its `name` is the value of the setting `data.x.modality`.

    Raises:
        TypeError: if it is not a `Modality`.
        ValueError: if its name is not a lower-case word.

    Example:
        >>> from nuclr.data.modalities import TextModality
        >>> class Code(TextModality):
        ...     name = "code"
        >>> register_modality(Code())
        >>> get_modality("code").collate(["x = 1"])
        ['x = 1']

    """
    if not isinstance(modality, Modality):
        raise TypeError(f"modality: {type(modality).__name__}; needs an object of a class derived from Modality")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", getattr(modality, "name", "")):
        raise ValueError(f"modality.name={getattr(modality, 'name', None)!r}; needs a lower-case word")
    _REGISTRY[modality.name] = modality


def get_modality(name: str) -> Modality:
    """Return the modality with this name.

    Args:
        name: for example "image", "text" or "vector".

    Raises:
        ValueError: if there is no such modality; it lists the names.

    Example:
        >>> get_modality("text").show("a cat")
        'a cat'

    """
    if name not in _REGISTRY:
        raise ValueError(f"modality {name!r}; allowed: {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


def modality_names() -> list[str]:
    """Return the names of all modalities, in the order of their registration."""
    return list(_REGISTRY)


def boundary(folder: Path, allow_outside: bool) -> Path | None:
    """Return the argument `inside` of `read_file` for files in `folder` (setting `data.allow_outside`)."""
    return None if allow_outside else Path(os.path.realpath(folder))


def shorten(value: Any) -> str:
    """Return a value as one short line of JSON, for messages."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError, TypeError):  # nested too deep, a number that is too long, or bytes
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
