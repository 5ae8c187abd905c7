"""The samples whose popularity is solved, and how people refer to them: from an embedding file or from a run.

Caption lists are `.txt` (one caption per line), `.jsonl` or `.json` (entries `{"image": ..., "caption": ...}`; the
caption may be a list, and the key may be "captions"), `.csv` or `.tsv` (a header with the usual name of a column of
captions, and optionally of images). The j-th caption in the list belongs to y_j.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import torch

from nuclr.data import open_pairs
from nuclr.data.formats.choose import CAPTION_COLUMNS, IMAGE_COLUMNS, find_column
from nuclr.data.formats.embedding_folders import UID, EmbeddingFolder
from nuclr.data.formats.embeddings import Embeddings, read_embeddings
from nuclr.data.formats.stored_texts import StoredTexts
from nuclr.data.formats.table import TABLES, complete_rows, read_cells
from nuclr.data.pairs import SIDES, Pairs
from nuclr.data.texts import MAX_CHARACTERS, replace_surrogates
from nuclr.errors import UserError
from nuclr.files import parse_json, read_lines, read_npz, read_text
from nuclr.remote import is_url, local_copy
from nuclr.runs.features import embed_pairs
from nuclr.runs.run import Run
from nuclr.runs.side_words import SideWords, name_sides, words_of_pairs


@dataclass(frozen=True)
class Origin:
    """Where a page finds the items themselves.

    Attributes:
        run: folder of the run whose training pairs these are.
        pairs: arguments of `open_pairs` (path, root, split, allow_outside).
        images: the folder that file names of images are relative to.
        allow_outside: whether pages may show images outside of `images`.

    """

    run: str | None = None
    pairs: dict[str, Any] | None = None
    images: str | None = None
    allow_outside: bool = False


@dataclass(frozen=True)
class Names:
    """What the rows of both sides are called.

    Attributes:
        words: words for the sides, by "x" and "y".
        labels: texts or file names of the rows, by side; an empty list if they are not known.
        y_to_x: the row of the x that each y belongs to; a range if pair j consists of row j of both sides.
        numbers: the numbers of the rows in the data, by side; None if they are the rows themselves.
        views: True if both sides are views of the same items.
        origin: where pages find the items.
        group: (n_y,), equal for pairs whose x and y all belong together; None without groups.

    """

    words: dict[str, SideWords]
    labels: Mapping[str, Sequence[str]]
    y_to_x: Sequence[int]
    numbers: dict[str, np.ndarray] | None = None
    views: bool = False
    origin: Origin = Origin()
    group: np.ndarray | None = None

    @cached_property
    def _first_y(self) -> Mapping[int, int] | Sequence[int]:
        if isinstance(self.y_to_x, range):
            return self.y_to_x
        return {x: y for y, x in reversed(list(enumerate(self.y_to_x)))}

    def number(self, side: str, row: int) -> int:
        """Return the number in the data of a row of side "x" or "y"."""
        return row if self.numbers is None else int(self.numbers[side][row])

    def label(self, side: str, row: int) -> str | None:
        """Return the text or the file name of a row, if it is known."""
        return self.labels[side][row] if self.labels[side] else None

    def labels_of_rows(self, side: str, rows: Sequence[int]) -> list[str]:
        """Return the texts or file names of some rows, which must be known."""
        labels = self.labels[side]
        return labels.take(rows) if isinstance(labels, StoredTexts) else [labels[row] for row in rows]

    def of_rows(self, side: str, rows: Sequence[int]) -> dict[str, list[str]]:
        """Return the known labels of some rows and of their pairs, by column; an x has its first y."""
        others = [(self._first_y if side == "x" else self.y_to_x)[row] for row in rows]
        x, y = (rows, others) if side == "x" else (others, rows)
        both = (("y", y),) if self.views else (("y", y), ("x", x))
        return {self.words[side].column: self.labels_of_rows(side, own) for side, own in both if len(self.labels[side])}

    def numbers_of_rows(self, side: str, rows: np.ndarray) -> np.ndarray:
        """Return the numbers in the data of some rows."""
        return rows if self.numbers is None else self.numbers[side][rows]

    def describe(self) -> dict[str, dict[str, str]]:
        """Return name, kind and column of both sides, as popularity.json holds them."""
        return {
            side: {"name": words.name, "kind": words.kind, "column": words.column} for side, words in self.words.items()
        }


@dataclass(frozen=True)
class PopularityInput:
    """Embeddings with the names of their rows.

    Attributes:
        embeddings: of both sides.
        names: what the rows are called.
        origin: the file, URL or folder they come from.
        uids: DataComp's unique identifier of each pair; None if it is not known.

    """

    embeddings: Embeddings
    names: Names
    origin: str
    uids: StoredTexts | None = None


def input_from_file(
    file: str | Path, captions: Path | None = None, images: Path | None = None, allow_outside: bool = False
) -> PopularityInput:
    """Read an embedding file, with captions and image names if lists of them are given."""
    embeddings = read_embeddings(file)
    names = read_names(captions, images, len(embeddings.x), embeddings.y_to_x.tolist(), allow_outside)
    return PopularityInput(embeddings, names, str(file))


def input_from_folder(
    path: Path,
    x_key: str | None = None,
    y_key: str | None = None,
    images: Path | None = None,
    allow_outside: bool = False,
) -> PopularityInput:
    """Open a folder of embeddings in parts, which are read as they are needed.

    Args:
        path: a folder of clip-retrieval or DataComp.
        x_key: the array of side x, if there are several.
        y_key: the array of side y.
        images: the folder that the file names in the metadata are relative to, for pages.
        allow_outside: whether pages may show images outside of it.

    Raises:
        UserError: if a file is missing, damaged or does not fit to the others, or a row cannot be compared.

    """
    folder = EmbeddingFolder(path)
    keys = folder.sides(x_key, y_key)
    folder.check(*keys, directions=True)
    x, y = (folder.features(key) for key in keys)
    labels = dict(zip(SIDES, (folder.labels(key) for key in keys), strict=True))
    modalities = [folder.modality(key) for key in keys]
    sides = keys if modalities[0] == modalities[1] else modalities
    kinds = [kind if label else "vector" for kind, label in zip(modalities, labels.values(), strict=True)]
    words = name_sides(sides[0], kinds[0], sides[1], kinds[1])
    names = Names(
        dict(zip(SIDES, words, strict=True)),
        {side: label or [] for side, label in labels.items()},
        range(len(y)),
        origin=Origin(images=None if images is None else str(images), allow_outside=allow_outside),
    )
    return PopularityInput(Embeddings(x, y, torch.arange(len(y))), names, str(path), folder.texts([UID]))


def input_from_pairs(
    file: str | Path, path: str, root: str | None = None, split: str | None = None, allow_outside: bool = False
) -> PopularityInput:
    """Read an embedding file, and the pairs that it was made from.

    Row j of y belongs to pair j, or to the pair that the file's array `number` names, as `nuclr embed` writes it.
    """
    embeddings = read_embeddings(file)
    pairs = open_pairs(path, root, split=split, allow_outside=allow_outside)
    numbers = _read_numbers(local_copy(str(file)) if is_url(file) else Path(file))
    if numbers is None:
        numbers = np.arange(len(embeddings.y))
    if len(numbers) != len(embeddings.y) or not 0 <= numbers.min() <= numbers.max() < len(pairs):
        raise UserError(
            f"--pairs {path}: {len(pairs)} pairs, but the embedding file has {len(embeddings.y)} y; "
            "is it the list that the embeddings were made from?"
        )
    origin = {"path": path, "root": root, "split": split, "allow_outside": allow_outside}
    names = names_of_pairs(pairs, numbers, embeddings.y_to_x.tolist(), len(embeddings.x), Origin(pairs=origin))
    return PopularityInput(embeddings, names, str(file))


def input_from_run(run: Run) -> PopularityInput:
    """Encode the training pairs of a run; rows are referred to by the numbers of their x and of their pairs."""
    source = run.train
    arrays = embed_pairs(run.model, run.loader(source.pairs), source.numbers, run.encoding)
    y_to_x, origin = arrays["y_to_x"].tolist(), Origin(run=str(run.folder))
    names = names_of_pairs(source.pairs, source.numbers, y_to_x, len(arrays["x"]), origin)
    return PopularityInput(Embeddings(arrays["x"], arrays["y"], arrays["y_to_x"]), names, str(run.folder))


def _read_numbers(file: Path) -> np.ndarray | None:
    """Return the array `number` of an embedding file: the numbers of its pairs; None if there is none."""
    if file.suffix == ".npz":
        array = read_npz(file, ["number"]).get("number")
    else:
        with safetensors.safe_open(file, "np") as opened:
            array = opened.get_tensor("number") if "number" in opened.keys() else None  # noqa: SIM118 (not a dict)
    return array if array is not None and array.ndim == 1 and array.dtype.kind in "iu" else None


def names_of_pairs(pairs: Pairs, numbers: np.ndarray, y_to_x: list[int], n_x: int, origin: Origin) -> Names:
    """Return texts and file names of the pairs with these numbers; row j of y is the y of pair numbers[j]."""
    words = dict(zip(("x", "y"), words_of_pairs(pairs), strict=True))
    first = np.zeros(n_x, np.int64)  # the number of a pair with this x
    first[y_to_x[::-1]] = numbers[::-1]
    x_number = pairs.x_id[first]
    labels = {"x": _labels(pairs, "x", first.tolist()), "y": _labels(pairs, "y", numbers.tolist())}
    group = None if pairs.group is None else pairs.group[numbers]
    return Names(words, labels, y_to_x, {"x": x_number, "y": numbers}, pairs.views, origin, group)


def _labels(pairs: Pairs, side: Literal["x", "y"], numbers: list[int]) -> list[str]:
    """Return the texts of a side, or the file names of its images; an empty list if there are none."""
    kind, read = (pairs.x_kind, pairs.x) if side == "x" else (pairs.y_kind, pairs.y)
    if kind == "text":
        return [_shortened(str(read(number))) for number in numbers]
    if kind != "image":
        return []
    names = [pairs.item_name(side, number) for number in numbers]
    return [name for name in names if name is not None] if None not in names else []


def read_names(
    captions: Path | None, images: Path | None, n_x: int, y_to_x: list[int], allow_outside: bool = False
) -> Names:
    """Read lists of captions and images, and check them against the rows of an embedding file.

    Args:
        captions: a caption list, see above.
        images: a `.txt` with one file name per x, or the folder of the files that the caption list names.
        n_x: number of x in the embedding file.
        y_to_x: the row of the x of each y.
        allow_outside: whether pages may show images outside of the folder of the images, or of the list that names
            them.

    """
    texts: list[str] = []
    names: list[str] = []
    folder = None
    if captions is not None:
        entries = list(read_captions(captions))
        if len(entries) != len(y_to_x):
            raise UserError(
                f"--captions {captions}: {len(entries)} captions, but the embedding file has {len(y_to_x)} y"
            )
        texts = [caption for caption, _ in entries]
        if all(image is not None for _, image in entries):
            names = _images_of_x(captions, [str(image) for _, image in entries], n_x, y_to_x)
            folder = captions.parent
    if images is not None and images.is_dir():
        if not names:
            raise UserError(
                f"--images {images}: a folder needs --captions with a .jsonl, .json or .csv that names the images"
            )
        folder = images
        if not any(os.path.isfile(folder / name) for name in names if name):  # noqa: PTH113 (Path.is_file raises an error for long names)
            raise UserError(
                f"--images {images}: none of the images in {captions} is there, such as {folder / names[0]}"
            )
    elif images is not None:
        names, folder = read_lines(images), images.parent
        if len(names) != n_x:
            raise UserError(f"--images {images}: {len(names)} image names, but the embedding file has {n_x} x")
    origin = Origin(images=None if folder is None else str(folder), allow_outside=allow_outside)
    if captions is None and images is None:
        words = name_sides("x", "vector", "y", "vector")
    else:
        words = name_sides("image", "image" if names else "vector", "text", "text" if texts else "vector")
    return Names(dict(zip(("x", "y"), words, strict=True)), {"x": names, "y": texts}, y_to_x, origin=origin)


def read_captions(path: Path, fix: str = "rename it to caption") -> Iterator[tuple[str, str | None]]:
    """Yield (caption, image or None) in the order of y; `fix` says what to do if a table has no usual column."""
    suffix = path.suffix.lower()
    if suffix == ".txt":
        for line in read_lines(path):
            yield _shortened(line), None
        return
    if suffix in TABLES:
        yield from _captions_of_table(path, fix)
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


def _captions_of_table(path: Path, fix: str) -> Iterator[tuple[str, str | None]]:
    rows = read_cells(path)
    _, header = next(rows)
    caption = find_column(header, CAPTION_COLUMNS) or (header[0] if len(header) == 1 else None)
    if caption is None:
        raise UserError(f"{path}: no column of captions among {', '.join(header)}; {fix}")
    image, column = find_column(header, IMAGE_COLUMNS), header.index(caption)
    for cells in complete_rows(path, header, rows):
        yield _shortened(cells[column]), None if image is None else cells[header.index(image)]


def _shortened(caption: str) -> str:
    """Return a caption that pages and tables can hold; a caption of megabytes is cut."""
    caption = replace_surrogates(caption)
    return caption if len(caption) <= MAX_CHARACTERS else f"{caption[:MAX_CHARACTERS]} [cut]"


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    position = "the file"
    try:
        if path.suffix.lower() == ".jsonl":
            for number, line in enumerate(read_lines(path), start=1):
                position = f"line {number}"
                if line.strip():
                    yield position, parse_json(line)
        elif path.suffix.lower() == ".json":
            content = parse_json(read_text(path))
            if not isinstance(content, list):
                raise UserError(f"{path}: the file does not hold a list of captions")
            yield from ((f"entry {number}", entry) for number, entry in enumerate(content))
        else:
            raise UserError(f"{path}: unknown kind of caption list; allowed: .jsonl, .json, .csv, .tsv, .txt")
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
