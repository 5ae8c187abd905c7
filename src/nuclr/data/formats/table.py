"""Pairs in a CSV or TSV file with a header: open_clip's `filepath` and `title`, or columns named by the user.

The separator is found from the header, whatever the file's suffix. Each row has one caption. Rows with the same image
name are pairs of one image, wherever they are in the file.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from nuclr.data.formats.listed import X_COLUMNS, Y_COLUMNS, ListedPairs, choose_column
from nuclr.data.modalities.image import SUFFIXES
from nuclr.errors import UserError

_LARGEST_CELL = 2**30  # characters
SEPARATORS = ("\t", ",", ";", "|")
Row = tuple[str, str, str | None]


def open_table(
    path: Path,
    root: Path | None = None,
    x_key: str | None = None,
    y_key: str | None = None,
    allow_outside: bool = False,
) -> ListedPairs:
    """Open a table.

    A row with too few or too many cells is a bad sample.

    Args:
        path: the file.
        root: the folder that image names are relative to.
        x_key: the column of the image names.
        y_key: the column of the captions.
        allow_outside: read images outside of the root as well.

    Raises:
        UserError: if the file is not a table with these columns.

    """
    columns: dict[str, str] = {}
    pairs = ListedPairs(_rows(path, x_key, y_key, columns), path, root, allow_outside)
    pairs.x_key, pairs.y_key = columns.get("x"), columns.get("y")
    return pairs


def _rows(path: Path, x_key: str | None, y_key: str | None, columns: dict[str, str]) -> Iterator[Row]:
    """Yield image, caption and what is wrong with the row; `columns` receives the names of both columns."""
    reader = None
    limit = csv.field_size_limit(_LARGEST_CELL)  # a caption that is too long is a bad sample, not the end of the table
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator = _separator(file.readline(), (x_key, y_key))
            file.seek(0)
            reader = csv.reader(file, delimiter=separator)
            header = next(reader, [])
            _check_header(path, header)
            columns["x"] = choose_column(header, "x", x_key, path)
            columns["y"] = choose_column(header, "y", y_key, path)
            image, caption = header.index(columns["x"]), header.index(columns["y"])
            for cells in reader:
                if len(cells) == len(header):
                    yield cells[image], cells[caption], None
                elif cells:
                    name = cells[image] if image < len(cells) else ""
                    yield name, "", f"line {reader.line_num} has {len(cells)} cells, the header has {len(header)}"
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
    expected = {key for key in keys if key} or {*X_COLUMNS, *Y_COLUMNS}

    def quality(separator: str) -> tuple[int, int]:
        cells = next(csv.reader([header], delimiter=separator), [])
        return len(expected & set(cells)), len(cells)

    return max(SEPARATORS, key=quality)


def _check_header(path: Path, header: list[str]) -> None:
    if not header:
        raise UserError(f"{path}: empty; needs a header such as filepath,title and one pair per line")
    names = [cell for cell in header if cell.lower().endswith(SUFFIXES)]
    if names:
        raise UserError(f"{path}: line 1 names an image ({names[0]}); put a header such as filepath,title before it")
