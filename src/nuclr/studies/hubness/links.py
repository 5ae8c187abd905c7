"""Right answers of a search, from a file of row numbers."""

from pathlib import Path

import numpy as np

from nuclr.errors import UserError
from nuclr.files import read_npy, read_text


def read_links(path: Path, queries: int, gallery: int) -> np.ndarray:
    """Read rows (query, right answer) from a `.npy` file, or from text with two numbers per line.

    Args:
        path: the file. In text, the numbers are separated by a comma, a tab or spaces, and a first line may name them.
        queries: number of queries.
        gallery: number of items in the gallery.

    Returns:
        (n, 2) int64.

    Raises:
        UserError: if the file cannot be read, or a row does not exist.

    """
    if path.suffix == ".npy":
        links = read_npy(path)
        if links.ndim != 2 or links.shape[1] != 2 or links.dtype.kind not in "iu" or not len(links):
            raise UserError(f"{path}: {links.dtype} of shape {links.shape}; needs integers (n, 2), rows (query, item)")
    else:
        rows = []
        for number, line in enumerate(read_text(path).splitlines(), start=1):
            cells = line.replace(",", " ").split()
            try:
                query, item = (int(cell) for cell in cells)
            except ValueError:
                if number == 1:
                    continue
                raise UserError(f"{path}: line {number} does not have two whole numbers, query and item") from None
            rows.append((query, item))
        if not rows:
            raise UserError(f"{path}: has no rows (query, item)")
        links = np.array(rows)
    for column, size, name in ((0, queries, "query"), (1, gallery, "item")):
        wrong = (links[:, column] < 0) | (links[:, column] >= size)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise UserError(
                f"{path}: row {row} names {name} {links[row, column]}; they are numbered from 0 to {size - 1}"
            )
    return links.astype(np.int64)
