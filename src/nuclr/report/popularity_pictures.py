"""Where the pictures of a popularity folder come from: the files that its table names, or the run that it is of."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from nuclr.data.modalities.image import open_image, read_file
from nuclr.data.pairs import BadSample, Pairs
from nuclr.report.pictures import Pictures, data_uri, pictures_of

Labels = dict[str, dict[int, dict[str, str]]]  # by side and number, rows of the table
Picture = Callable[[str, int], str | None]


def pictures(pairs: Pairs | None, labels: Labels, notes: list[str], wanted: bool) -> Picture:
    """From a side and a number to a picture."""
    if not wanted:
        notes.append("Made without pictures, as asked for.")
        return lambda _side, _number: None
    if pairs is not None:
        return _of_run(pairs, notes)
    files = [row["image"] for row in next(iter(labels.values())).values() if row.get("image")]
    if not any(Path(file).is_file() for file in files[:100]):
        notes.append("There are no pictures: the table names no image files that are there (--images FOLDER).")
        return lambda _side, _number: None
    made: dict[str, str | None] = {}

    def picture(side: str, number: int) -> str | None:
        file = labels[side].get(number, {}).get("image", "")
        if file not in made:
            made[file] = _read_picture(Path(file))
        return made[file]

    return picture


def _of_run(pairs: Pairs, notes: list[str]) -> Picture:
    if pairs.x_kind != "image":
        notes.append("The run's data holds vectors, so there are no pictures.")
        return lambda _side, _number: None
    by_number: Pictures = pictures_of(pairs)
    images, first = np.unique(pairs.x_id, return_index=True)
    pair_of = dict(zip(images.tolist(), first.tolist(), strict=True))
    return lambda side, number: by_number(pair_of[number] if side == "x" else number)


def _read_picture(path: Path) -> str | None:
    try:
        found = open_image(read_file(path))
        return data_uri(found) if isinstance(found, Image.Image) else None
    except (BadSample, OSError, ValueError):
        return None
