"""Pairs in Arrow tables: Parquet files, and Hugging Face datasets on disk as `save_to_disk` writes them.

The image column holds file names, encoded images (bytes), or Hugging Face's `{"bytes": ..., "path": ...}`. The caption
column holds one text or a list of texts. Names are handled as in a caption list. With bytes, the table is memory-mapped
and only the requested row is read. Rows with the same bytes are one image.

Parquet has no random access. A file with encoded images is therefore rewritten once, as an Arrow file in the cache
folder, which can be memory-mapped. Datasets on disk are Arrow streams already; reading them needs only pyarrow, not
`datasets`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nuclr.data.formats.listed import ListedPairs, choose_column
from nuclr.data.modalities.image import open_image, read_file
from nuclr.data.pairs import BadSample, Checkable
from nuclr.data.texts import Texts, clean, digest, number_distinct
from nuclr.errors import UserError, require
from nuclr.files import file_stamp, find_cache_folder, write_atomically

_END = 64  # bytes at the end of an image; different images of equal length usually differ in them


class ArrowPairs(Checkable):
    """Pairs of a table with encoded images.

    Args:
        path: the file or folder, for messages.
        files: the files behind the table.
        images: the column of images: bytes or {bytes, path}.
        captions: the column of captions: one text or a list of texts per row.
        folder: the folder that the paths of images without bytes are relative to.

    Raises:
        UserError: if the table has no pairs.

    """

    x_kind = "image"
    y_kind = "text"

    def __init__(self, path: Path, files: Sequence[Path], images: Any, captions: Any, folder: Path) -> None:
        self._files, self._images, self.folder = files, images, folder
        self.known_bad: dict[int, str] = {}
        self.label = path.name or str(path)
        self._captions = Texts()
        rows: list[int] = []
        for row, caption in _rows_and_captions(captions):
            if not clean(caption):
                self.known_bad[len(rows)] = "empty caption"
            rows.append(row)
            self._captions.append(clean(caption))
        if not rows:
            raise UserError(f"{path}: holds no pairs")
        self._row = np.array(rows, np.int64)
        self.x_id, self.y_id = number_distinct(_image_keys(images)[self._row]), self._captions.ids()
        self.fingerprint = hashlib.sha256(self.x_id.tobytes() + self._captions.fingerprint().encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.x_id)

    def x(self, number: int) -> Image.Image:
        """Return the image of the row, or of the file that the row names, not decoded yet."""
        content: Any = self._images[int(self._row[number])].as_py()
        if isinstance(content, dict):
            name = content.get("path")
            content = content["bytes"] or (read_file(self.folder / name) if name else None)
        if not content:
            raise BadSample("no image in the row")
        return open_image(content)

    def y(self, number: int) -> str:
        """Return the caption."""
        if number in self.known_bad:
            raise BadSample(self.known_bad[number])
        return self._captions[number]

    def name(self, number: int) -> str:
        """Return the path in the row if it has one, otherwise the number of the row."""
        row = int(self._row[number])
        if "path" not in _fields(self._images.type):
            return f"row {row}"
        return self._images[row]["path"].as_py() or f"row {row}"

    def stamp(self) -> str:
        """Return a hash that changes when the size or modification time of a file of the table does."""
        return hashlib.sha256(json.dumps([file_stamp(file) for file in self._files]).encode()).hexdigest()


def _image_keys(images: Any) -> np.ndarray:
    """Return a key per row, (rows,) uint64, equal if the bytes are equal (or, without bytes, the paths).

    Bytes are hashed only if another row has the same length and the same end, so most rows are not read.
    """
    import pyarrow.compute

    named = "path" in _fields(images.type)
    content = pyarrow.compute.struct_field(images, "bytes") if _fields(images.type) else images
    length = pyarrow.compute.fill_null(pyarrow.compute.binary_length(content), 0).to_numpy()
    keys = np.arange(len(length), dtype=np.uint64)  # all different until two rows are found to be equal
    for row in np.flatnonzero(length == 0).tolist() if named else ():
        if path := images[row]["path"].as_py():
            keys[row] = digest(path.encode())
    same = _with_equal_value(length, np.flatnonzero(length))
    ends = np.zeros(len(length), np.uint64)
    for row in same.tolist():
        ends[row] = digest(b"%d " % length[row] + content[row].as_buffer()[-_END:].to_pybytes())
    for row in _with_equal_value(ends, same).tolist():
        keys[row] = digest(memoryview(content[row].as_buffer()))
    return keys


def _with_equal_value(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return those of `rows` that have the same value as another of them."""
    _, group, count = np.unique(values[rows], return_inverse=True, return_counts=True)
    return rows[count[group] > 1]


def open_arrow(
    path: Path, files: Sequence[Path], table: Any, image: str, caption: str, root: Path | None
) -> ListedPairs | ArrowPairs:
    """Return the pairs of a table.

    Args:
        path: the file or folder, for messages.
        files: the files behind the table.
        table: a pyarrow table.
        image: the column of image names or encoded images.
        caption: the column of captions.
        root: the folder that image names are relative to.

    """
    pairs: ListedPairs | ArrowPairs
    if holds_names(table.schema.field(image).type):
        names = table[image]
        rows = ((names[row].as_py() or "", text, None) for row, text in _rows_and_captions(table[caption]))
        pairs = ListedPairs(rows, path, root)
    else:
        pairs = ArrowPairs(path, files, table[image], table[caption], root or path.parent)
    pairs.x_key, pairs.y_key = image, caption
    return pairs


def _rows_and_captions(captions: Any) -> Iterator[tuple[int, str]]:
    """Yield (row, caption) for every caption of every row; null gives an empty caption."""
    row = 0
    for chunk in captions.chunks:
        for value in chunk.to_pylist() if len(chunk) < 100_000 else (scalar.as_py() for scalar in chunk):
            for caption in value if isinstance(value, list) else [value]:
                yield row, caption or ""
            row += 1


def choose_columns(path: Path, schema: Any, x_key: str | None, y_key: str | None) -> tuple[str, str]:
    """Return the names of the image and caption columns.

    Raises:
        UserError: if a column does not exist or has a type that cannot be read.

    """
    types = load_pyarrow(path).types
    image = choose_column(schema.names, "x", x_key, path)
    caption = choose_column(schema.names, "y", y_key, path)
    kind = schema.field(image).type
    if not (holds_names(kind) or types.is_binary(kind) or types.is_large_binary(kind) or "bytes" in _fields(kind)):
        raise UserError(f"{path}: column {image!r} holds {kind}; needs file names, bytes or {{bytes, path}}")
    kind = schema.field(caption).type
    inner = kind.value_type if types.is_list(kind) or types.is_large_list(kind) else kind
    if not holds_names(inner):
        raise UserError(f"{path}: column {caption!r} holds {kind}; needs text or lists of text")
    return image, caption


def holds_names(kind: Any) -> bool:
    """Return whether a column of this type holds text."""
    return str(kind) in ("string", "large_string", "string_view")


def _fields(kind: Any) -> list[str]:
    return [field.name for field in kind] if str(kind).startswith("struct") else []


def load_pyarrow(path: Path) -> Any:
    """Return the pyarrow package, which is imported only when a format needs it."""
    for module in ("pyarrow.ipc", "pyarrow.parquet", "pyarrow.types"):
        require(module, purpose=str(path))
    return require("pyarrow")


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def open_parquet(
    path: Path,
    root: Path | None = None,
    x_key: str | None = None,
    y_key: str | None = None,
    split: str | None = None,
) -> ListedPairs | ArrowPairs:
    """Open a Parquet file, or a folder of them in order of their names.

    Args:
        path: the file or folder.
        root: the folder that image names are relative to.
        x_key: the column of images.
        y_key: the column of captions.
        split: keep only files whose name starts with it, or whose folder has this name.

    Raises:
        UserError: if a file cannot be read or a column is missing.

    """
    pyarrow = load_pyarrow(path)
    files = [path] if path.is_file() else _files_of_split(path, sorted(path.rglob("*.parquet")), split)
    try:
        schemas = [pyarrow.parquet.read_schema(file) for file in files]
        for file, schema in zip(files, schemas, strict=True):
            if schema.names != schemas[0].names:
                raise UserError(
                    f"{file}: columns {', '.join(schema.names)}; {files[0].name} has {', '.join(schemas[0].names)}"
                )
        image, caption = choose_columns(path, schemas[0], x_key, y_key)
        read = _read if holds_names(schemas[0].field(image).type) else _mapped
        table = pyarrow.concat_tables([read(file, [image, caption]) for file in files])
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({first_line(error)})") from None
    return open_arrow(path, files, table, image, caption, root)


def _read(file: Path, names: list[str]) -> Any:
    return load_pyarrow(file).parquet.ParquetFile(file).read(columns=names)


def _mapped(file: Path, names: list[str]) -> Any:
    """Return a memory-mapped copy of columns of a Parquet file, written on first use and when the file has changed."""
    pyarrow = load_pyarrow(file)
    source = pyarrow.parquet.ParquetFile(file)
    folder = find_cache_folder(file.parent)
    if folder is None:
        return source.read(columns=names)
    key = json.dumps([str(file.absolute()), file_stamp(file), names])
    copy = folder / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.arrow"
    if not copy.is_file():
        schema = pyarrow.schema([source.schema_arrow.field(name) for name in names])
        with write_atomically(copy, sync=False) as sink, pyarrow.ipc.new_file(sink, schema) as writer:
            for batch in source.iter_batches(batch_size=1000, columns=names):
                writer.write_batch(batch.select(names).cast(schema))
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(copy))).read_all()


def _files_of_split(path: Path, files: list[Path], split: str | None) -> list[Path]:
    if not files:
        raise UserError(f"{path}: no .parquet file in it")
    kept = [file for file in files if split is None or file.name.startswith(split) or file.parent.name == split]
    if not kept:
        names = ", ".join(file.name for file in files[:10])
        raise UserError(f"{path}: no .parquet file of split {split!r} (data.split); found: {names}")
    return kept


def open_hf(
    path: Path,
    root: Path | None = None,
    x_key: str | None = None,
    y_key: str | None = None,
    split: str | None = None,
) -> ListedPairs | ArrowPairs:
    """Open a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`.

    Args:
        path: the folder.
        root: the folder that image names are relative to.
        x_key: the column of images.
        y_key: the column of captions.
        split: the split to read; required for a `DatasetDict`.

    Raises:
        UserError: if the folder cannot be read, or a split or column is missing.

    """
    pyarrow = load_pyarrow(path)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(folder.name for folder in path.iterdir() if (folder / "state.json").is_file())
        if split not in splits:
            problem = f"no split {split!r} (data.split)" if split else "name a split with data.split"
            raise UserError(f"{path}: {problem}; found: {', '.join(splits)}")
        path = path / split
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        files = [path / entry["filename"] for entry in state["_data_files"]]
        if state.get("_indices_files"):
            raise UserError(f"{path}: holds only a selection of rows; call dataset.flatten_indices() and save it again")
        if not files:
            raise UserError(f"{path}: holds no pairs")
        table = pyarrow.concat_tables(
            [pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all() for file in files]
        )
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: cannot be read as a dataset on disk ({first_line(error)})") from None
    image, caption = choose_columns(path, table.schema, x_key, y_key)
    return open_arrow(path, files, table, image, caption, root)


def is_hf(path: Path) -> bool:
    """Return whether the folder was written by `save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
