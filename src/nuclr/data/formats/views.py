"""Views: images as pairs of an image and itself, of which training makes different random views."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.formats.choose import Request
from nuclr.data.formats.columns import Column, Heading, make_column
from nuclr.data.formats.listed import ListedPairs, Row
from nuclr.data.modalities import get_modality
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.pairs import SIDES, Pairs, SideName
from nuclr.errors import UserError


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


def open_image_folder(folder: Path, allow_outside: bool = False) -> ViewPairs:
    """Open all images in a folder and in its folders as pairs of views; names are relative to the folder.

    Args:
        folder: the folder.
        allow_outside: follow symbolic links that lead out of the folder (setting `data.allow_outside`). Otherwise such
            images are bad samples.

    Raises:
        UserError: if the folder has no images.

    """
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(f"{folder}: the folder has no images ({', '.join(sorted(SUFFIXES))})")
    names = (str(file.relative_to(folder)) for file in files)
    rows = (Row(name, name, row) for row, name in enumerate(names))
    heading = Heading("image", None, get_modality("image"), "image")
    columns: dict[SideName, Column] = {"x": make_column(heading), "y": make_column(heading)}
    return ViewPairs(ListedPairs(Request(folder, folder, allow_outside=allow_outside), columns, rows, "row"))
