"""Pairs in a Parquet file, or in a folder of them.

Parquet has no random access: where it holds the images' bytes, it is rewritten once, as an Arrow file that can be
memory-mapped, into the cache folder. Where it holds file names, it is a caption list.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from nuclr.data.formats.arrow import ArrowPairs, choose_columns, first_line, holds_names, load_pyarrow, open_arrow
from nuclr.data.formats.listed import ListedPairs
from nuclr.errors import UserError
from nuclr.files import file_stamp, find_cache_folder


def open_parquet(
    path: Path,
    root: Path | None = None,
    image_key: str | None = None,
    caption_key: str | None = None,
    split: str | None = None,
) -> ListedPairs | ArrowPairs:
    """A Parquet file, or a folder of them in order of their names; `split` keeps files whose name begins with it."""
    pyarrow = load_pyarrow(path)
    files = [path] if path.is_file() else _files_of_split(path, sorted(path.rglob("*.parquet")), split)
    try:
        schemas = [pyarrow.parquet.read_schema(file) for file in files]
        for file, schema in zip(files, schemas, strict=True):
            if schema.names != schemas[0].names:
                raise UserError(
                    f"{file}: columns {', '.join(schema.names)}; {files[0].name} has {', '.join(schemas[0].names)}"
                )
        image, caption = choose_columns(path, schemas[0], image_key, caption_key)
        read = _read if holds_names(schemas[0].field(image).type) else _mapped
        table = pyarrow.concat_tables([read(file, [image, caption]) for file in files])
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({first_line(error)})") from None
    return open_arrow(path, files, table, image, caption, root)


def _read(file: Path, names: list[str]) -> Any:
    return load_pyarrow(file).parquet.ParquetFile(file).read(columns=names)


def _mapped(file: Path, names: list[str]) -> Any:
    """A memory-mapped copy of a Parquet file's columns, made on first use and again when the file changes."""
    pyarrow = load_pyarrow(file)
    source = pyarrow.parquet.ParquetFile(file)
    folder = find_cache_folder(file.parent)
    if folder is None:
        return source.read(columns=names)
    key = json.dumps([str(file.absolute()), file_stamp(file), names])
    copy = folder / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.arrow"
    if not copy.is_file():
        temporary = copy.with_suffix(f".{os.getpid()}.tmp")
        try:
            schema = pyarrow.schema([source.schema_arrow.field(name) for name in names])
            with pyarrow.OSFile(str(temporary), "wb") as sink, pyarrow.ipc.new_file(sink, schema) as writer:
                for batch in source.iter_batches(batch_size=1000, columns=names):
                    writer.write_batch(batch.select(names).cast(schema))
            temporary.replace(copy)
        finally:
            temporary.unlink(missing_ok=True)
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(copy))).read_all()


def _files_of_split(path: Path, files: list[Path], split: str | None) -> list[Path]:
    if not files:
        raise UserError(f"{path}: no .parquet file in it")
    kept = [file for file in files if split is None or file.name.startswith(split) or file.parent.name == split]
    if not kept:
        raise UserError(f"{path}: no .parquet file of split {split!r}; found: {', '.join(f.name for f in files[:10])}")
    return kept
