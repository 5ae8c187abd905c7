"""Pairs in Arrow tables: Parquet files, Hugging Face datasets on disk as `save_to_disk` writes them, or in memory.

A column holds texts or names of files, lists of texts, vectors as lists of numbers, encoded images (bytes), or Hugging
Face's `{"bytes": ..., "path": ...}`. Names, lists and vectors are handled as in a JSON list. Texts and bytes stay in
the table, which is memory-mapped if it is a dataset on disk. Rows with the same bytes are one image.

Files are untrusted. An offset in a memory-mapped file may point outside of it, and following it would end the process
with a segmentation fault. Both columns are therefore validated completely when they are opened, before anything else
reads them. A text or name that is not UTF-8 makes its row a bad sample.

Parquet has no random access. A file with encoded images is therefore rewritten once, as an Arrow stream in the cache
folder, which can be memory-mapped. Datasets on disk are Arrow streams already; reading them needs only pyarrow, not
`datasets`.
"""

import contextlib
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.formats.choose import Request, choose_columns
from nuclr.data.formats.columns import (
    PROBED,
    Column,
    Heading,
    ListedPairs,
    Row,
    TextColumn,
    head_columns,
    make_column,
    read_item,
    split_cell,
)
from nuclr.data.modalities import Folder, get_modality
from nuclr.data.modalities.base import boundary
from nuclr.data.modalities.text import check_text, clean, decode_text, digest
from nuclr.data.side import SIDES, SideName
from nuclr.errors import BadSample, UserError, first_line, require
from nuclr.files import (
    file_stamp,
    find_cache_folder,
    parse_json,
    read_bytes,
    readable,
    refuse_expansion,
    write_atomically,
)
from nuclr.stacked import StoredMatrix, stored_copy

_END = 64  # bytes at the end of an image; different images of equal length usually differ in them
_BLOCK = 2**14  # rows that are converted to Python objects at a time


# -- pairs -------------------------------------------------------------------------------------------------------------


def open_arrow(request: Request) -> ListedPairs:
    """Open a Parquet file, a folder of them in order of their names, or a dataset on disk.

    Of a folder of Parquet files, `request.split` keeps only files whose name starts with it, or whose folder has this
    name. A `DatasetDict` needs a split.

    Raises:
        UserError: if a file cannot be read, or a split or column is missing.

    """
    path, files = _find_files(request.path, request.split)
    request = replace(request, path=path)
    with readable(path, "a table"):
        schema = _read_schema(files[0])
        keys = choose_columns(schema.names, request)
        names = list(dict.fromkeys(keys.values()))
        mapped = any(_kind(schema.field(name).type) == "bytes" for name in names)
    return _open_table(
        request,
        _read_files(files, names, mapped),
        keys,
        files,
    )


def open_dataset(dataset: Any, request: Request) -> ListedPairs:
    """Open a `datasets.Dataset` in memory; its Arrow table is read.

    Raises:
        UserError: if it holds only a selection of the rows of its table, or a column is missing.

    """
    if getattr(dataset, "_indices", None) is not None:
        raise UserError("the dataset holds only a selection of rows; call dataset.flatten_indices() first")
    table = dataset.data.table
    keys = choose_columns(table.schema.names, request)
    return _open_table(
        request,
        table,
        keys,
        [Path(entry["filename"]) for entry in dataset.cache_files],
    )


def _open_table(
    request: Request,
    table: Any,
    keys: Mapping[SideName, str],
    files: Sequence[Path],
) -> ListedPairs:
    contents: dict[SideName, Any] = {}
    kinds: dict[SideName, str | None] = {}
    known: dict[SideName, str] = {}
    first: dict[SideName, list[Any]] = {"x": [], "y": []}
    for side, key in keys.items():
        kinds[side] = _kind(table.schema.field(key).type)
        chosen = request.sides[side].modality
        in_memory = chosen is not None and get_modality(chosen).in_memory
        if kinds[side] is None or (kinds[side] == "bytes" and in_memory):
            needs = f"data.{side}.modality={chosen}" if in_memory else "texts, lists of texts or numbers, or bytes"
            raise UserError(f"{request.path}: column {key!r} holds {table.schema.field(key).type}; needs {needs}")
        contents[side] = validate_column(request.path, table, key)
        if kinds[side] == "bytes":
            known[side] = chosen or "image"
        else:
            for value in _cells(contents[side].slice(0, PROBED)):
                first[side] += split_cell(value)
    headings = head_columns(request, keys, first, known)
    in_table = {
        side for side in SIDES if side in known or (kinds[side], headings[side].modality.name) == ("texts", "text")
    }
    complete = in_table == set(SIDES)
    root = request.root or request.path.parent
    folder = Folder(root, boundary(root, request.allow_outside))
    columns: dict[SideName, Column] = {}
    cells: dict[SideName, Iterable[Any]] = {}
    for side, heading in headings.items():
        # The cells of a column that stays in the table are the numbers of rows.
        cells[side] = range(table.num_rows) if side in in_table else _cells(contents[side])
        if side in known:
            columns[side] = BytesColumn(
                heading,
                contents[side],
                files,
                folder,
            )
        elif side in in_table:
            columns[side] = TableTextColumn(heading, contents[side])
        else:
            columns[side] = make_column(heading)
        if complete:
            for row in range(table.num_rows):
                columns[side].append(row)
    rows = () if complete else map(Row, cells["x"], cells["y"], range(table.num_rows))
    return ListedPairs(request, columns, rows, "row")


class TableTextColumn(TextColumn):
    """Texts that stay in a table, with single spaces and without line breaks. A cell is the number of a row.

    Args:
        heading: what the column is called, and what it holds.
        content: the column of the table, after its validation.

    """

    def __init__(self, heading: Heading, content: Any) -> None:
        super().__init__(heading)
        self._texts = content
        self._hashes = np.empty(len(content), np.uint64)
        self._changed = bytearray(len(content))  # 1 for texts that differ from those in the table
        self._problems: dict[int, str] = {}
        hashed = hashlib.sha256()  # of what `Texts` would store, so that all formats have the same fingerprint
        starts = array("q", [0])
        row = 0
        for begin in range(0, len(content), _BLOCK):
            block = []
            for cell in _cells(content.slice(begin, _BLOCK)):
                text, problem = check_text(cell, heading.what)
                if problem is not None:
                    self._problems[row] = problem
                self._changed[row] = text != cell
                encoded = text.encode()
                block.append(encoded)
                starts.append(starts[-1] + len(encoded))
                self._hashes[row] = digest(encoded)
                row += 1
            hashed.update(b"".join(block))
        hashed.update(starts)
        self._hash = hashed.hexdigest()

    def _store(self, cell: Any) -> tuple[int, str | None]:
        return cell, self._problems.get(cell)

    def _read(self, row: int) -> str:
        text: str = self._texts[row].as_py().decode()
        return clean(text) if self._changed[row] else text

    def _keys(self) -> np.ndarray:
        return self._hashes

    def _fingerprint(self, more: bytes) -> str:
        return hashlib.sha256(self._hash.encode() + more).hexdigest() if more else self._hash


class BytesColumn(Column):
    """Encoded images, or bytes of another modality, that stay in a table. A cell is the number of a row.

    Args:
        heading: what the column is called, and what it holds.
        content: the column of the table, after its validation: bytes or {bytes, path}.
        files: the files behind the table.
        folder: the folder that the paths of rows without bytes are relative to.

    """

    def __init__(
        self,
        heading: Heading,
        content: Any,
        files: Sequence[Path],
        folder: Folder,
    ) -> None:
        super().__init__(heading)
        self.folder: Folder = folder
        self._content = content
        self._files = files

    def _store(self, cell: Any) -> tuple[int, str | None]:
        return cell, None

    def _read(self, row: int) -> Any:
        content = self._content[row].as_py()
        what = self.heading.what
        if isinstance(content, dict):
            name, reason = decode_text(content.get("path"), f"{what} name")
            content = content["bytes"] or name
            if reason and content is name:
                raise BadSample(reason)
        if not content:
            raise BadSample(f"no {what} in the row")
        return read_item(self.heading.modality, content, self.folder)

    def fingerprint(self) -> bytes:
        """Return the numbers of the distinct contents, which are not hashed themselves."""
        return self.ids().tobytes()

    def name(self, number: int) -> str | None:
        """Return the path in the row if it has one."""
        if "path" not in _fields(self._content.type):
            return None
        path: str | None = decode_text(self._content[self._rows[number]]["path"].as_py(), "")[0]
        return path

    def stamp(self) -> str:
        """Return a hash that changes when the size or modification time of a file of the table does."""
        stamps = json.dumps([[file_stamp(file) for file in self._files], str(self.folder.inside)])
        return hashlib.sha256(stamps.encode()).hexdigest()

    def _keys(self) -> np.ndarray:
        """Return a key per row, equal if the bytes are equal (or, without bytes, the paths).

        Bytes are hashed only if another row has the same length and the same end, so most rows are not read.
        """
        import pyarrow.compute

        contents = self._content
        named = "path" in _fields(contents.type)
        content = pyarrow.compute.struct_field(contents, "bytes") if _fields(contents.type) else contents
        if pyarrow.types.is_null(content.type):  # no row has bytes, and nothing says of which type they would be
            content = content.cast(pyarrow.binary())
        length = pyarrow.compute.fill_null(pyarrow.compute.binary_length(content), 0).to_numpy()
        keys = np.arange(len(length), dtype=np.uint64)  # all different until two rows are found to be equal
        for row in np.flatnonzero(length == 0).tolist() if named else ():
            if path := contents[row]["path"].as_py():
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
    _, group, count = np.unique(
        values[rows],
        return_inverse=True,
        return_counts=True,
    )
    return rows[count[group] > 1]


# -- columns -----------------------------------------------------------------------------------------------------------


def validate_column(
    path: Path,
    table: Any,
    name: str,
) -> Any:
    """Return a column after checking that all of its offsets lie inside of its buffers.

    Args:
        path: the file or folder, for messages.
        table: a pyarrow table that nothing has read yet.
        name: the column.

    Returns:
        The column, with bytes instead of texts, which may not be UTF-8.

    Raises:
        UserError: if the column is damaged.

    """
    pyarrow = require("pyarrow")
    column = table[name]
    try:
        column.validate()  # sizes of the buffers only, which the following steps rely on
        kind = _with_bytes(pyarrow, column.type)
        column = pyarrow.chunked_array([chunk.view(kind) for chunk in column.chunks], kind)
        column.validate(full=True)
        return column.cast(pyarrow.large_binary()) if str(kind) == "binary_view" else column
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: the file is damaged: column {name!r} cannot be read ({first_line(error)})") from None


def _with_bytes(pyarrow: Any, kind: Any) -> Any:
    """Return the type with binary in place of text; both have the same layout."""
    types = pyarrow.types
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_with_bytes(pyarrow, field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        inner = kind.value_field.with_type(_with_bytes(pyarrow, kind.value_type))
        return pyarrow.list_(inner) if types.is_list(kind) else pyarrow.large_list(inner)
    binary = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
    return getattr(pyarrow, binary[str(kind)])() if str(kind) in binary else kind


def _cells(column: Any) -> Iterator[Any]:
    """Yield the value of every row: a text, a list, an array of numbers, or None; bytes that are not UTF-8."""
    for chunk in column.chunks:
        if _kind(chunk.type) == "vectors":
            yield from _vectors(chunk)
        else:
            for begin in range(0, len(chunk), _BLOCK):
                for value in chunk.slice(begin, _BLOCK).to_pylist():
                    yield [_decode(cell) for cell in value] if isinstance(value, list) else _decode(value)


def _decode(cell: Any) -> Any:
    try:
        return cell.decode() if isinstance(cell, bytes) else cell
    except UnicodeDecodeError:
        return cell


def _vectors(chunk: Any) -> Iterator[np.ndarray | None]:
    """Yield the numbers of every row without making Python objects of them; null numbers become NaN."""
    missing = chunk.is_null().to_numpy(zero_copy_only=False)
    width = getattr(chunk.type, "list_size", None)
    values = chunk.values.to_numpy(zero_copy_only=False)
    rows = np.arange(len(chunk) + 1, dtype=np.int64)
    starts = chunk.offsets.to_numpy() if width is None else (chunk.offset + rows) * width
    for row in range(len(chunk)):
        begin = int(starts[row])
        end = int(starts[row + 1])
        yield None if missing[row] or begin == end else values[begin:end]


def _kind(kind: Any) -> str | None:
    """Return what a column of a type holds: "texts", "vectors", "bytes", "lists" of texts or vectors, or None."""
    types = require("pyarrow.types")
    if str(kind) in ("string", "large_string", "string_view"):
        return "texts"
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "bytes"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = kind.value_type
        if types.is_floating(inner) or types.is_integer(inner):
            return "vectors"
        return "lists" if types.is_null(inner) or _kind(inner) in ("texts", "vectors") else None
    fields = {field.name: field.type for field in kind} if types.is_struct(kind) else {}
    # A field that is never present has the type null.
    is_bytes = "bytes" in fields and (types.is_null(fields["bytes"]) or _kind(fields["bytes"]) == "bytes")
    is_path = "path" not in fields or types.is_null(fields["path"]) or _kind(fields["path"]) == "texts"
    return "bytes" if is_bytes and is_path else None


def _fields(kind: Any) -> list[str]:
    return [field.name for field in kind] if str(kind).startswith("struct") else []


def stored_vectors(path: Path, name: str | None) -> list[StoredMatrix]:
    """Return where the vectors of a column lie, one matrix per file of Parquet, of a dataset on disk or of Lance.

    A column of lists cannot be mapped as a matrix. Each file is therefore copied once, as `.npy` in the cache folder.

    Args:
        path: the file or folder.
        name: the column. None: the only one that holds lists of numbers.

    Returns:
        The copies, in the column's precision; integers become float32. Files without rows are left out.

    Raises:
        UserError: if a file cannot be read, there is no such column, or its rows differ in length.

    """
    _, files = _find_files(path, None)
    column = _column_name(path, files, name, "vectors")
    # A Lance dataset is a folder, whose time of change says nothing; its version does.
    keys = [f"{column}, version {_open_lance(file).version}" if is_lance(file) else column for file in files]
    copies = [stored_copy(file, key, partial(_matrices, file, column)) for file, key in zip(files, keys, strict=True)]
    return [copy for copy in copies if copy is not None]


def _matrices(file: Path, name: str) -> Iterator[np.ndarray]:
    """Yield the vectors of a column of a file, some rows at a time. Missing numbers are NaN."""
    pyarrow = require("pyarrow")
    with readable(file, "a table"):
        if file.suffix == ".parquet":
            source = open_parquet_file(file)
            batches = _parquet_batches(file, source, pyarrow.schema([source.schema_arrow.field(name)]))
        elif is_lance(file):
            batches = _open_lance(file).to_batches(columns=[name], batch_size=1000)
        else:
            batches = _read_stream(file).select([name]).to_batches()
        for batch in filter(len, batches):
            rows = list(_cells(validate_column(file, pyarrow.Table.from_batches([batch]), name)))
            widths = {0 if row is None else len(row) for row in rows}
            if len(widths) != 1 or 0 in widths:
                raise UserError(f"{file}: rows of {name!r} have {sorted(widths)} numbers; needs one width for all rows")
            stacked = np.stack(rows)
            yield stacked if stacked.dtype.kind == "f" else stacked.astype(np.float32)


def read_texts(path: Path, name: str) -> list[str]:
    """Read the texts of a column of a Parquet file or folder, or of a dataset on disk.

    Raises:
        UserError: if the file cannot be read, or there is no such column of texts.

    """
    _, files = _find_files(path, None)
    name = _column_name(path, files, name, "texts")
    column = validate_column(path, _read_files(files, [name]), name)
    return [cell if isinstance(cell, str) else "" for cell in _cells(column)]


def _column_name(
    path: Path,
    files: Sequence[Path],
    name: str | None,
    kind: str,
) -> str:
    """Return the column of a kind that is named, or the only one."""
    with readable(path, "a table"):
        names = [field.name for field in _read_schema(files[0]) if _kind(field.type) == kind]
    if name is None and len(names) == 1:
        name = names[0]
    if name is None or name not in names:
        found = ", ".join(names) or "none"
        raise UserError(f"{path}: no column {name!r} that holds {kind}; name one as {path}:COLUMN; found: {found}")
    return name


# -- files -------------------------------------------------------------------------------------------------------------


def _find_files(path: Path, split: str | None) -> tuple[Path, list[Path]]:
    """Return a path, or the folder of its split, and its files: of Parquet, or of a dataset on disk."""
    if path.is_file() or is_lance(path):
        return path, [path]
    if (path / "dataset_dict.json").is_file():
        splits = sorted(folder.name for folder in path.iterdir() if (folder / "state.json").is_file())
        if split not in splits:
            raise UserError(f"{path}: no split {split!r} (data.split); found: {', '.join(splits)}")
        path = path / str(split)
    if is_hf(path):
        with readable(path, "a table"):
            state = parse_json(read_bytes(path / "state.json"))
            files = [_data_file(path, entry["filename"]) for entry in state["_data_files"]]
            if state.get("_indices_files"):
                raise UserError(f"{path}: holds a selection of rows; call dataset.flatten_indices() and save it again")
    else:
        every = sorted(path.rglob("*.parquet"))
        files = [file for file in every if split is None or file.name.startswith(split) or file.parent.name == split]
    if not files:
        names = ", ".join(sorted(file.name for file in path.rglob("*.parquet")))[:200]
        raise UserError(f"{path}: no files of split {split!r} (data.split); found: {names or 'nothing'}")
    return path, files


def _data_file(folder: Path, name: Any) -> Path:
    """Return a file that state.json names; it has to be a regular file in the folder of the dataset."""
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        raise ValueError(f"state.json names {str(name)[:100]!r}, which is not a file in the folder")
    return folder / name


def is_hf(path: Path) -> bool:
    """Return whether the folder was written by `save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def is_lance(path: Path) -> bool:
    """Return whether the folder is a Lance dataset, such as a table of LanceDB."""
    return (path / "_versions").is_dir()


def _open_lance(path: Path) -> Any:
    lance = require("lance", purpose=str(path))
    with readable(path, "a table"):
        return lance.dataset(str(path))


def open_parquet_file(path: Path) -> Any:
    """Open a Parquet file and read its footer.

    Raises:
        UserError: if it cannot be read.

    """
    parquet = require("pyarrow.parquet", purpose=str(path))
    with readable(path, "a table"):
        return parquet.ParquetFile(path)


def _read_schema(file: Path) -> Any:
    if file.suffix == ".parquet":
        return open_parquet_file(file).schema_arrow
    if is_lance(file):
        return _open_lance(file).schema
    with require("pyarrow.ipc", purpose=str(file)).open_stream(str(file)) as reader:
        return reader.schema


def _read_files(
    files: Sequence[Path],
    names: Sequence[str],
    mapped: bool = False,
) -> Any:
    """Return columns of all files as one table; with `mapped`, those of Parquet are copied to memory-mapped files."""
    tables = []
    for file in files:
        with readable(file, "a table"):
            if file.suffix == ".parquet":
                table = _read_parquet(file, names, mapped)
            elif is_lance(file):
                table = _open_lance(file).to_table(columns=list(names))
            else:
                table = _read_stream(file).select(names)
            tables.append(table)
    with readable(files[0].parent, "a table"):
        return require("pyarrow").concat_tables(tables)


def _read_stream(file: Path) -> Any:
    """Return the memory-mapped table of an Arrow stream, unless a small file expands to a large table."""
    pyarrow = require("pyarrow")
    expanded = 0
    batches = []
    with require("pyarrow.ipc").open_stream(pyarrow.memory_map(str(file))) as reader:
        for batch in reader:
            expanded += batch.get_total_buffer_size()  # nbytes would read offsets, which are not validated yet
            refuse_expansion(
                file,
                "the table",
                file.stat().st_size,
                expanded,
                "save it without compression",
            )
            batches.append(batch)
        return pyarrow.Table.from_batches(batches, reader.schema)


def _read_parquet(
    file: Path,
    names: Sequence[str],
    mapped: bool,
) -> Any:
    """Return columns of a Parquet file, or a memory-mapped copy of them if there is a folder for it.

    The copy is written on first use, and again when the file has changed or the copy is damaged.
    """
    pyarrow = require("pyarrow")
    source = open_parquet_file(file)
    schema = pyarrow.schema([source.schema_arrow.field(name) for name in names])
    folder = find_cache_folder(file.parent) if mapped else None
    if folder is None:
        return pyarrow.Table.from_batches(_parquet_batches(file, source, schema), schema)
    key = json.dumps([str(file.absolute()), file_stamp(file), names])
    copy = folder / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.stream"
    with contextlib.suppress(Exception):  # there is no copy yet, or it is damaged
        table = _read_stream(copy)
        for name in names:
            validate_column(copy, table, name)
        return table
    with write_atomically(copy, sync=False) as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
        for batch in _parquet_batches(file, source, schema):
            writer.write_batch(batch)
    return _read_stream(copy)


def _parquet_batches(
    file: Path,
    source: Any,
    schema: Any,
) -> Iterator[Any]:
    """Yield the rows of some columns in batches, unless a small file expands to a large table."""
    expanded = 0
    for batch in source.iter_batches(batch_size=1000, columns=schema.names):
        expanded += batch.nbytes
        refuse_expansion(
            file,
            "the table",
            file.stat().st_size,
            expanded,
            "write it as JSON lines",
        )
        yield batch.select(schema.names).cast(schema)
