"""Single searches of a report, plain and corrected: what the page of `nuclr hubness` lets its reader try."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nuclr.arrays import Rows, evenly_spaced
from nuclr.data.vectors import Vectors
from nuclr.popularity import Hubness
from nuclr.popularity.bank import distinct_rows
from nuclr.studies.items.rows import Item

QUERIES = 2000
TEXT = 1_000_000  # characters of all names, so that the page stays below 5 MB in every script


@dataclass(frozen=True)
class Searches:
    """Queries, and what each finds before and after the correction.

    Attributes:
        queries: those from whose lists the correction removes the largest hubs come first.
        items: what they find.
        counts: of each item, N_k of all counted queries, plain and corrected.
        plain: per query, the positions in `items` of what it finds, best first.
        corrected: the same after the correction.
        right: per query, the positions of its right answers in these lists; empty if none are known.

    """

    queries: list[Item]
    items: list[Item]
    counts: list[tuple[int, int]]
    plain: list[list[int]]
    corrected: list[list[int]]
    right: list[list[int]]

    @classmethod
    def of(
        cls,
        queries: Vectors,
        gallery: Vectors,
        counted: np.ndarray,
        asked: Rows,
        results: tuple[Hubness, Hubness],
        links: np.ndarray,
    ) -> "Searches":
        """Return an evenly spaced part of the counted queries, as large as a page can hold.

        Args:
            queries: all queries.
            gallery: the items.
            counted: (n,), numbers of the counted queries.
            asked: (n, d), their features.
            results: what these find by plain and by corrected ranking.
            links: rows (counted query, right answer), (m, 2).

        """
        plain, corrected = (result.found.numpy() for result in results)
        counts = [result.counts.tolist() for result in results]
        distinct = distinct_rows(asked).numpy()
        chosen = distinct[evenly_spaced(len(distinct), QUERIES)]
        while True:
            rows = np.unique(np.stack([plain[chosen], corrected[chosen]]))
            if len(chosen) < 2 or _length(queries, counted[chosen]) + _length(gallery, rows) <= TEXT:
                break
            chosen = chosen[::2]
        removed = [max((counts[0][row] for row in _without(plain[q], corrected[q])), default=0) for q in chosen]
        chosen = chosen[np.argsort(removed, kind="stable")[::-1]]
        answers: dict[int, list[int]] = {}
        for query, item in links[np.isin(links[:, 1], rows)].tolist():
            answers.setdefault(query, []).append(int(np.searchsorted(rows, item)))
        return cls(
            queries=[Item.of(queries, int(counted[query])) for query in chosen],
            items=[Item.of(gallery, row) for row in rows.tolist()],
            counts=[(counts[0][row], counts[1][row]) for row in rows],
            plain=np.searchsorted(rows, plain[chosen]).tolist(),
            corrected=np.searchsorted(rows, corrected[chosen]).tolist(),
            right=[answers.get(query, []) for query in chosen.tolist()],
        )


def _length(vectors: Vectors, rows: np.ndarray) -> int:
    """Return the number of characters in the names of rows."""
    return 0 if vectors.ids is None else sum(len(vectors.ids[row]) for row in rows.tolist())


def _without(items: Sequence[int], others: Sequence[int]) -> set[int]:
    return set(items) - set(others)
