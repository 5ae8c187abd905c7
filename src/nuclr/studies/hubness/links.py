"""Right answers of a search: known from the vectors, read from a file of row numbers, and divided for tuning."""

from pathlib import Path

import numpy as np

from nuclr.errors import UserError
from nuclr.files import read_lines, read_npy
from nuclr.runs.vectors import Vectors


def find_links(queries: Vectors, gallery: Vectors) -> np.ndarray | None:
    """Return which rows belong together, (n, 2) of (query, right answer), if both are sides of one file or run."""
    if queries.path.resolve() != gallery.path.resolve():
        return None
    if queries.pairs is not None:
        if queries.column == gallery.column:
            return None
        pairs = queries.pairs.links
        return (pairs if queries.column == "x" else pairs.flip(1)).numpy()
    if queries.group is None or gallery.group is None:
        return None
    order = np.argsort(gallery.group, kind="stable")
    start, stop = (np.searchsorted(gallery.group[order], queries.group, side) for side in ("left", "right"))
    query = np.repeat(np.arange(len(queries)), stop - start)
    offset = np.arange(len(query)) - np.repeat(np.cumsum(stop - start) - (stop - start), stop - start)
    links = np.stack([query, order[np.repeat(start, stop - start) + offset]], axis=1)
    if queries.is_same(gallery):
        links = links[links[:, 0] != links[:, 1]]
    return links if len(links) else None


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
        for number, line in enumerate(read_lines(path), start=1):
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


def tuning_halves(rows: np.ndarray, links: np.ndarray | None, one_set: bool) -> tuple[np.ndarray, np.ndarray]:
    """Divide queries into those that choose the settings and those that are counted.

    Queries that share a right answer, such as captions of the same image, are in the same half. Queries without a right
    answer are counted.

    Args:
        rows: numbers of the queries.
        links: (n, 2), rows (query, right answer).
        one_set: whether the queries are the items.

    Returns:
        Both halves, in ascending order.

    Raises:
        UserError: if no right answers are known, or all queries belong together.

    """
    if links is None:
        raise UserError("--tune needs right answers; name a file of rows (query, item) with --links")
    known = links[np.isin(links[:, 0], rows)]
    groups = _groups(known, one_set)
    labeled, first = np.unique(known[:, 0], return_index=True)
    distinct, number = np.unique(groups[first], return_inverse=True)
    if len(distinct) < 2:
        raise UserError("--tune needs at least two queries with right answers of their own; give more pairs")
    chosen_on = labeled[number % 2 == 0]
    return chosen_on, np.setdiff1d(rows, chosen_on)


def _groups(links: np.ndarray, one_set: bool) -> np.ndarray:
    """Return a number per link, equal for links that are connected by queries or items."""
    query, item = links[:, 0], links[:, 1] if one_set else links[:, 1] + int(links[:, 0].max(initial=0)) + 1
    label = np.arange(max(query.max(initial=0), item.max(initial=0)) + 1)
    while True:
        lowest = np.minimum(label[query], label[item])
        before = label.copy()
        np.minimum.at(label, query, lowest)
        np.minimum.at(label, item, lowest)
        if np.array_equal(label, before):
            return np.asarray(label[query])
