"""Folders of embeddings that other tools write, in parts: clip-retrieval's output and DataComp's metadata.

| tool | embeddings | metadata |
| --- | --- | --- |
| clip-retrieval | `img_emb/img_emb_0.npy`, `text_emb/text_emb_0.npy` | `metadata/metadata_0.parquet` |
| DataComp | `STEM.npz` with `b32_img`, `b32_txt`, `l14_img`, `l14_txt` | `STEM.parquet` with `uid`, `url`, `text` |

Row j of all parts, in the order of their numbers or names, is pair j: an image and its text. Embeddings are not read
when a folder is opened (`nuclr.stacked`). Arrays that are compressed cannot be mapped and are unpacked once, shard by
shard, into a temporary file on the disk of the folder.
"""

import hashlib
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Literal

import numpy as np

from nuclr.data.formats.arrow import holds_names
from nuclr.data.formats.choose import find_column
from nuclr.data.formats.columns import first_line
from nuclr.data.formats.stored_texts import StoredTexts, open_table
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.files import find_cache_folder, read_npz
from nuclr.stacked import Stacked, StoredMatrix, stored_npy, stored_npz

CLIP_RETRIEVAL, DATACOMP = "clip-retrieval", "DataComp"
IMAGE_COLUMNS, TEXT_COLUMNS, UID = ("image_path", "path", "url"), ("caption", "text"), "uid"  # of the metadata
CHECKED = 2**16  # rows that are checked at a time
SAMPLED = 1024  # rows in the fingerprint
_IMAGE, _TEXT = ("img_emb", "_img"), ("text_emb", "_txt")  # names of the arrays of images and texts end with these


@dataclass(frozen=True)
class Part:
    """Rows of a folder that are stored together.

    Attributes:
        name: the number or the stem of its files.
        arrays: the file of each array.
        table: the Parquet file with the metadata; None if the folder has none.

    """

    name: str
    arrays: dict[str, Path]
    table: Path | None


def is_embedding_folder(path: Path) -> bool:
    """Return whether a folder has the form of clip-retrieval's output or of DataComp's metadata."""
    return path.is_dir() and (_is_clip_retrieval(path) or _is_datacomp(path))


def _is_clip_retrieval(path: Path) -> bool:
    return any(any((path / name).glob(f"{name}_*.npy")) for name in ("img_emb", "text_emb"))


def _is_datacomp(path: Path) -> bool:
    shard = next((file for file in _files(path, ".npz") if file.with_suffix(".parquet").is_file()), None)
    return shard is not None and bool(_matrix_names(shard))


def _files(path: Path, suffix: str) -> list[Path]:
    """Return the files of a folder and of the folders in it; the largest pool of DataComp has this one more level."""
    found = [*path.glob(f"*{suffix}"), *path.glob(f"*/*{suffix}")]
    return sorted(file for file in found if not file.relative_to(path).as_posix().startswith("."))


class EmbeddingFolder:
    """A folder of embeddings in parts, with their metadata.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        kind: "clip-retrieval" or "DataComp".
        parts: its parts, in order.
        keys: names of its arrays.

    Raises:
        UserError: if the folder has another form, or a file of a part is missing.

    Example:
        >>> with tempfile.TemporaryDirectory() as name:
        ...     for side in ("img_emb", "text_emb"):
        ...         Path(name, side).mkdir()
        ...         np.save(Path(name, side, f"{side}_0.npy"), np.eye(4, dtype="float16"))
        ...     folder = EmbeddingFolder(Path(name))
        ...     folder.sides(), folder.features("text_emb")
        (('img_emb', 'text_emb'), Stacked(4 x 4, float16, 1 parts))

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if _is_clip_retrieval(path):
            self.kind, self.parts = CLIP_RETRIEVAL, _clip_retrieval_parts(path)
        elif _is_datacomp(path):
            self.kind, self.parts = DATACOMP, _datacomp_parts(path)
        else:
            raise UserError(
                f"{path}: neither an output folder of clip-retrieval (img_emb/, text_emb/) nor a metadata folder of "
                "DataComp (.npz next to .parquet)"
            )
        self.keys = list(self.parts[0].arrays)
        self._opened: dict[str, Stacked] = {}

    def __repr__(self) -> str:
        return f"EmbeddingFolder({str(self.path)!r}, {self.kind}, {len(self.parts)} parts: {', '.join(self.keys)})"

    def sides(self, x_key: str | None = None, y_key: str | None = None) -> tuple[str, str]:
        """Return the arrays of images and of texts.

        Args:
            x_key: the array of side x. None: that of images, of the same model as `y_key`.
            y_key: the array of side y. None: that of texts, of the same model as `x_key`.

        Raises:
            UserError: if there is no such array, or several models are stored and none is named.

        """
        for option, key in (("x", x_key), ("y", y_key)):
            if key is not None and key not in self.keys:
                raise UserError(f"{self.path}: no array {key!r} for side {option}; found: {', '.join(self.keys)}")
        if x_key is None and y_key is not None:
            x_key = _partner(y_key, self.keys)
        if y_key is None and x_key is not None:
            y_key = _partner(x_key, self.keys)
        if x_key is not None and y_key is not None:
            return x_key, y_key
        images, texts = ([key for key in self.keys if key.endswith(ends)] for ends in (_IMAGE, _TEXT))
        if len(images) == len(texts) == 1 and x_key is None and y_key is None:
            return images[0], texts[0]
        found = ", ".join(self.keys)
        if not images or not texts:
            missing = "images" if not images else "texts"
            raise UserError(f"{self.path}: has no embeddings of {missing} (found: {found}); pairs need both sides")
        raise UserError(
            f"{self.path}: holds {found}; name the arrays of both sides, such as {images[0]} for x and "
            f"{_partner(images[0], self.keys) or texts[0]} for y"
        )

    def features(self, key: str) -> Stacked:
        """Return an array of all parts as one matrix.

        Raises:
            UserError: if a file cannot be read, or a part has another width than the first one, or another number of
                rows than its metadata.

        """
        if key in self._opened:
            return self._opened[key]
        matrices = self._matrices(key)
        for part, matrix in zip(self.parts, matrices, strict=True):
            if matrix.shape[1] != matrices[0].shape[1]:
                raise UserError(
                    f"{part.arrays[key]}: {key} has {matrix.shape[1]} columns, and {matrices[0].shape[1]} in "
                    f"{self.parts[0].arrays[key]}; all parts must come from the same model"
                )
            rows, counted = self._rows(part)
            if rows != matrix.shape[0]:
                raise UserError(
                    f"{part.arrays[key]}: {key} has {matrix.shape[0]:,} rows, but {counted} has {rows:,}; "
                    "all files of a part need one row per pair"
                )
        self._opened[key] = Stacked(matrices)
        if not len(self._opened[key]):
            raise UserError(f"{self.path}: {key} has no rows")
        return self._opened[key]

    def _rows(self, part: Part) -> tuple[int, Path]:
        """Return the number of rows of a part, and the file that it is known from: the metadata, or the first array."""
        if part.table is not None:
            return open_table(part.table).metadata.num_rows, part.table
        file = part.arrays[self.keys[0]]
        return stored_npy(file).shape[0], file

    def _matrices(self, key: str) -> list[StoredMatrix]:
        if self.kind == CLIP_RETRIEVAL:
            return [stored_npy(part.arrays[key]) for part in self.parts]
        found = [stored_npz(part.arrays[key], key) for part in self.parts]
        compressed = [part.arrays[key] for part, matrix in zip(self.parts, found, strict=True) if matrix is None]
        unpacked = iter(unpack(compressed, key, self.path))
        return [next(unpacked) if matrix is None else matrix for matrix in found]

    @cached_property
    def columns(self) -> list[str]:
        """Columns of texts in the metadata; an empty list without metadata."""
        if self.parts[0].table is None:
            return []
        return [field.name for field in open_table(self.parts[0].table).schema_arrow if holds_names(field.type)]

    def texts(self, names: Sequence[str]) -> StoredTexts | None:
        """Return the column of the metadata with the first of these names that exists; None if there is none.

        Raises:
            UserError: if a part does not have the column.

        """
        column = find_column(self.columns, names)
        if column is None:
            return None
        tables = [part.table for part in self.parts if part.table is not None]
        for table in tables:
            schema = open_table(table).schema_arrow
            if column not in schema.names or not holds_names(schema.field(column).type):
                raise UserError(f"{table}: no column {column!r} of texts, which {tables[0].name} has")
        return StoredTexts(tables, column)

    def modality(self, key: str) -> str:
        """Return what an array has embeddings of: "text" or "image"."""
        return "text" if key.endswith(_TEXT) else "image"

    def labels(self, key: str) -> StoredTexts | None:
        """Return what the rows of an array are called: captions of texts, file names or addresses of images."""
        return self.texts(TEXT_COLUMNS if self.modality(key) == "text" else IMAGE_COLUMNS)

    def check(self, *keys: str, directions: bool = False) -> None:
        """Read all rows of some arrays once.

        Args:
            keys: the arrays.
            directions: also refuse rows of zeros, which cannot be scaled to unit norm.

        Raises:
            UserError: if a row is not finite. It names the file and the row.

        """
        for key in keys:
            features = self.features(key)
            for start in range(0, len(features), CHECKED):
                block = np.asarray(features[start : start + CHECKED])
                finite = np.isfinite(block).all(axis=1)
                if not finite.all():
                    self._refuse(key, start + int(np.argmin(finite)), "holds a NaN or an infinity; fix or remove it")
                if directions and not (nonzero := block.any(axis=1)).all():
                    row = start + int(np.argmin(nonzero))
                    self._refuse(key, row, "is all zeros and has no direction; remove it")

    def _refuse(self, key: str, row: int, why: str) -> None:
        ends = np.cumsum([matrix.shape[0] for matrix in self.features(key).parts])
        part = int(np.searchsorted(ends, row, "right"))
        inside = row - int(ends[part - 1] if part else 0)
        raise UserError(f"{self.parts[part].arrays[key]}: {key} row {inside} (row {row} of the folder) {why}")


def _partner(key: str, keys: Sequence[str]) -> str | None:
    """Return the array of the other side and the same model, if it exists."""
    pairs = (("img_emb", "text_emb"), ("text_emb", "img_emb"), ("_img", "_txt"), ("_txt", "_img"))
    names = (key.removesuffix(own) + other for own, other in pairs if key.endswith(own))
    return next((name for name in names if name in keys), None)


def _clip_retrieval_parts(path: Path) -> list[Part]:
    files = {name: _numbered(path / name, name, ".npy") for name in ("img_emb", "text_emb") if (path / name).is_dir()}
    files = {name: found for name, found in files.items() if found}
    if (path / "metadata").is_dir():
        files["metadata"] = _numbered(path / "metadata", "metadata", ".parquet")
    numbers = sorted({number for found in files.values() for number in found})
    for name, found in files.items():
        missing = [number for number in numbers if number not in found]
        if missing:
            has = next(found[missing[0]] for found in files.values() if missing[0] in found)
            raise UserError(
                f"{path / name}: part {missing[0]} is missing, which exists as {has.relative_to(path)}; "
                "run clip-retrieval inference again, or remove the other files of this part"
            )
    tables = files.pop("metadata", {})
    return [
        Part(str(number), {name: found[number] for name, found in files.items()}, tables.get(number))
        for number in numbers
    ]


def _numbered(folder: Path, name: str, suffix: str) -> dict[int, Path]:
    """Return the files NAME_0SUFFIX, NAME_1SUFFIX, ... of a folder by their numbers."""
    pattern = re.compile(rf"{name}_(\d+){re.escape(suffix)}")
    matches = ((pattern.fullmatch(file.name), file) for file in sorted(folder.iterdir()))
    found: dict[int, Path] = {}
    for match, file in matches:
        if match is not None:
            number = int(match[1])
            if number in found:
                raise UserError(f"{file}: part {number} exists twice, also as {found[number].name}; remove one of them")
            found[number] = file
    return found


def _datacomp_parts(path: Path) -> list[Part]:
    arrays, tables = (
        {file.relative_to(path).with_suffix(""): file for file in _files(path, suffix)}
        for suffix in (".npz", ".parquet")
    )
    for stem in sorted({*arrays, *tables}):
        if stem not in arrays or stem not in tables:
            has, missing = (tables, ".npz") if stem in tables else (arrays, ".parquet")
            raise UserError(
                f"{path / stem}{missing}: missing, but {has[stem].name} exists; download both, or remove this shard"
            )
    stems = sorted(arrays)
    names = {stem: _matrix_names(arrays[stem]) for stem in stems}
    for stem in stems:
        if names[stem] != names[stems[0]]:
            raise UserError(
                f"{arrays[stem]}: holds {', '.join(names[stem]) or 'no arrays of images or texts'}; "
                f"{arrays[stems[0]].name} holds {', '.join(names[stems[0]])}"
            )
    if not names[stems[0]]:
        raise UserError(f"{arrays[stems[0]]}: no array whose name ends with _img or _txt, such as l14_img")
    return [Part(str(stem), dict.fromkeys(names[stem], arrays[stem]), tables[stem]) for stem in stems]


def _matrix_names(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [member.filename.removesuffix(".npy") for member in archive.infolist()]
    except Exception as error:  # zipfile raises many types for damaged files
        raise UserError(f"{path}: cannot be read as .npz ({first_line(error)})") from None
    return sorted({name for name in names if name.endswith(("_img", "_txt"))})


def unpack(paths: Sequence[Path], key: str, folder: Path) -> list[StoredMatrix]:
    """Copy a compressed array of each file into one temporary file, which has no name and ends with the process.

    Args:
        paths: `.npz` files, one of which is in memory at a time.
        key: the array.
        folder: the folder of the data; the temporary file is on the same disk if it can be written.

    Returns:
        Where the matrices lie.

    Raises:
        UserError: if a file is damaged, or the disk has too little space.

    """
    if not paths:
        return []
    target = find_cache_folder(folder)
    needed = sum(_member_size(path, key) for path in paths)
    free = shutil.disk_usage(target or tempfile.gettempdir()).free
    if needed > 0.9 * free:
        raise UserError(
            f"{folder}: {key} is compressed and needs {needed / 2**30:.1f} GiB on disk when unpacked, but "
            f"{free / 2**30:.1f} GiB are free; save the shards without compression (numpy.savez), or set NUCLR_CACHE "
            "to a folder on a larger disk"
        )
    file: IO[bytes] = tempfile.TemporaryFile(dir=target)  # noqa: SIM115 (open as long as its rows are read)
    matrices = []
    for path in paths:
        array = read_npz(path, (key,))[key]
        if array.ndim != 2 or array.dtype.kind != "f" or array.dtype.itemsize > 8 or array.shape[1] < 1:
            raise UserError(
                f"{path}: {key} is {array.dtype} of shape {array.shape}; needs floating-point numbers (rows, width)"
            )
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        matrices.append(StoredMatrix(file, file.seek(0, os.SEEK_CUR), (len(array), array.shape[1]), array.dtype))
        file.write(array.data)
    file.flush()
    return matrices


def _member_size(path: Path, key: str) -> int:
    with zipfile.ZipFile(path) as archive:
        return next(m.file_size for m in archive.infolist() if m.filename.removesuffix(".npy") == key)


class StackedPairs(Pairs):
    """Pairs of a folder of embeddings: pair j is row j of both arrays. Rows are read when they are needed.

    Args:
        path: the folder.
        x_key: the array of side x (setting `data.x.key`).
        y_key: the array of side y (setting `data.y.key`).

    Raises:
        UserError: as `EmbeddingFolder`, or if a row is not finite.

    """

    x_kind = "vector"
    y_kind = "vector"

    def __init__(self, path: Path, x_key: str | None = None, y_key: str | None = None) -> None:
        folder = EmbeddingFolder(path)
        self.x_key, self.y_key = folder.sides(x_key, y_key)
        folder.check(self.x_key, self.y_key)
        self._x, self._y = folder.features(self.x_key), folder.features(self.y_key)
        self.x_id = self.y_id = np.arange(len(self._y))
        self.label = path.name
        hashed = hashlib.sha256()
        for stacked in (self._x, self._y):
            hashed.update(f"{stacked.shape} {stacked.dtype}".encode())
            hashed.update(stacked[np.linspace(0, len(stacked) - 1, min(SAMPLED, len(stacked))).astype(np.int64)].data)
        self.fingerprint = hashed.hexdigest()

    def __len__(self) -> int:
        return len(self._y)

    def x(self, number: int) -> np.ndarray:
        """Return row `number` of x, (d_x,)."""
        return _at_least_float32(self._x[number])

    def y(self, number: int) -> np.ndarray:
        """Return row `number` of y, (d_y,)."""
        return _at_least_float32(self._y[number])

    def items(self, side: Literal["x", "y"], numbers: np.ndarray) -> np.ndarray:
        """Return the x (b, d_x) or the y (b, d_y) of several pairs."""
        return _at_least_float32((self._x if side == "x" else self._y)[numbers])

    def name(self, number: int) -> str:
        """Return the folder and the row."""
        return f"{self.label}, row {number}"


def _at_least_float32(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.float32) if rows.dtype == np.float16 else rows
