"""What the numbered samples are called: captions for y, image files for x.

Caption lists are `.txt` (one caption a line), `.jsonl` or `.json` (entries `{"image": ..., "caption": ...}`, where the
caption may be a list and the key may be "captions"). Captions are counted through in order: the j-th belongs to y_j.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.errors import UserError


@dataclass(frozen=True)
class Names:
    """`captions` of the y and `images` of the x, empty where not given; `y_to_x` joins the two.

    `numbers`: what the rows of "x" and "y" are called, None where that is their place in the file.
    """

    captions: list[str]
    images: list[str]
    y_to_x: list[int]
    numbers: dict[str, np.ndarray] | None = None

    @cached_property
    def _first_y(self) -> dict[int, int]:
        return {x: y for y, x in reversed(list(enumerate(self.y_to_x)))}

    def number(self, side: str, row: int) -> int:
        """What this row of side "x" or "y" is called."""
        return row if self.numbers is None else int(self.numbers[side][row])

    def of(self, side: str, row: int) -> dict[str, str]:
        """The caption and the image, where given, of a row of side "x" or "y"; an x has its first caption."""
        x, y = (row, self._first_y[row]) if side == "x" else (self.y_to_x[row], row)
        labels = {}
        if self.captions:
            labels["caption"] = self.captions[y]
        if self.images:
            labels["image"] = self.images[x]
        return labels


def read_names(
    captions: Path | None,
    images: Path | None,
    n_x: int,
    y_to_x: list[int],
    numbers: dict[str, np.ndarray] | None = None,
) -> Names:
    """Read the lists and check them against the embedding file's numbers.

    `images` is a `.txt` with one file name for each x, or the folder of the files that the caption list names.
    """
    texts: list[str] = []
    files: list[str] = []
    if captions is not None:
        entries = list(_entries(captions))
        if len(entries) != len(y_to_x):
            raise UserError(f"{captions}: {len(entries)} captions, but the embedding file has {len(y_to_x)} y")
        texts = [caption for caption, _ in entries]
        if all(image is not None for _, image in entries):
            files = _images_of_x(captions, [str(image) for _, image in entries], n_x, y_to_x)
    if images is not None and images.is_dir():
        if not files:
            raise UserError(
                f"--images {images}: a folder needs --captions with a .jsonl or .json that names the images"
            )
        files = [str(images / name) if name else "" for name in files]
        if not any(Path(file).is_file() for file in files if file):
            raise UserError(f"--images {images}: holds none of the images that {captions} names, such as {files[0]}")
    elif images is not None:
        files = _lines(images)
        if len(files) != n_x:
            raise UserError(f"{images}: {len(files)} image names, but the embedding file has {n_x} x")
    return Names(captions=texts, images=files, y_to_x=y_to_x, numbers=numbers)


def _entries(path: Path) -> Iterator[tuple[str, str | None]]:
    """(caption, image or None) in the order of y."""
    if path.suffix == ".txt":
        for line in _lines(path):
            yield line, None
        return
    for where, entry in _objects(path):
        found = entry.get("captions", entry.get("caption")) if isinstance(entry, dict) else None
        captions = [found] if isinstance(found, str) else found
        if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
            raise UserError(f"{path}: {where} has no caption; needs {{'image': ..., 'caption' or 'captions': ...}}")
        for caption in captions:
            yield caption, entry.get("image")


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        if path.suffix == ".jsonl":
            for number, line in enumerate(_lines(path), start=1):
                where = f"line {number}"
                yield where, json.loads(line)
        elif path.suffix == ".json":
            where = "the file"
            content = json.loads(_read(path))
            if not isinstance(content, list):
                raise UserError(f"{path}: holds no list of captions")
            yield from ((f"entry {number}", entry) for number, entry in enumerate(content))
        else:
            raise UserError(f"{path}: unknown kind of caption list; allowed: .jsonl, .json, .txt")
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: {where} is not JSON ({error})") from None


def _images_of_x(path: Path, image_of_y: list[str], n_x: int, y_to_x: list[int]) -> list[str]:
    images = [""] * n_x
    for y, (x, image) in enumerate(zip(y_to_x, image_of_y, strict=True)):
        if images[x] not in ("", image):
            raise UserError(
                f"{path}: caption {y} is of image {image}, but by y_to_x it belongs to x {x}, which is {images[x]}; "
                "is this the list that the embeddings were made from?"
            )
        images[x] = image
    return images


def _lines(path: Path) -> list[str]:
    return _read(path).splitlines()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot be read ({reason})") from None
