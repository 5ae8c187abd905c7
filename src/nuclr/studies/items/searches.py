"""Single searches of a report, plain and corrected: what the page of `nuclr hubness` lets its reader try."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from nuclr.arrays import Rows, evenly_spaced
from nuclr.data.vectors import Vectors
from nuclr.popularity import Hubness
from nuclr.popularity.bank import distinct_rows
from nuclr.studies.items.rows import Item

# A page with all of these, and its pictures, stays below 5 MB.
QUERIES = 2000
RESULTS = 20_000  # of all queries
TEXT = 1_700_000  # bytes of all names
LONGEST = 1001  # characters of a name; pages show 1000, and an ellipsis if there are more


@dataclass(frozen=True)
class Searches:
    """Queries, and what each finds before and after the correction.

    Attributes:
        queries: first those whose first result becomes right or wrong, then those from whose lists the correction
            removes the largest hubs.
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
        """Return as many of the counted queries as a page can hold: those won or lost, and evenly spaced others.

        Args:
            queries: all queries.
            gallery: the items.
            counted: (n,), numbers of the counted queries.
            asked: (n, d), their features.
            results: what these find by plain and by corrected ranking.
            links: rows (counted query, right answer), (m, 2).

        """
        plain, corrected = (result.found.numpy() for result in results)
        counts = np.stack([result.counts.numpy() for result in results], axis=1)
        changed = _is_right(plain[:, 0], links) != _is_right(corrected[:, 0], links)
        chosen = distinct_rows(asked).numpy()
        chosen = np.concatenate([chosen[changed[chosen]], chosen[~changed[chosen]]])
        size = max(1, min(QUERIES, RESULTS // plain.shape[1]))
        while True:
            first = min(int(changed[chosen].sum()), size)
            others = evenly_spaced(len(chosen) - first, size - first).numpy()
            chosen = np.concatenate([chosen[:first], chosen[first:][others]])
            rows = np.unique([plain[chosen], corrected[chosen]])
            shown = [Item.of(queries, int(counted[query])) for query in chosen]
            items = [Item.of(gallery, row) for row in rows.tolist()]
            if size == 1 or _bytes(item.name for item in [*shown, *items]) <= TEXT:
                break
            size = size * 4 // 5
        removed = [max(counts[np.setdiff1d(plain[query], corrected[query]), 0], default=0) for query in chosen]
        order = np.lexsort([removed, changed[chosen]])[::-1]
        chosen = chosen[order]
        right: dict[int, list[int]] = {}
        for query, item in links[np.isin(links[:, 1], rows)].tolist():
            right.setdefault(query, []).append(int(np.searchsorted(rows, item)))
        return cls(
            queries=[_shorten(shown[at]) for at in order],
            items=[_shorten(item) for item in items],
            counts=[(before, after) for before, after in counts[rows].tolist()],
            plain=np.searchsorted(rows, plain[chosen]).tolist(),
            corrected=np.searchsorted(rows, corrected[chosen]).tolist(),
            right=[right.get(query, []) for query in chosen.tolist()],
        )

    def replacement(self, row: int) -> tuple[Item, Item] | None:
        """Return a query that no longer finds an item, and the first item that it finds instead."""
        rows = [item.row for item in self.items]
        for query, before, after in zip(self.queries, self.plain, self.corrected, strict=True):
            new = [at for at in after if at not in before]
            if new and row in {rows[at] for at in set(before).difference(after)}:
                return query, self.items[new[0]]
        return None


def _is_right(found: np.ndarray, links: np.ndarray) -> np.ndarray:
    """Return whether what each query finds is a right answer, (n,)."""
    largest = 1 + max(int(found.max()), int(links[:, 1].max(initial=0)))
    return np.isin(np.arange(len(found)) * largest + found, links[:, 0] * largest + links[:, 1])


def _shorten(item: Item) -> Item:
    return item if item.name is None else replace(item, name=item.name[:LONGEST])


def _bytes(names: Iterable[str | None]) -> int:
    """Return the length of names as JSON in a page, where each of <>&' is six bytes long."""
    text = json.dumps([name and name[:LONGEST] for name in names], ensure_ascii=False)
    return len(text.encode("utf-8", "replace")) + 5 * sum(map(text.count, "<>&'"))
