"""Pairs of vectors that encoders have already computed: embedding files, and folders that other tools write in parts.

An embedding file is a `.npz` or `.safetensors` file with `x` (n_x, d_x), `y` (n_y, d_y) and optionally `y_to_x` (n_y,),
the row of x that each row of y belongs to: pair j is (x[y_to_x[j]], y[j]). Without it, row j belongs to row j.

| tool | embeddings | metadata |
| --- | --- | --- |
| clip-retrieval | `img_emb/img_emb_0.npy`, `text_emb/text_emb_0.npy` | `metadata/metadata_0.parquet` |
| DataComp | `STEM.npz` with `b32_img`, `b32_txt`, `l14_img`, `l14_txt` | `STEM.parquet` with `uid`, `url`, `text` |

Row j of all parts of a folder, in the order of their numbers or names, is pair j: an image and its text. Its embeddings
are not read when it is opened (`nuclr.stacked`). Arrays that are compressed cannot be mapped and are copied once, part
by part, to the cache folder. Vectors may have any norm.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.formats.arrow import StoredTexts, open_parquet_file, text_columns
from nuclr.data.formats.choose import find_column
from nuclr.data.modalities import get_modality
from nuclr.data.pairs import SIDES, Pairs, Side, SideName
from nuclr.data.vectors import checked_rows, open_sides, pair_rows, require_vectors
from nuclr.errors import UserError
from nuclr.files import npz_sizes, read_npz
from nuclr.stacked import Stacked, stored_copy, stored_npy, stored_npz

_CAPTIONS = ("caption", "text")
_NAMES = ("image_path", "path", "url")
_SAMPLED = 1024  # rows in the fingerprint of a folder
_ENDS = {"img_emb": "text_emb", "_img": "_txt"}  # how names of arrays of images end -> those of texts


class VectorPairs(Pairs):
    """Pairs of an embedding file or folder: pair j is (x[y_to_x[j]], y[j]).

    The id of y is j: equal vectors do not imply equal texts.

    Args:
        path: the embedding file, which is read into memory, or the folder, whose rows are read when they are needed.
        x_key: the array of side x in a folder (setting `data.x.key`).
        y_key: the array of side y in a folder (setting `data.y.key`).

    Raises:
        UserError: if the file cannot be read or an array is missing, has a wrong type or shape, or is not finite.

    """

    def __init__(
        self,
        path: Path,
        x_key: str | None = None,
        y_key: str | None = None,
    ) -> None:
        x, y = open_sides(str(path), x_key, y_key)
        y_to_x = pair_rows(x, y)
        vector = get_modality("vector")
        self.sides = {}
        self._rows: dict[SideName, Any] = {}
        hashed = hashlib.sha256()
        for side, vectors in zip(SIDES, (x, y), strict=True):
            rows = checked_rows(vectors.name, vectors.rows, "any")
            if len(vectors) < 2:
                raise UserError(f"{vectors.name}: {len(vectors)} row; needs at least two samples")
            self._rows[side] = vectors.rows if path.is_dir() else np.asarray(rows[:])
            ids = y_to_x if side == "x" else np.arange(len(vectors))
            self.sides[side] = Side(
                side,
                vectors.column if path.is_dir() else None,
                vector,
                ids,
            )
            _hash_rows(hashed, self._rows[side])
        if not path.is_dir():
            _hash_rows(hashed, y_to_x)
        self.label = path.name
        self.fingerprint = hashed.hexdigest()

    def __len__(self) -> int:
        return len(self._rows["y"])

    def item(self, side: SideName, number: int) -> np.ndarray:
        """Return a row of x, (d_x,), or of y, (d_y,)."""
        return np.asarray(self.items(side, np.array([number]))[0])

    def items(self, side: SideName, numbers: np.ndarray) -> np.ndarray:
        """Return the x (b, d_x) or the y (b, d_y) of several pairs."""
        rows = np.asarray(self._rows[side][self.sides[side].ids[numbers]])
        return rows.astype(np.float32) if rows.dtype == np.float16 else rows

    def name(self, number: int) -> str:
        """Return the file and the row of x."""
        return f"{self.label}, x row {self.sides['x'].ids[number]}"


def _hash_rows(hashed: Any, rows: Any) -> None:
    """Add an array, or some rows of arrays in files, to a hash."""
    if isinstance(rows, Stacked):
        hashed.update(f"{rows.shape} {rows.dtype}".encode())
        rows = rows[np.linspace(0, len(rows) - 1, min(_SAMPLED, len(rows))).astype(np.int64)]
    else:
        hashed.update(str(rows.shape).encode())
    hashed.update(np.ascontiguousarray(rows).data)


# -- folders -----------------------------------------------------------------------------------------------------------


def is_embedding_folder(path: Path) -> bool:
    """Return whether a folder has the form of clip-retrieval's output or of DataComp's metadata."""
    return path.is_dir() and (_is_clip_retrieval(path) or _is_datacomp(path))


def _is_clip_retrieval(path: Path) -> bool:
    return any(any((path / name).glob(f"{name}_*.npy")) for name in ("img_emb", "text_emb"))


def _is_datacomp(path: Path) -> bool:
    shard = next((file for file in _shards(path, ".npz").values() if file.with_suffix(".parquet").is_file()), None)
    return shard is not None and bool(_matrix_names(shard))


def _shards(path: Path, suffix: str) -> dict[Path, Path]:
    """Return the files of a folder and of the folders in it by their stems; DataComp's largest pool has folders."""
    found = sorted([*path.glob(f"*{suffix}"), *path.glob(f"*/*{suffix}")])
    stems = {file.relative_to(path).with_suffix(""): file for file in found}
    return {stem: file for stem, file in stems.items() if not str(stem).startswith(".")}


def _matrix_names(path: Path) -> list[str]:
    return sorted(name for name in npz_sizes(path) if name.endswith(("_img", "_txt")))


class EmbeddingFolder:
    """A folder of embeddings in parts, with their metadata.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        arrays: name of an array -> its files, one per part.
        tables: the Parquet files with the metadata, one per part; empty if the folder has none.

    Raises:
        UserError: if the folder has another form, or a file of a part is missing.

    Example:
        >>> import tempfile
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
            suffixes = {"img_emb": ".npy", "text_emb": ".npy", "metadata": ".parquet"}
            files = {name: _numbered(path, name, suffix) for name, suffix in suffixes.items() if (path / name).is_dir()}
            aligned = _align(path, files)
            self.tables = aligned.pop("metadata", [])
            self.arrays = aligned
        elif _is_datacomp(path):
            aligned = _align(path, {suffix: _shards(path, suffix) for suffix in (".npz", ".parquet")})
            self.tables = aligned[".parquet"]
            self.arrays = dict.fromkeys(_matrix_names(aligned[".npz"][0]), aligned[".npz"])
        else:
            raise UserError(
                f"{path}: neither an output folder of clip-retrieval (img_emb/, text_emb/) nor a metadata folder of "
                "DataComp (.npz next to .parquet)"
            )

    def sides(self, x_key: str | None = None, y_key: str | None = None) -> tuple[str, str]:
        """Return the arrays of images and of texts.

        Args:
            x_key: the array of side x. None: that of images, of the same model as `y_key`.
            y_key: the array of side y. None: that of texts, of the same model as `x_key`.

        Raises:
            UserError: if there is no such array, or several models are stored and none is named.

        """
        texts_of = {}  # array of images -> that of the same model's texts
        for image_end, text_end in _ENDS.items():
            for key in self.arrays:
                partner = key.removesuffix(image_end) + text_end
                if key.endswith(image_end) and partner in self.arrays:
                    texts_of[key] = partner
        partners = texts_of | {text: image for image, text in texts_of.items()}  # a named array may be on either side
        x = x_key or partners.get(y_key or "")
        y = y_key or partners.get(x_key or "")
        if x is None and len(texts_of) == 1:
            x, y = next(iter(texts_of.items()))
        if x not in self.arrays or y not in self.arrays:
            found = ", ".join(self.arrays)
            needs = "needs arrays of images and texts of one model"
            raise UserError(f"{self.path}: x is {x_key!r} and y is {y_key!r}; {needs}; found: {found}")
        return x, y

    def features(self, key: str) -> Stacked:
        """Return an array of all parts as one matrix.

        Raises:
            UserError: if a file cannot be read, or a part has another width than the first one, or another number of
                rows than its metadata.

        """
        files = self.arrays[key]
        stored = (
            stored_npy(file)
            if file.suffix == ".npy"
            else stored_npz(file, key) or stored_copy(file, key, partial(_unpack, file, key))
            for file in files
        )
        matrices = [matrix for matrix in stored if matrix is not None]
        width = matrices[0].shape[1]
        counted = self.tables or next(iter(self.arrays.values()))
        for file, matrix, other in zip(files, matrices, counted, strict=True):
            rows = open_parquet_file(other).metadata.num_rows if self.tables else stored_npy(other).shape[0]
            if matrix.shape != (rows, width):
                raise UserError(
                    f"{file}: {key} has {matrix.shape[0]:,} rows and {matrix.shape[1]} columns; it needs {rows:,} rows "
                    f"as {other} and {width} columns as {files[0].name}"
                )
        return Stacked(matrices)

    def texts(self, names: Sequence[str]) -> StoredTexts | None:
        """Return the column of the metadata with the first of these names that exists; None if there is none."""
        column = find_column(text_columns(self.tables[0]), names) if self.tables else None
        return None if column is None else StoredTexts(self.tables, column)

    def labels(self, key: str) -> StoredTexts | None:
        """Return what the rows of an array are called: captions of texts, file names or addresses of images."""
        return self.texts(_CAPTIONS if key.endswith(tuple(_ENDS.values())) else _NAMES)


def _numbered(
    path: Path,
    name: str,
    suffix: str,
) -> dict[int, Path]:
    """Return the files NAME_0SUFFIX, NAME_1SUFFIX, ... of a folder NAME by their numbers."""
    files = {file.stem.rpartition("_")[2]: file for file in (path / name).glob(f"{name}_*{suffix}")}
    return {int(number): file for number, file in files.items() if number.isdecimal()}


def _align(path: Path, files: Mapping[str, Mapping[Any, Path]]) -> dict[str, list[Path]]:
    """Return the files of each kind in the order of the parts, after checking that none is missing."""
    parts = sorted({part for found in files.values() for part in found})
    aligned: dict[str, list[Path]] = {}
    for name, found in files.items():
        missing = [part for part in parts if part not in found]
        if missing and found:
            raise UserError(f"{path}: part {missing[0]} has no {name}; add it, or remove the part")
        if found:
            aligned[name] = [found[part] for part in parts]
    return aligned


def _unpack(path: Path, key: str) -> Iterator[np.ndarray]:
    array = read_npz(path, (key,))[key]
    require_vectors(f"{path}: {key}", array)
    yield array
