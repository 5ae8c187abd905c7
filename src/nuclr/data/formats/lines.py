"""Text files of untrusted content, line by line, compressed or not, and lines of JSON."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nuclr.data.pairs import BadSample
from nuclr.errors import UserError, first_line
from nuclr.files import not_utf8, parse_json, refuse_expansion

LONGEST_LINE = 2**26  # characters


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, or of a compressed one (`.gz`), with their ends.

    Raises:
        UserError: if it cannot be read, is not UTF-8, has a line of more than 64 million characters, or expands from
            little to very much.

    """
    is_compressed = path.suffix.lower() == ".gz"
    expanded = 0
    try:
        stored = path.stat().st_size
        options: dict[str, Any] = {"mode": "rt", "encoding": "utf-8-sig", "newline": ""}
        opened: Any = gzip.open(path, **options) if is_compressed else path.open(**options)  # noqa: SIM115
        with opened as file:
            while line := file.readline(LONGEST_LINE):
                if len(line) == LONGEST_LINE:
                    raise UserError(f"{path}: a line of more than {LONGEST_LINE:,} characters")
                if is_compressed:
                    expanded += len(line)
                    refuse_expansion(path, "the text", stored, expanded, "unpack it first")
                yield line
    except UnicodeDecodeError:
        raise not_utf8(path) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the content of each line that is not empty.

    Raises:
        UserError: as `text_lines`.

    """
    for number, line in enumerate(text_lines(path), start=1):
        if line.strip():
            yield number, line


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the entry of each line; a BadSample for JSON that Python refuses to parse.

    Raises:
        UserError: if a line is not JSON, or as `text_lines`.

    """
    for number, line in numbered_lines(path):
        try:
            yield number, parse_json(line)
        except json.JSONDecodeError as error:
            if error.doc:
                raise UserError(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from None
            yield number, BadSample(f"line {number}: {error.msg}")  # nested too deep, or a number that is too long
