"""Pairs in a CSV or TSV file with a header: open_clip's `filepath` and `title`, `question` and `answer`, or columns
named by the user.

The separator is found from the header, whatever the file's suffix. Each row is one pair. Rows with equal cells in a
column share their x or y, wherever they are in the file. A vector is written as a JSON list: `"[0.5, 1, 2]"`.
"""

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from nuclr.data.formats.choose import CAPTION_COLUMNS, IMAGE_COLUMNS, TEXT_COLUMNS, Choice, choose_columns
from nuclr.data.formats.listed import ListedPairs, Row, open_listed
from nuclr.data.modalities.image import SUFFIXES
from nuclr.errors import UserError

_LARGEST_CELL = 2**30  # characters
SEPARATORS = ("\t", ",", ";", "|")


def open_table(
    path: Path, root: Path | None = None, choice: Choice | None = None, allow_outside: bool = False
) -> ListedPairs:
    """Open a table.

    A row with too few or too many cells is a bad sample.

    Args:
        path: the file.
        root: the folder that names of files are relative to.
        choice: the settings of both sides.
        allow_outside: read files outside of the root as well.

    Raises:
        UserError: if the file is not a table with these columns.

    """
    choice = choice or Choice()
    rows = _rows(path, choice)
    x, y, _, _ = next(rows)
    return open_listed(rows, path, root, allow_outside, choice, (x, y))


def _rows(path: Path, choice: Choice) -> Iterator[Row]:
    """Yield the names of both columns, and then the cells of both columns in every row."""
    reader = None
    limit = csv.field_size_limit(_LARGEST_CELL)  # a text that is too long is a bad sample, not the end of the table
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator = _separator(file.readline(), (choice.x.key, choice.y.key))
            file.seek(0)
            reader = csv.reader(file, delimiter=separator)
            header = next(reader, [])
            _check_header(path, header)
            columns = choose_columns(header, choice, path)
            yield *columns, None, 1
            x, y = (header.index(column) for column in columns)
            for cells in reader:
                if len(cells) == len(header):
                    yield cells[x], cells[y], None, reader.line_num
                elif cells:
                    reason = f"line {reader.line_num} has {len(cells)} cells, the header has {len(header)}"
                    yield cells[x] if x < len(cells) else "", "", reason, reader.line_num
    except csv.Error as error:
        line = reader.line_num if reader is not None else 1
        raise UserError(f"{path}, line {line}: cannot be read as a table ({error})") from None
    except UnicodeDecodeError:
        line = reader.line_num if reader is not None else 0
        raise UserError(f"{path}, after line {line}: not UTF-8 text") from None
    finally:
        csv.field_size_limit(limit)


def _separator(header: str, keys: tuple[str | None, str | None]) -> str:
    """Return the separator that gives most of the expected columns, then the most columns."""
    usual = {*IMAGE_COLUMNS, *CAPTION_COLUMNS, *(name for names in TEXT_COLUMNS for name in chain(*names))}
    expected = {key.lower() for key in keys if key} or usual

    def quality(separator: str) -> tuple[int, int]:
        cells = next(csv.reader([header], delimiter=separator), [])
        return len(expected & {cell.lower() for cell in cells}), len(cells)

    return max(SEPARATORS, key=quality)


def _check_header(path: Path, header: list[str]) -> None:
    if not header:
        raise UserError(f"{path}: empty; needs a header with the names of the columns and one pair per line")
    names = [cell for cell in header if cell.lower().endswith(SUFFIXES)]
    if names:
        raise UserError(f"{path}: line 1 names an image ({names[0]}); put a header such as filepath,title before it")
