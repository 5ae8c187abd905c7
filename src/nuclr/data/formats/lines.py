"""Text files of untrusted content, line by line, compressed or not, and lines of JSON."""

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from nuclr.data.pairs import BadSample
from nuclr.errors import UserError, first_line
from nuclr.files import not_utf8, parse_json, refuse_expansion

LONGEST_LINE = 2**26  # characters


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[Iterator[str]]:
    """Open a text file, or a compressed one (`.gz`), and yield an iterator over its lines.

    Raises:
        UserError: if it cannot be read, is not UTF-8, has a line of more than 64 million characters, or expands from
            little to very much.

    """
    try:
        is_compressed = path.suffix.lower() == ".gz"
        options: dict[str, Any] = {"mode": "rt", "encoding": "utf-8-sig", "newline": ""}
        opened: Any = gzip.open(path, **options) if is_compressed else path.open(**options)  # noqa: SIM115
        with opened as file:
            yield _lines(path, file, path.stat().st_size if is_compressed else None)
    except UnicodeDecodeError:
        raise not_utf8(path) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None


def _lines(
    path: Path,
    file: IO[str],
    compressed: int | None = None,
) -> Iterator[str]:
    expanded = 0
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise UserError(f"{path}: a line of more than {LONGEST_LINE:,} characters")
        if compressed is not None:
            expanded += len(line)
            refuse_expansion(
                path,
                "the text",
                compressed,
                expanded,
                "unpack it first",
            )
        yield line


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the content of each line that is not empty.

    Raises:
        UserError: as `open_text`.

    """
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the entry of each line; a BadSample for JSON that Python refuses to parse.

    Raises:
        UserError: if a line is not JSON, or as `open_text`.

    """
    for number, line in numbered_lines(path):
        try:
            yield number, parse_json(line)
        except json.JSONDecodeError as error:
            if error.doc:
                raise UserError(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from None
            yield number, BadSample(f"line {number}: {error.msg}")  # nested too deep, or a number that is too long
