"""The samples whose popularity is solved, and how people refer to them: from an embedding file or from a run.

Caption lists are `.txt` (one caption per line), `.jsonl` or `.json` (entries `{"image": ..., "caption": ...}`; the
caption may be a list, and the key may be "captions"). The j-th caption in the list belongs to y_j.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.formats.embeddings import Embeddings, read_embeddings
from nuclr.data.texts import MAX_CHARACTERS, replace_surrogates
from nuclr.errors import UserError
from nuclr.files import parse_json
from nuclr.runs.features import embed_pairs
from nuclr.runs.run import Run


@dataclass(frozen=True)
class Names:
    """Captions of the y and image names of the x; a list is empty if it is not known.

    y_to_x: the row of the x that each y belongs to. numbers: the numbers of the rows of "x" and "y" in the data; None
    if they are the rows themselves.
    """

    captions: list[str]
    images: list[str]
    y_to_x: list[int]
    numbers: dict[str, np.ndarray] | None = None

    @cached_property
    def _first_y(self) -> dict[int, int]:
        return {x: y for y, x in reversed(list(enumerate(self.y_to_x)))}

    def number(self, side: str, row: int) -> int:
        """Return the number in the data of a row of side "x" or "y"."""
        return row if self.numbers is None else int(self.numbers[side][row])

    def of(self, side: str, row: int) -> dict[str, str]:
        """Return the caption and the image, if known, of a row of side "x" or "y"; an x has its first caption."""
        x, y = (row, self._first_y[row]) if side == "x" else (self.y_to_x[row], row)
        labels = {}
        if self.captions:
            labels["caption"] = self.captions[y]
        if self.images:
            labels["image"] = self.images[x]
        return labels


@dataclass(frozen=True)
class PopularityInput:
    """Embeddings with the names of their rows; `origin` is the file or the run folder they come from."""

    embeddings: Embeddings
    names: Names
    origin: Path
    run: Path | None = None


def input_from_file(file: Path, captions: Path | None = None, images: Path | None = None) -> PopularityInput:
    """Read an embedding file, with captions and image names if lists of them are given."""
    embeddings = read_embeddings(file)
    names = read_names(captions, images, len(embeddings.x), embeddings.y_to_x.tolist())
    return PopularityInput(embeddings, names, file)


def input_from_run(run: Run) -> PopularityInput:
    """Encode the training pairs of a run; rows are referred to by the numbers of their images and pairs."""
    source = run.train
    pairs, numbers = source.pairs, source.numbers
    arrays = embed_pairs(run.model, run.loader(pairs), numbers, run.encoding)
    y_to_x = arrays["y_to_x"].tolist()
    x_number = np.empty(len(arrays["x"]), np.int64)
    x_number[y_to_x] = pairs.x_id[numbers]
    captions, images = [], []
    if pairs.y_kind == "text":
        captions = [str(pairs.y(number)) for number in numbers.tolist()]
        images = [""] * len(x_number)
        for row, number in zip(y_to_x, numbers.tolist(), strict=True):
            images[row] = images[row] or pairs.name(number)
    names = Names(captions, images, y_to_x, {"x": x_number, "y": numbers})
    return PopularityInput(Embeddings(arrays["x"], arrays["y"], arrays["y_to_x"]), names, run.folder, run.folder)


def read_names(captions: Path | None, images: Path | None, n_x: int, y_to_x: list[int]) -> Names:
    """Read lists of captions and images, and check them against the rows of an embedding file.

    Args:
        captions: a caption list, see above.
        images: a `.txt` with one file name per x, or the folder of the files that the caption list names.
        n_x: number of x in the embedding file.
        y_to_x: the row of the x of each y.

    """
    texts: list[str] = []
    names: list[str] = []
    if captions is not None:
        entries = list(_entries(captions))
        if len(entries) != len(y_to_x):
            raise UserError(
                f"--captions {captions}: {len(entries)} captions, but the embedding file has {len(y_to_x)} y"
            )
        texts = [caption for caption, _ in entries]
        if all(image is not None for _, image in entries):
            names = _images_of_x(captions, [str(image) for _, image in entries], n_x, y_to_x)
    if images is not None and images.is_dir():
        if not names:
            raise UserError(
                f"--images {images}: a folder needs --captions with a .jsonl or .json that names the images"
            )
        names = [str(images / name) if name else "" for name in names]
        if not any(os.path.isfile(name) for name in names if name):  # noqa: PTH113 (Path.is_file raises an error for long names)
            raise UserError(f"--images {images}: none of the images in {captions} is there, such as {names[0]}")
    elif images is not None:
        names = _lines(images)
        if len(names) != n_x:
            raise UserError(f"--images {images}: {len(names)} image names, but the embedding file has {n_x} x")
    return Names(captions=texts, images=names, y_to_x=y_to_x)


def _entries(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield (caption, image or None) in the order of y."""
    if path.suffix == ".txt":
        for line in _lines(path):
            yield _shortened(line), None
        return
    for position, entry in _objects(path):
        value = entry.get("captions", entry.get("caption")) if isinstance(entry, dict) else None
        captions = [value] if isinstance(value, str) else value
        if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
            raise UserError(
                f"{path}: {position} has no caption; it needs {{'image': ..., 'caption' or 'captions': ...}}"
            )
        for caption in captions:
            yield _shortened(caption), entry.get("image")


def _shortened(caption: str) -> str:
    """Return a caption that pages and tables can hold; a caption of megabytes is cut."""
    caption = replace_surrogates(caption)
    return caption if len(caption) <= MAX_CHARACTERS else f"{caption[:MAX_CHARACTERS]} [cut]"


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    position = "the file"
    try:
        if path.suffix == ".jsonl":
            for number, line in enumerate(_lines(path), start=1):
                position = f"line {number}"
                yield position, parse_json(line)
        elif path.suffix == ".json":
            content = parse_json(_read(path))
            if not isinstance(content, list):
                raise UserError(f"{path}: the file does not hold a list of captions")
            yield from ((f"entry {number}", entry) for number, entry in enumerate(content))
        else:
            raise UserError(f"{path}: unknown kind of caption list; allowed: .jsonl, .json, .txt")
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: {position} is not JSON ({error})") from None


def _images_of_x(path: Path, image_of_y: list[str], n_x: int, y_to_x: list[int]) -> list[str]:
    images = [""] * n_x
    for y, (x, image) in enumerate(zip(y_to_x, image_of_y, strict=True)):
        if images[x] not in ("", image):
            raise UserError(
                f"{path}: caption {y} belongs to image {image}, but y_to_x assigns it to x {x}, which is {images[x]}; "
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
