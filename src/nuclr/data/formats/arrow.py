"""Pairs in Arrow tables: Parquet files, and Hugging Face datasets on disk as `save_to_disk` writes them.

The image column holds file names, encoded images (bytes), or Hugging Face's `{"bytes": ..., "path": ...}`. The caption
column holds one text or a list of texts. Names are handled as in a caption list. With bytes, the table is memory-mapped
and only the requested row is read. Rows with the same bytes are one image.

Files are untrusted. An offset in a memory-mapped file may point outside of it, and following it would end the process
with a segmentation fault. Both columns are therefore validated completely when they are opened, before anything else
reads them. This costs one pass over the offsets and over the captions and names, not over the encoded images: 0.03
seconds per million captions once they are in memory. A caption or name that is not UTF-8 makes its row a bad sample.

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
from nuclr.data.modalities.base import boundary, read_file
from nuclr.data.modalities.image import open_image
from nuclr.data.pairs import BadSample, Checkable
from nuclr.data.texts import Texts, clean, digest, number_distinct, text_problem
from nuclr.errors import UserError, require
from nuclr.files import file_stamp, find_cache_folder, parse_json, write_atomically

_END = 64  # bytes at the end of an image; different images of equal length usually differ in them


class ArrowPairs(Checkable):
    """Pairs of a table with encoded images.

    Args:
        path: the file or folder, for messages.
        files: the files behind the table.
        images: the column of images: bytes or {bytes, path}.
        captions: the column of captions: one text or a list of texts per row.
        folder: the folder that the paths of images without bytes are relative to.
        allow_outside: read such images outside of the folder as well.

    Raises:
        UserError: if the table has no pairs.

    """

    x_kind = x_name = "image"
    y_kind = y_name = "text"

    def __init__(
        self,
        path: Path,
        files: Sequence[Path],
        images: Any,
        captions: Any,
        folder: Path,
        allow_outside: bool = False,
    ) -> None:
        self._files, self._images, self.folder = files, images, folder
        self._inside = boundary(folder, allow_outside)
        self.known_bad: dict[int, str] = {}
        self.label = path.name or str(path)
        self._captions = Texts()
        rows: list[int] = []
        for row, caption, reason in _rows_and_captions(captions):
            if reason := reason or text_problem(caption, "caption"):
                self.known_bad[len(rows)] = reason
            rows.append(row)
            self._captions.append("" if reason else clean(caption))
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
            name, reason = _decode(content.get("path"), "image name")
            content = content["bytes"]
            if not content and reason:
                raise BadSample(reason)
            content = content or (read_file(self.folder / name, self._inside) if name else None)
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
        path = self._images[row]["path"].as_py()
        return (path.decode(errors="replace") if isinstance(path, bytes) else path) or f"row {row}"

    def stamp(self) -> str:
        """Return a hash that changes when the size or modification time of a file of the table does."""
        return hashlib.sha256(
            json.dumps([[file_stamp(file) for file in self._files], str(self._inside)]).encode()
        ).hexdigest()


def _image_keys(images: Any) -> np.ndarray:
    """Return a key per row, (rows,) uint64, equal if the bytes are equal (or, without bytes, the paths).

    Bytes are hashed only if another row has the same length and the same end, so most rows are not read.
    """
    import pyarrow.compute

    named = "path" in _fields(images.type)
    content = pyarrow.compute.struct_field(images, "bytes") if _fields(images.type) else images
    if pyarrow.types.is_null(content.type):  # no row has bytes, and nothing says of which type they would be
        content = content.cast(pyarrow.binary())
    length = pyarrow.compute.fill_null(pyarrow.compute.binary_length(content), 0).to_numpy()
    keys = np.arange(len(length), dtype=np.uint64)  # all different until two rows are found to be equal
    for row in np.flatnonzero(length == 0).tolist() if named else ():
        if path := images[row]["path"].as_py():
            keys[row] = digest(path if isinstance(path, bytes) else path.encode())
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
    path: Path, files: Sequence[Path], table: Any, image: str, caption: str, root: Path | None, allow_outside: bool
) -> ListedPairs | ArrowPairs:
    """Return the pairs of a table.

    Args:
        path: the file or folder, for messages.
        files: the files behind the table.
        table: a pyarrow table.
        image: the column of image names or encoded images.
        caption: the column of captions.
        root: the folder that image names are relative to.
        allow_outside: read images outside of the root as well.

    """
    images, captions = (validate_column(path, table, name) for name in (image, caption))
    pairs: ListedPairs | ArrowPairs
    if holds_names(table.schema.field(image).type):
        pairs = ListedPairs(_named_rows(images, captions), path, root, allow_outside)
    else:
        pairs = ArrowPairs(path, files, images, captions, root or path.parent, allow_outside)
    pairs.x_key, pairs.y_key = image, caption
    return pairs


def validate_column(path: Path, table: Any, name: str) -> Any:
    """Return a column after checking that all of its offsets lie inside of its buffers.

    Args:
        path: the file or folder, for messages.
        table: a pyarrow table that nothing has read yet.
        name: the column.

    Returns:
        The column. If it has text that is not UTF-8, all its texts are returned as bytes.

    Raises:
        UserError: if the column is damaged.

    """
    pyarrow = load_pyarrow(path)
    column = table[name]
    try:
        column.validate()  # sizes of the buffers only, which the following steps rely on
        try:
            column.validate(full=True)
            return column
        except pyarrow.ArrowInvalid:
            kind = _with_bytes(pyarrow, column.type)
            chunks = [chunk.view(kind) for chunk in column.chunks]
            column = pyarrow.chunked_array(chunks, kind)
            column.validate(full=True)
            return column
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: the file is damaged: column {name!r} cannot be read ({first_line(error)})") from None


def _with_bytes(pyarrow: Any, kind: Any) -> Any:
    """Return the type with binary in place of text; both have the same layout."""
    types = pyarrow.types
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_with_bytes(pyarrow, field.type)) for field in kind])
    if types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_with_bytes(pyarrow, kind.value_type)))
    if types.is_large_list(kind):
        return pyarrow.large_list(kind.value_field.with_type(_with_bytes(pyarrow, kind.value_type)))
    binary = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
    return getattr(pyarrow, binary[str(kind)])() if str(kind) in binary else kind


def _named_rows(names: Any, captions: Any) -> Iterator[tuple[str, str, str | None]]:
    for row, caption, reason in _rows_and_captions(captions):
        name, problem = _decode(names[row].as_py(), "image name")
        yield name, caption, reason or problem


def _rows_and_captions(captions: Any) -> Iterator[tuple[int, str, str | None]]:
    """Yield (row, caption, problem or None) for every caption of every row; null gives an empty caption."""
    row = 0
    for chunk in captions.chunks:
        for value in chunk.to_pylist() if len(chunk) < 100_000 else (scalar.as_py() for scalar in chunk):
            for caption in value if isinstance(value, list) else [value]:
                yield row, *_decode(caption, "caption")
            row += 1


def _decode(value: str | bytes | None, what: str) -> tuple[str, str | None]:
    """Return a text and None, or what is left of it and why it cannot be used."""
    if not isinstance(value, bytes):
        return value or "", None
    try:
        return value.decode(), None
    except UnicodeDecodeError:
        return value.decode(errors="replace"), f"{what} is not UTF-8 text"


def choose_columns(path: Path, schema: Any, x_key: str | None, y_key: str | None) -> tuple[str, str]:
    """Return the names of the image and caption columns.

    Raises:
        UserError: if a column does not exist or has a type that cannot be read.

    """
    types = load_pyarrow(path).types
    image = choose_column(schema.names, "x", x_key, path)
    caption = choose_column(schema.names, "y", y_key, path)
    kind = schema.field(image).type
    is_binary = types.is_binary(kind) or types.is_large_binary(kind)
    if not (holds_names(kind) or is_binary or _holds_bytes_and_path(types, kind)):
        raise UserError(f"{path}: column {image!r} holds {kind}; needs file names, bytes or {{bytes, path}}")
    kind = schema.field(caption).type
    inner = kind.value_type if types.is_list(kind) or types.is_large_list(kind) else kind
    if not holds_names(inner):
        raise UserError(f"{path}: column {caption!r} holds {kind}; needs text or lists of text")
    return image, caption


def _holds_bytes_and_path(types: Any, kind: Any) -> bool:
    """Return whether a type is {bytes, path}; a column in which one of them is never present has the type null."""
    fields = {field.name: field.type for field in kind} if types.is_struct(kind) else {}
    content, path = fields.get("bytes"), fields.get("path")
    if content is None or not (types.is_binary(content) or types.is_large_binary(content) or types.is_null(content)):
        return False
    return path is None or holds_names(path) or types.is_null(path)


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
    allow_outside: bool = False,
) -> ListedPairs | ArrowPairs:
    """Open a Parquet file, or a folder of them in order of their names.

    Args:
        path: the file or folder.
        root: the folder that image names are relative to.
        x_key: the column of images.
        y_key: the column of captions.
        split: keep only files whose name starts with it, or whose folder has this name.
        allow_outside: read images outside of the root as well.

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
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many types on damaged files
        raise UserError(f"{path}: cannot be read as Parquet ({first_line(error)})") from None
    return open_arrow(path, files, table, image, caption, root, allow_outside)


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
    try:
        table = pyarrow.ipc.open_file(pyarrow.memory_map(str(copy))).read_all()
        for name in names:
            validate_column(copy, table, name)
        return table
    except (pyarrow.ArrowException, OSError, ValueError):  # no copy yet, or a damaged one
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
    allow_outside: bool = False,
) -> ListedPairs | ArrowPairs:
    """Open a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`.

    Args:
        path: the folder.
        root: the folder that image names are relative to.
        x_key: the column of images.
        y_key: the column of captions.
        split: the split to read; required for a `DatasetDict`.
        allow_outside: read images outside of the root as well.

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
        state = parse_json((path / "state.json").read_bytes())
        files = [_data_file(path, entry["filename"]) for entry in state["_data_files"]]
        if state.get("_indices_files"):
            raise UserError(f"{path}: holds only a selection of rows; call dataset.flatten_indices() and save it again")
        if not files:
            raise UserError(f"{path}: holds no pairs")
        table = pyarrow.concat_tables(
            [pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all() for file in files]
        )
        image, caption = choose_columns(path, table.schema, x_key, y_key)
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many types on damaged files
        raise UserError(f"{path}: cannot be read as a dataset on disk ({first_line(error)})") from None
    return open_arrow(path, files, table, image, caption, root, allow_outside)


def _data_file(folder: Path, name: Any) -> Path:
    """Return a file that state.json names; it has to be a regular file in the folder of the dataset."""
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        raise ValueError(f"state.json names {str(name)[:100]!r}, which is not a file in the folder")
    return folder / name


def is_hf(path: Path) -> bool:
    """Return whether the folder was written by `save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
