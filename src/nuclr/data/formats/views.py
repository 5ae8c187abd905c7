"""Views: images as pairs of an image and itself, of which training makes different random views."""

import hashlib
from pathlib import Path

import numpy as np
from PIL import Image

from nuclr.data.formats.columns import CellColumn
from nuclr.data.formats.listed import ListedPairs
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.pairs import Checkable, Pairs
from nuclr.errors import UserError


class ViewPairs(Checkable):
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

    x_kind = y_kind = "image"
    x_name, y_name = "view 1", "view 2"
    views = True

    def __init__(self, source: Pairs) -> None:
        kinds = {"x": source.x_kind, "y": source.y_kind}
        sides = [side for side, kind in kinds.items() if kind == "image"]
        if not sides:
            held = " and ".join(f"{kind}s" for kind in dict.fromkeys(kinds.values()))
            raise UserError(
                f"{source.label}: data.contrast=views needs images, and this source holds {held}; "
                "name the column of images with data.x.key, or leave out data.contrast"
            )
        side = sides[0]
        self._source, self._read = source, getattr(source, side)
        _, first = np.unique(getattr(source, f"{side}_id"), return_index=True)
        self._numbers = np.sort(first)
        self.x_id = self.y_id = np.arange(len(first))
        self.x_key = self.y_key = getattr(source, f"{side}_key")
        self.label = source.label
        self.fingerprint = hashlib.sha256(f"views {source.fingerprint}".encode()).hexdigest()
        self.known_bad: dict[int, str] = {}  # an empty caption, for example, does not make the image bad
        self.folder = source.folder if isinstance(source, Checkable) else Path()
        self.trusted = not isinstance(source, Checkable)

    def __len__(self) -> int:
        return len(self._numbers)

    def x(self, number: int) -> Image.Image:
        """Return the image, not decoded yet."""
        image: Image.Image = self._read(int(self._numbers[number]))
        return image

    def y(self, number: int) -> Image.Image:
        """Return the same image."""
        return self.x(number)

    def name(self, number: int) -> str:
        """Return the name of the image in the source."""
        return self._source.name(int(self._numbers[number]))

    def stamp(self) -> str:
        """Return the stamp of the source."""
        return self._source.stamp() if isinstance(self._source, Checkable) else ""


def find_images(folder: Path) -> list[Path]:
    """Return the image files in a folder and in its folders, sorted."""
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)


def open_image_folder(folder: Path, allow_outside: bool = False) -> ViewPairs:
    """Open all images in a folder and in its folders as pairs of views; names are relative to the folder.

    Args:
        folder: the folder.
        allow_outside: follow symbolic links that lead out of the folder (setting `data.allow_outside`). Otherwise such
            images are bad samples.

    Raises:
        UserError: if the folder has no images.

    """
    files = find_images(folder)
    if not files:
        raise UserError(f"{folder}: the folder has no images ({', '.join(sorted(SUFFIXES))})")
    names = (str(file.relative_to(folder)) for file in files)
    rows = ((name, name, None, row) for row, name in enumerate(names))
    x, y = CellColumn("image", "image"), CellColumn("image", "image")
    return ViewPairs(ListedPairs(rows, x, y, folder, folder, allow_outside, "view 1", "view 2", place="row"))
