"""Images as small pictures inside the page: those of a run's pairs, or of the files that popularity.csv names."""

import base64
import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from nuclr.data.modalities.base import read_file
from nuclr.data.modalities.image import open_image
from nuclr.data.pairs import BadSample, Pairs
from nuclr.image_files import to_rgb

SIDE = 144  # pixels; shown at up to 150
SMALL = 64  # pixels up to which a picture is stored in higher quality
_BROKEN = (BadSample, OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, Image.DecompressionBombError)

Label = Callable[[int], str | None]  # from a number to a name or a caption
Pictures = Callable[[int], str | None]  # from a number to a data URI
SidePictures = Callable[[str, int], str | None]  # from a side, "x" or "y", and a number
LabelRows = dict[str, dict[int, dict[str, str]]]  # rows of popularity.csv by side and number


def data_uri(image: Image.Image, side: int = SIDE) -> str:
    """Return the picture as a JPEG in a data URI, its longer side at most `side` pixels."""
    quality = 88 if max(image.size) <= SMALL else 74
    image.draft("RGB", (side, side))
    picture = to_rgb(image)
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    target = BytesIO()
    picture.save(target, "JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(target.getvalue()).decode("ascii")


def pictures_of(pairs: Pairs) -> Pictures:
    """Return a function from the number of a pair to its picture, or to None if it has none that can be read.

    Every picture is made once.
    """
    made: dict[int, str | None] = {}

    def picture(number: int) -> str | None:
        image = int(pairs.x_id[number])
        if image not in made:
            made[image] = _make(lambda: pairs.x(number)) if pairs.x_kind == "image" else None
        return made[image]

    return picture


def pictures_of_sides(pairs: Pairs) -> SidePictures:
    """Return the pictures of a run's pairs by side: x is counted by images, y by pairs."""
    by_number = pictures_of(pairs)
    images, first = np.unique(pairs.x_id, return_index=True)
    pair_of = dict(zip(images.tolist(), first.tolist(), strict=True))
    return lambda side, number: by_number(pair_of[number] if side == "x" else number)


def pictures_of_files(rows: LabelRows) -> SidePictures | None:
    """Return the pictures of the files in the column "image", or None if those files are not there."""
    named = [row["image"] for row in next(iter(rows.values()), {}).values() if row.get("image")]
    if not any(os.path.isfile(file) for file in named[:100]):  # noqa: PTH113 (Path.is_file raises an error for long names)
        return None
    made: dict[str, str | None] = {}

    def picture(side: str, number: int) -> str | None:
        file = rows[side].get(number, {}).get("image", "")
        if file not in made:
            made[file] = _make(lambda: open_image(read_file(Path(file))))
        return made[file]

    return picture


def _make(read: Callable[[], object]) -> str | None:
    try:
        image = read()
        return data_uri(image) if isinstance(image, Image.Image) else None
    except _BROKEN:
        return None
