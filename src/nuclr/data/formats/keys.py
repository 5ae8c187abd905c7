"""Find the keys of samples in tars, Parquet files and lists of keys, for `nuclr index`.

A key of a tar is the path of its members up to the first dot of the file name, which is `__key__` in webdataset and in
Hugging Face's reader of tars. With `key`, it is that entry of the samples' `.json` instead, such as "key" of
img2dataset. A key of a Parquet file is a text or an integer in the column `key`. A `.txt` has one key per line.
"""

import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from nuclr.data.formats.arrow import load_pyarrow
from nuclr.data.formats.columns import first_line
from nuclr.data.formats.tar_index import MAX_TEXT, TruncatedTar, iter_members, read_at
from nuclr.data.formats.tars import expand, split_parts
from nuclr.data.key_index import name_in_tar
from nuclr.errors import UserError, printable
from nuclr.files import not_utf8, parse_json
from nuclr.remote import is_url, local_copy

SUFFIXES = (".tar", ".parquet", ".txt")
KEY_COLUMNS = ("key", "__key__")
_MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)  # as webdataset and datasets split a name
_META = re.compile(r"__[^/]*__($|/)")  # webdataset does not read these members
_MAX_LINE = 2**20  # characters


def key_files(sources: Sequence[str]) -> list[Path]:
    """Return the files of sources, each a file, folder, glob or brace pattern, or several of these joined by `::`.

    Files at URLs, and the tars of a folder at a URL, are downloaded.

    Args:
        sources: such as ``["cc3m/{00000..00331}.tar"]`` or ``["cc3m", "more/*.tar"]``. Of a folder, its tars are taken,
            or if it has none, the Parquet files in it.

    Returns:
        The files, in order.

    Raises:
        UserError: if a file is missing or has an unknown format, or is named twice.

    """
    files: list[Path] = []
    for part in (part for source in sources for part in split_parts(source)):
        for path in _matches(part):
            if not path.is_dir():
                files.append(path)
            elif inside := sorted(path.glob("*.tar")) or sorted(path.rglob("*.parquet")):
                files += inside
            else:
                raise UserError(f"{path}: has no .tar or .parquet file")
    seen: set[Path] = set()
    for file in files:
        if file.suffix.lower() not in SUFFIXES:
            raise UserError(f"{file}: unknown format; keys are read from {', '.join(SUFFIXES)}")
        if not file.is_file():
            raise UserError(f"{file}: no such file")
        if file.resolve() in seen:
            raise UserError(f"{file}: named twice")
        seen.add(file.resolve())
    return files


def _matches(part: str) -> list[Path]:
    if is_url(part):
        return [local_copy(part)] if part.lower().endswith(SUFFIXES) and "{" not in part else expand(part)
    if not Path(part).exists() and glob.has_magic(part):
        found = sorted(glob.glob(part))  # noqa: PTH207 (a pattern may be absolute)
        if not found:
            raise UserError(f"{part}: no file matches")
        return list(map(Path, found))
    return [Path(part)] if Path(part).is_dir() else expand(part) if "{" in part else [Path(part)]


class KeyReader:
    """Read the keys of files. Call it to iterate over (key, where it was found), once per sample.

    Args:
        files: from `key_files`.
        key: of tars, the entry of the `.json` members that holds the key; by default it is the name of the members. Of
            Parquet files, the column.
        with_tar: put the name of the tar before every key.

    Attributes:
        count: the number of keys of the last pass.
        truncated: the truncated tars of the last pass. Their samples up to the end of the file have been read.

    Raises:
        UserError: while iterating, if a file cannot be read, or a sample has no key.

    """

    def __init__(self, files: Sequence[Path], key: str | None = None, with_tar: bool = False) -> None:
        self._files, self._key, self._with_tar = files, key, with_tar
        self.count, self.truncated = 0, list[Path]()

    def __call__(self) -> Iterator[tuple[str, str]]:
        """Yield (key, where it was found) for every sample."""
        self.count, self.truncated = 0, []
        for file in self._files:
            for entry in self._read(file):
                self.count += 1
                yield entry

    def _read(self, file: Path) -> Iterator[tuple[str, str]]:
        suffix = file.suffix.lower()
        if suffix == ".tar":
            try:
                for name in _tar_keys(file, self._key):
                    yield name_in_tar(str(file), name) if self._with_tar else name, str(file)
            except TruncatedTar:
                self.truncated.append(file)
        elif self._with_tar:
            raise UserError(f"{file}: --with-tar is for tars only")
        else:
            yield from _parquet_keys(file, self._key) if suffix == ".parquet" else _lines(file)


def _tar_keys(tar: Path, entry: str | None) -> Iterator[str]:
    with tar.open("rb") as file:
        descriptor, last, has_key = file.fileno(), "", True

        def check_previous() -> None:
            if not has_key:
                raise UserError(f"{tar}: sample {_shown(last)} has no .json with an entry {entry!r} (--key)")

        for name, (block, size), _ in iter_members(descriptor, tar):
            match = None if _META.match(name) else _MEMBER.fullmatch(name)
            if match is None:
                continue
            sample, suffix = match[1], match[2].lower()
            if sample != last:
                check_previous()
                last, has_key = sample, entry is None
                if entry is None:
                    yield sample
            if suffix == "json" and entry is not None and not has_key:
                if size > MAX_TEXT:
                    raise UserError(f"{tar}: {_shown(name)} has more than {MAX_TEXT // 2**20} MiB")
                yield _entry(tar, name, read_at(descriptor, block, size), entry)
                has_key = True
        check_previous()


def _entry(tar: Path, name: str, data: bytes, entry: str) -> str:
    try:
        content = parse_json(data)
    except ValueError:
        raise UserError(f"{tar}: {_shown(name)} is not JSON") from None
    value = content.get(entry) if isinstance(content, dict) else None
    if isinstance(value, bool) or not isinstance(value, str | int):
        entries = ", ".join(map(str, content)) if isinstance(content, dict) else "none"
        raise UserError(
            f"{tar}: {_shown(name)} has no entry {entry!r} with a text or an integer (--key); it has: "
            f"{printable(entries[:200])}"
        )
    return str(value)


def _parquet_keys(path: Path, column: str | None) -> Iterator[tuple[str, str]]:
    pyarrow = load_pyarrow(path)
    row = 0
    try:
        source = pyarrow.parquet.ParquetFile(path)
        name = _column(path, source.schema_arrow.names, column)
        kind = source.schema_arrow.field(name).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_integer(kind) or str(kind) in ("string", "large_string", "string_view")):
            raise UserError(f"{path}: column {name!r} holds {kind}; keys are texts or integers (--key)")
        for batch in source.iter_batches(batch_size=10_000, columns=[name]):
            for value in batch.column(0).to_pylist():
                if value is None:
                    raise UserError(f"{path}: row {row} of column {name!r} is empty; every sample needs a key")
                yield str(value), f"row {row} of {path}"
                row += 1
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many types on damaged files
        raise UserError(f"{path}: cannot be read as Parquet ({first_line(error)})") from None


def _column(path: Path, names: list[str], column: str | None) -> str:
    usual = [name for name in KEY_COLUMNS if name in names] or (names if len(names) == 1 else [])
    name = column if column is not None else usual[0] if usual else None
    if name is None or name not in names:
        problem = "name the column of the keys with --key" if column is None else f"no column {column!r} (--key)"
        raise UserError(f"{path}: {problem}; it has: {printable(', '.join(names)[:500])}")
    return name


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            number = 0
            while line := file.readline(_MAX_LINE):
                number += 1
                name = line.strip()
                if not name or len(line) == _MAX_LINE:
                    raise UserError(f"{path}: line {number} is {'empty' if not name else 'too long'}; one key per line")
                yield name, f"line {number} of {path}"
    except UnicodeDecodeError:
        raise not_utf8(path) from None


def _shown(name: str) -> str:
    return printable(repr(name[:200]))
