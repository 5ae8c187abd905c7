"""Right answers of a search: known from the vectors, read from a file of row numbers, and divided for tuning."""

import re
from pathlib import Path

import numpy as np

from nuclr.errors import UserError
from nuclr.files import read_lines, read_npy
from nuclr.runs.vectors import Vectors

# Columns of a text file without a header: with two numbers per line, and with four (TREC's qrels).
PAIRS, QRELS = {"query": 0, "item": 1}, {"query": 0, "item": 2, "relevance": 3}
COLUMNS = {
    "query": ("q", "query", "queries", "topic", "question"),
    "item": ("item", "items", "d", "doc", "docs", "document", "corpus", "gallery", "passage", "p", "answer"),
    "relevance": ("relevance", "rel", "score", "label"),
}


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
    """Read rows (query, right answer) from a `.npy` file or from text.

    Args:
        path: the file. An array is (n, 2), or (queries,) with one right answer per query. Text has lines of two
            numbers, or of four as in TREC's qrels: query, anything, item, relevance; lines with a relevance of 0 or
            less do not count. Numbers are separated by a comma, a tab or spaces. A first line may name the columns,
            which may then have any order.
        queries: number of queries.
        gallery: number of items in the gallery.

    Returns:
        (n, 2) int64.

    Raises:
        UserError: if the file cannot be read, or a row does not exist.

    """
    links = _read_array(path, queries) if path.suffix == ".npy" else _read_text(path)
    for column, size, name in ((0, queries, "query"), (1, gallery, "item")):
        wrong = (links[:, column] < 0) | (links[:, column] >= size)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise UserError(
                f"{path}: row {row} names {name} {links[row, column]}; they are numbered from 0 to {size - 1}"
            )
    return links


def _read_array(path: Path, queries: int) -> np.ndarray:
    array = read_npy(path)
    whole = array.dtype.kind in "iu" or (array.dtype.kind == "f" and bool((array == np.floor(array)).all()))
    if array.ndim == 1 and whole and len(array) == queries:
        array = np.stack([np.arange(queries), array], axis=1)
    if array.ndim != 2 or array.shape[1] != 2 or not whole or not len(array):
        raise UserError(
            f"{path}: {array.dtype} of shape {array.shape}; needs whole numbers (n, 2), rows (query, item), "
            f"or ({queries},), the item of each query"
        )
    return (array.clip(-1, 2**62) if array.dtype.kind == "f" else array).astype(np.int64)


def _read_text(path: Path) -> np.ndarray:
    columns: dict[str, int] | None = None
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        cells = line.replace(",", " ").replace('"', "").split()
        if number == 1 and any(_whole(cell) is None for cell in cells):
            columns = _columns(cells)
            continue
        at = columns or {2: PAIRS, 4: QRELS}.get(len(cells), {})
        values = {name: _whole(cells[column]) for name, column in at.items() if column < len(cells)}
        query, item, relevance = values.get("query"), values.get("item"), values.get("relevance", 1)
        if query is None or item is None or relevance is None:
            raise UserError(
                f"{path}: line {number} does not have two whole numbers, query and item, or four as in qrels files"
            )
        if relevance > 0:
            rows.append((query, item))
    if not rows:
        raise UserError(f"{path}: has no rows (query, item)")
    return np.array(rows).clip(-1, 2**62).astype(np.int64)


def _columns(header: list[str]) -> dict[str, int] | None:
    """Return where a header has its columns; None if it does not name them."""
    letters = [re.sub(r"[^a-z]", "", name.lower()) for name in header]
    kinds = [re.sub(r"(ids?|rows?|index|number)$", "", name) for name in letters]  # "query-id" is "query"
    found = {role: kinds.index(kind) for role, names in COLUMNS.items() for kind in kinds[::-1] if kind in names}
    return found if {"query", "item"} <= found.keys() else None


def _whole(cell: str) -> int | None:
    """Return a whole number, also one that is written as 3.0 or 3e0; None if it is not one."""
    try:
        return int(cell)
    except ValueError:
        pass
    try:
        return int(float(cell)) if float(cell).is_integer() else None
    except ValueError:
        return None


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
