"""Pairs in a CSV or TSV file with a header: open_clip's `filepath` and `title`, `question` and `answer`, or columns
named by the user. The file may be compressed (`.csv.gz`).

The separator is found from the header, whatever the file's suffix. Each row is one pair. Rows with equal cells in a
column share their x or y, wherever they are in the file. A vector is written as a JSON list: `"[0.5, 1, 2]"`.
"""

import csv
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from nuclr.data.formats.choose import CAPTION_COLUMNS, IMAGE_COLUMNS, TEXT_COLUMNS, Request, choose_columns, find_column
from nuclr.data.formats.columns import ListedPairs, Row, open_listed
from nuclr.data.formats.lines import text_lines
from nuclr.data.modalities.image import SUFFIXES
from nuclr.errors import UserError

_LARGEST_CELL = 2**30  # characters
_END = "\x1eend"  # a last row, which is missing if the end of the file is inside of quotes
SEPARATORS = ("\t", ",", ";", "|")
TABLES = (".csv", ".tsv")


def open_table(request: Request) -> ListedPairs:
    """Open a table.

    A row with too few or too many cells is a bad sample.

    Raises:
        UserError: if the file is not a table with these columns.

    """
    path = request.path
    lines = read_cells(path, [side.key for side in request.sides.values() if side.key])
    _, header = next(lines)
    names = [cell for cell in header if cell.lower().endswith(SUFFIXES)]
    if names:
        raise UserError(f"{path}: line 1 names an image ({names[0]}); put a header such as image,caption before it")
    columns = choose_columns(header, request)
    return open_listed(request, columns, _rows(lines, header, columns["x"], columns["y"]))


def _rows(
    lines: Iterator[tuple[int, list[str]]],
    header: list[str],
    x_key: str,
    y_key: str,
) -> Iterator[Row]:
    x = header.index(x_key)
    y = header.index(y_key)
    for line, cells in lines:
        if len(cells) == len(header):
            yield Row(cells[x], cells[y], line)
        else:
            problem = f"line {line} has {len(cells)} cells, the header has {len(header)}"
            yield Row(cells[x] if x < len(cells) else "", "", line, problem)


def read_cells(path: Path, expected: Sequence[str] = ()) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of the header, and then of every row that is not empty.

    Args:
        path: the file.
        expected: columns by which the separator is recognized. Default: the usual names of columns of pairs.

    Raises:
        UserError: if the file is not a table with a header, or a quote is not closed.

    """
    limit = csv.field_size_limit(_LARGEST_CELL)  # a text that is too long is a bad sample, not the end of the table
    started = 1  # the line in which the row starts
    try:
        file = text_lines(path)
        first = next(file, "")
        reader = csv.reader(chain([first], file, [_END]), delimiter=_separator(first, expected))
        header = next(reader)
        if header in ([], [_END]):
            raise UserError(f"{path}: empty; needs a header with the names of the columns and one row per line")
        yield 1, header
        started = reader.line_num + 1
        for cells in reader:
            if cells == [_END]:
                return
            if cells and cells[-1].endswith(_END):
                raise UserError(f"{path}, line {started}: a quote that opens in this row is never closed")
            if cells:
                yield reader.line_num, cells
            started = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {started}: cannot be read as a table ({error})") from None
    finally:
        csv.field_size_limit(limit)


def read_column(path: Path, name: str) -> list[str]:
    """Return the cells of a column.

    Raises:
        UserError: if there is no such column, or a row has another number of cells than the header.

    """
    rows = read_cells(path, [name])
    _, header = next(rows)
    column = find_column(header, (name, name.lower()))
    if column is None:
        raise UserError(f"{path}: no column {name!r}; found: {', '.join(map(repr, header))}")
    position = header.index(column)
    cells = []
    for line, row in rows:
        if len(row) != len(header):
            raise UserError(f"{path}, line {line}: {len(row)} cells, but the header has {len(header)}")
        cells.append(row[position])
    return cells


def _separator(header: str, keys: Sequence[str]) -> str:
    """Return the separator that gives most of the expected columns, then the most columns."""
    usual = {*IMAGE_COLUMNS, *CAPTION_COLUMNS, *(name for names in TEXT_COLUMNS for name in chain(*names))}
    expected = {key.lower() for key in keys} or usual

    def quality(separator: str) -> tuple[int, int]:
        cells = next(csv.reader([header], delimiter=separator), [])
        return len(expected & {cell.lower() for cell in cells}), len(cells)

    return max(SEPARATORS, key=quality)
