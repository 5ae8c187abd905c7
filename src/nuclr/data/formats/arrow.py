"""Pairs in Arrow tables: Parquet files, and Hugging Face datasets on disk as `save_to_disk` writes them.

A column holds texts or names of files, lists of texts, vectors as lists of numbers, encoded images (bytes), or Hugging
Face's `{"bytes": ..., "path": ...}`. Names, texts and vectors are handled as in a JSON list. With bytes, the table is
memory-mapped and only the requested row is read. Rows with the same bytes are one image.

Files are untrusted. An offset in a memory-mapped file may point outside of it, and following it would end the process
with a segmentation fault. Both columns are therefore validated completely when they are opened, before anything else
reads them. This costs one pass over the offsets and over the texts and names, not over the encoded images: 0.03 seconds
per million texts once they are in memory. A text or name that is not UTF-8 makes its row a bad sample.

Parquet has no random access. A file with encoded images is therefore rewritten once, as an Arrow file in the cache
folder, which can be memory-mapped. Datasets on disk are Arrow streams already; reading them needs only pyarrow, not
`datasets`.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.formats.choose import Choice, SideChoice, choose_columns
from nuclr.data.formats.columns import Column, decode_text, first_line, make_column, read_cell
from nuclr.data.formats.listed import ColumnMaker, ListedPairs, open_listed
from nuclr.data.modalities import Folder
from nuclr.data.modalities.base import boundary
from nuclr.data.pairs import BadSample
from nuclr.data.texts import digest, number_distinct
from nuclr.errors import UserError, require
from nuclr.files import file_stamp, find_cache_folder, parse_json, refuse_expansion, write_atomically

_END = 64  # bytes at the end of an image; different images of equal length usually differ in them


class ArrowColumn(Column):
    """Encoded images, or bytes of another modality, in a memory-mapped table. A cell is the number of its row.

    Args:
        kind: the modality.
        content: the column of the table: bytes or {bytes, path}.
        files: the files behind the table.
        folder: the folder that the paths of rows without bytes are relative to.

    """

    def __init__(self, kind: str, content: Any, files: Sequence[Path], folder: Folder) -> None:
        self.kind, self._content, self._files, self.folder = kind, content, files, folder
        self._rows = array("q")

    def append(self, cell: Any) -> str | None:
        """Add the number of a row."""
        self._rows.append(cell)
        return None

    def repeat(self, number: int) -> None:
        """Add the row of pair `number` again."""
        self._rows.append(self._rows[number])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        content: Any = self._content[self._rows[number]].as_py()
        if isinstance(content, dict):
            name, reason = decode_text(content.get("path"), f"{self.kind} name")
            content = content["bytes"]
            if not content and reason:
                raise BadSample(reason)
            content = content or name
        if not content:
            raise BadSample(f"no {self.kind} in the row")
        return read_cell(self.kind, content, self.folder)

    def ids(self) -> np.ndarray:
        """Return the number of each distinct content."""
        return number_distinct(_image_keys(self._content)[np.frombuffer(self._rows, np.int64)])

    def fingerprint(self) -> bytes:
        """Return the numbers of the distinct contents, which are not hashed themselves."""
        return self.ids().tobytes()

    def name(self, number: int) -> str | None:
        """Return the path in the row if it has one."""
        if "path" not in _fields(self._content.type):
            return None
        path = self._content[self._rows[number]]["path"].as_py()
        return path.decode(errors="replace") if isinstance(path, bytes) else path

    def stamp(self, ids: np.ndarray) -> str:  # noqa: ARG002
        """Return a hash that changes when the size or modification time of a file of the table does."""
        inside = None if self.folder is None else self.folder.inside
        stamps = json.dumps([[file_stamp(file) for file in self._files], str(inside)])
        return hashlib.sha256(stamps.encode()).hexdigest()


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
    path: Path,
    files: Sequence[Path],
    table: Any,
    keys: tuple[str, str],
    root: Path | None,
    choice: Choice,
    allow_outside: bool,
) -> ListedPairs:
    """Return the pairs of a table.

    Args:
        path: the file or folder, for messages.
        files: the files behind the table.
        table: a pyarrow table that nothing has read yet.
        keys: the columns of x and y.
        root: the folder that names of files are relative to.
        choice: the settings of both sides.
        allow_outside: read files outside of the root as well.

    """
    folder = Folder(root or path.parent, boundary(root or path.parent, allow_outside))
    sides = [
        _Reader(validate_column(path, table, key), table.schema.field(key).type, side, files, folder)
        for key, side in zip(keys, (choice.x, choice.y), strict=True)
    ]
    rows = zip(sides[0].cells(), sides[1].cells(), repeat(None), range(table.num_rows), strict=False)
    kinds, makers = (sides[0].kind, sides[1].kind), (sides[0].maker, sides[1].maker)
    return open_listed(rows, path, root, allow_outside, choice, keys, "row", kinds, makers)


class _Reader:
    """How a column of a table is read: row by row, or as a memory-mapped column of bytes.

    Args:
        column: the column after its validation, in which texts may have become bytes.
        type_: its type before the validation.
        side: the settings of the side.
        files: the files behind the table.
        folder: the folder that paths are relative to.

    """

    def __init__(self, column: Any, type_: Any, side: SideChoice, files: Sequence[Path], folder: Folder) -> None:
        self._column = column
        self.kind: str | None = None
        self.maker: ColumnMaker = make_column
        if holds_bytes(type_):
            kind = self.kind = side.kind or "image"
            self.maker = lambda *_: ArrowColumn(kind, column, files, folder)

    def cells(self) -> Iterable[Any]:
        """Yield the cell or list of cells of every row."""
        return range(len(self._column)) if self.kind is not None else _cells(self._column)


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


def _cells(column: Any) -> Iterator[Any]:
    """Yield the value of every row: a text, a list, an array of numbers, or None."""
    for chunk in column.chunks:
        if _holds_numbers(chunk.type):
            yield from _vectors(chunk)
        elif len(chunk) < 100_000:
            yield from chunk.to_pylist()
        else:
            yield from (scalar.as_py() for scalar in chunk)


def _vectors(chunk: Any) -> Iterator[np.ndarray | None]:
    """Yield the numbers of every row without making Python objects of them; null numbers become NaN."""
    missing = chunk.is_null().to_numpy(zero_copy_only=False)
    width = getattr(chunk.type, "list_size", None)
    values = chunk.values.to_numpy(zero_copy_only=False)
    rows = np.arange(len(chunk) + 1, dtype=np.int64)
    starts = chunk.offsets.to_numpy() if width is None else (chunk.offset + rows) * width
    for row in range(len(chunk)):
        begin, end = int(starts[row]), int(starts[row + 1])
        yield None if missing[row] or begin == end else values[begin:end]


def read_vectors(path: Path, name: str | None) -> np.ndarray:
    """Read the vectors of a column of a Parquet file or folder, or of a dataset on disk.

    Args:
        path: the file or folder.
        name: the column. None: the only one that holds lists of numbers.

    Returns:
        (rows, width), in the column's precision; integers become float32.

    Raises:
        UserError: if the file cannot be read, there is no such column, or its rows differ in length.

    """
    table = _whole_table(path)
    vectors = [field.name for field in table.schema if _holds_numbers(field.type)]
    if name is None and len(vectors) != 1:
        raise UserError(f"{path}: name a column of numbers as {path}:COLUMN; found: {', '.join(vectors) or 'none'}")
    name = vectors[0] if name is None else name
    if name not in vectors:
        raise UserError(
            f"{path}: no column {name!r} that holds lists of numbers; found: {', '.join(vectors) or 'none'}"
        )
    rows = list(_cells(validate_column(path, table, name)))
    if not rows:
        raise UserError(f"{path}: column {name!r} has no rows")
    for number, row in enumerate(rows):
        if row is None or rows[0] is None or len(row) != len(rows[0]):
            width = "no vector" if row is None else f"{len(row)} numbers"
            raise UserError(f"{path}: row {number} of column {name!r} has {width}; all rows need the same number")
    array = np.stack(rows)
    return array if array.dtype.kind == "f" else array.astype(np.float32)


def read_texts(path: Path, name: str) -> list[str]:
    """Read the texts of a column of a Parquet file or folder, or of a dataset on disk.

    Raises:
        UserError: if the file cannot be read, or there is no such column of texts.

    """
    table = _whole_table(path)
    texts = [field.name for field in table.schema if holds_names(field.type)]
    if name not in texts:
        raise UserError(f"{path}: no column {name!r} that holds texts; found: {', '.join(texts) or 'none'}")
    return [cell if isinstance(cell, str) else "" for cell in _cells(validate_column(path, table, name))]


def _whole_table(path: Path) -> Any:
    """Return all columns of a Parquet file, a folder of them, or a dataset on disk."""
    pyarrow = load_pyarrow(path)
    try:
        if path.is_dir() and is_hf(path):
            if (path / "dataset_dict.json").is_file():
                splits = sorted(folder.name for folder in path.iterdir() if (folder / "state.json").is_file())
                raise UserError(f"{path}: has several splits; name the folder of one: {', '.join(splits)}")
            return pyarrow.concat_tables([_read_stream(file) for file in _hf_files(path, None)[1]])
        files = [path] if path.is_file() else _files_of_split(path, sorted(path.rglob("*.parquet")), None)
        return pyarrow.concat_tables([_read(file, pyarrow.parquet.read_schema(file).names) for file in files])
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many types on damaged files
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None


def check_types(path: Path, schema: Any, keys: tuple[str, str], choice: Choice) -> None:
    """Check that both columns have types that can be read.

    Raises:
        UserError: if a column has another type.

    """
    types = load_pyarrow(path).types
    for key, side in zip(keys, (choice.x, choice.y), strict=True):
        kind = schema.field(key).type
        if holds_bytes(kind):
            if side.kind in ("text", "vector"):
                raise UserError(
                    f"{path}: column {key!r} holds {kind}, which data.{side.side}.modality={side.kind} does not read"
                )
            continue
        inner = _inner(types, kind)
        numbers = _holds_numbers(kind) or _holds_numbers(inner)
        if not (holds_names(inner) or numbers or (types.is_null(inner) and inner != kind)):
            raise UserError(
                f"{path}: column {key!r} holds {kind}; needs texts, lists of texts or numbers, bytes or {{bytes, path}}"
            )


def _inner(types: Any, kind: Any) -> Any:
    return kind.value_type if _is_list(types, kind) else kind


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _holds_numbers(kind: Any) -> bool:
    """Return whether a type is a list of numbers."""
    types = require("pyarrow").types
    if not _is_list(types, kind):
        return False
    return bool(types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


def holds_bytes(kind: Any) -> bool:
    """Return whether a type is bytes or {bytes, path}; a field that is never present has the type null."""
    types = require("pyarrow").types
    if types.is_binary(kind) or types.is_large_binary(kind):
        return True
    fields = {field.name: field.type for field in kind} if types.is_struct(kind) else {}
    content, path = fields.get("bytes"), fields.get("path")
    if content is None or not (types.is_binary(content) or types.is_large_binary(content) or types.is_null(content)):
        return False
    return path is None or holds_names(path) or bool(types.is_null(path))


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


def open_parquet(
    path: Path,
    root: Path | None = None,
    choice: Choice | None = None,
    split: str | None = None,
    allow_outside: bool = False,
) -> ListedPairs:
    """Open a Parquet file, or a folder of them in order of their names.

    Args:
        path: the file or folder.
        root: the folder that names of files are relative to.
        choice: the settings of both sides.
        split: keep only files whose name starts with it, or whose folder has this name.
        allow_outside: read files outside of the root as well.

    Raises:
        UserError: if a file cannot be read or a column is missing.

    """
    pyarrow, choice = load_pyarrow(path), choice or Choice()
    files = [path] if path.is_file() else _files_of_split(path, sorted(path.rglob("*.parquet")), split)
    try:
        schemas = [pyarrow.parquet.read_schema(file) for file in files]
        for file, schema in zip(files, schemas, strict=True):
            if schema.names != schemas[0].names:
                raise UserError(
                    f"{file}: columns {', '.join(schema.names)}; {files[0].name} has {', '.join(schemas[0].names)}"
                )
        keys = choose_columns(schemas[0].names, choice, path)
        check_types(path, schemas[0], keys, choice)
        names = list(dict.fromkeys(keys))
        read = _mapped if any(holds_bytes(schemas[0].field(name).type) for name in names) else _read
        table = pyarrow.concat_tables([read(file, names) for file in files])
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many types on damaged files
        raise UserError(f"{path}: cannot be read as Parquet ({first_line(error)})") from None
    return open_arrow(path, files, table, keys, root, choice, allow_outside)


def _read(file: Path, names: list[str]) -> Any:
    pyarrow = load_pyarrow(file)
    source = pyarrow.parquet.ParquetFile(file)
    schema = pyarrow.schema([source.schema_arrow.field(name) for name in names])
    return pyarrow.Table.from_batches(_batches(file, source, schema), schema)


def _batches(file: Path, source: Any, schema: Any) -> Iterator[Any]:
    """Yield the rows of a Parquet file, and stop if a small file expands to a large table."""
    expanded = 0
    for batch in source.iter_batches(batch_size=1000, columns=schema.names):
        expanded += batch.nbytes
        refuse_expansion(file, "the table", file.stat().st_size, expanded, "write it as JSON lines")
        yield batch.select(schema.names).cast(schema)


def _mapped(file: Path, names: list[str]) -> Any:
    """Return a memory-mapped copy of columns of a Parquet file, written on first use and when the file has changed."""
    pyarrow = load_pyarrow(file)
    source = pyarrow.parquet.ParquetFile(file)
    folder = find_cache_folder(file.parent)
    if folder is None:
        return _read(file, names)
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
            for batch in _batches(file, source, schema):
                writer.write_batch(batch)
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
    choice: Choice | None = None,
    split: str | None = None,
    allow_outside: bool = False,
) -> ListedPairs:
    """Open a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`.

    Args:
        path: the folder.
        root: the folder that names of files are relative to.
        choice: the settings of both sides.
        split: the split to read; required for a `DatasetDict`.
        allow_outside: read files outside of the root as well.

    Raises:
        UserError: if the folder cannot be read, or a split or column is missing.

    """
    pyarrow, choice = load_pyarrow(path), choice or Choice()
    path, files = _hf_files(path, split)
    try:
        table = pyarrow.concat_tables([_read_stream(file) for file in files])
        keys = choose_columns(table.schema.names, choice, path)
        check_types(path, table.schema, keys, choice)
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many types on damaged files
        raise UserError(f"{path}: cannot be read as a dataset on disk ({first_line(error)})") from None
    return open_arrow(path, files, table, keys, root, choice, allow_outside)


def _hf_files(path: Path, split: str | None) -> tuple[Path, list[Path]]:
    """Return the folder of a dataset, or of a split of it, and its files."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(folder.name for folder in path.iterdir() if (folder / "state.json").is_file())
        if split not in splits:
            problem = f"no split {split!r} (data.split)" if split else "name a split with data.split"
            raise UserError(f"{path}: {problem}; found: {', '.join(splits)}")
        path = path / split
    try:
        state = parse_json((path / "state.json").read_bytes())
        files = [_data_file(path, entry["filename"]) for entry in state["_data_files"]]
    except Exception as error:  # a damaged file can hold anything
        raise UserError(f"{path}: cannot be read as a dataset on disk ({first_line(error)})") from None
    if state.get("_indices_files"):
        raise UserError(f"{path}: holds only a selection of rows; call dataset.flatten_indices() and save it again")
    if not files:
        raise UserError(f"{path}: holds no pairs")
    return path, files


def _read_stream(file: Path) -> Any:
    """Return the memory-mapped table of an Arrow stream, unless a small file expands to a large table."""
    pyarrow = load_pyarrow(file)
    expanded, batches = 0, []
    with pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))) as reader:
        for batch in reader:
            expanded += batch.get_total_buffer_size()  # nbytes would read offsets, which are not validated yet
            refuse_expansion(file, "the table", file.stat().st_size, expanded, "save it without compression")
            batches.append(batch)
        return pyarrow.Table.from_batches(batches, reader.schema)


def _data_file(folder: Path, name: Any) -> Path:
    """Return a file that state.json names; it has to be a regular file in the folder of the dataset."""
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        raise ValueError(f"state.json names {str(name)[:100]!r}, which is not a file in the folder")
    return folder / name


def is_hf(path: Path) -> bool:
    """Return whether the folder was written by `save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
