"""A search to report on: its queries and items, which answers are right, and which queries fit, choose or are counted.

The queries whose results are counted never take part in fitting the correction. Without a bank, the queries are
divided at random, always in the same way, with equal queries on one side: one half fits it, the other is counted. With
`tune`, half of the queries that would be counted choose temperature and strength instead.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nuclr.arrays import Integers, Rows, as_links
from nuclr.data.vectors import Vectors, split_argument
from nuclr.errors import UserError
from nuclr.evaluation.intervals import cut_halves
from nuclr.popularity.bank import row_hashes
from nuclr.studies.items.rows import Source, check_rows, find_links, name_rows, open_rows, read_links


@dataclass(frozen=True)
class Search:
    """Queries and what they search.

    Attributes:
        queries: all queries; the gallery itself if the items search one another.
        gallery: the items.
        bank: queries to fit the correction on; None: a half of `queries`.
        candidates: what the bank's queries choose from; None: the gallery.

    """

    queries: Vectors
    gallery: Vectors
    bank: Vectors | None = None
    candidates: Vectors | None = None

    @classmethod
    def open(
        cls,
        queries: Source,
        gallery: Source | None,
        bank: Source | None,
        names: str | Path | None,
        query_names: str | Path | None,
    ) -> "Search":
        """Open what `hubness_report` is called with; the rows are not checked yet."""
        asked = open_rows(queries, "queries")
        if gallery is None:
            gallery = asked.source if isinstance(queries, str | Path) else queries
        searched = name_rows(open_rows(gallery, "gallery"), names)
        asked = searched if asked.is_same(searched) else name_rows(asked, query_names)
        if bank is None and asked.numbers is not None and searched.numbers is not None:
            bank = asked.source  # the training pairs of the run
        if bank is None:
            return cls(asked, searched)
        path, column = split_argument(str(bank)) if isinstance(bank, str | Path) else ("", "array")
        fitted = open_rows(bank if column or asked.column is None else f"{path}:{asked.column}", "bank")
        candidates = None
        if column is None and asked is not searched and searched.column is not None and fitted.column is not None:
            candidates = open_rows(f"{path}:{searched.column}", "candidates")
        return cls(asked, searched, fitted, candidates)

    @property
    def one_set(self) -> bool:
        """Whether the items search one another."""
        return self.queries is self.gallery

    def check_sizes(self, k: int) -> None:
        """Raise a UserError if widths differ, if there are too few queries, or too few items to find k."""
        width = self.gallery.rows.shape[1]
        for vectors in (self.queries, self.bank, self.candidates):
            if vectors is not None and vectors.rows.shape[1] != width:
                raise UserError(
                    f"{vectors.name} has {vectors.rows.shape[1]} columns and {self.gallery.name} {width}; "
                    "queries, gallery and bank must come from the same model"
                )
        if self.bank is not None and self.bank.numbers is None and self.bank.is_same(self.queries):
            raise UserError(
                f"--bank {self.bank.name}: these are the queries themselves; name others, or leave out --bank"
            )
        fitted = self.bank or self.queries
        if len(fitted) < 4:
            raise UserError(f"{fitted.name}: {len(fitted)} queries; at least 4 are needed to find hubs")
        most = len(self.gallery) - self.one_set
        if len(self.gallery) < 2 or not 1 <= k <= most:
            raise UserError(f"--k {k}: {self.gallery.name} has {most} items that a query can find")

    def checked(self, normalize: bool) -> "Search":
        """Return the same search, with every row checked once."""
        gallery = check_rows(self.gallery, normalize)
        return Search(
            queries=gallery if self.one_set else check_rows(self.queries, normalize),
            gallery=gallery,
            bank=self.bank and check_rows(self.bank, normalize),
            candidates=self.candidates and check_rows(self.candidates, normalize),
        )

    def asked(self, rows: np.ndarray) -> Rows:
        """Return the features of some queries."""
        queries: Rows = self.queries.rows
        return queries if len(rows) == len(queries) else queries.take(torch.from_numpy(rows))

    def known_links(self, links: str | Path | Integers | None) -> np.ndarray:
        """Return rows (query, right answer), (n, 2); none if they are not known."""
        if links is None:
            return find_links(self.queries, self.gallery)
        if isinstance(links, str | Path):
            return read_links(Path(links), self.queries, self.gallery)
        return as_links("links", links, len(self.queries), len(self.gallery), ("queries", "gallery")).numpy()

    def divide(self) -> tuple[Rows, Rows, np.ndarray]:
        """Return queries to fit on, what they choose from, and the numbers of the queries to count."""
        if self.bank is None:
            fitted, counted = split_queries(self.queries.rows)
            return self.asked(fitted), self.gallery.rows, counted
        # Items that search one another do so in the bank as well.
        candidates = self.bank if self.one_set else self.candidates or self.gallery
        return self.bank.rows, candidates.rows, np.arange(len(self.queries))


def split_queries(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Divide queries at random, always in the same way; equal queries are in the same half.

    Every other query would not do: a log may alternate between two kinds.
    """
    counted, fitted = cut_halves(row_hashes(rows))
    return fitted.numpy(), counted.numpy()


def tuning_halves(rows: np.ndarray, links: np.ndarray, one_set: bool) -> tuple[np.ndarray, np.ndarray]:
    """Divide queries into those that choose the settings and those that are counted.

    Queries that share a right answer, such as captions of the same image, are in the same half. Queries without a right
    answer are counted.

    Args:
        rows: numbers of the queries.
        links: (n, 2), rows (query, right answer).
        one_set: whether the queries are the items.

    Raises:
        UserError: if no right answers are known, or all queries belong together.

    """
    from nuclr.runs.features import merge_groups

    chosen_on = rows[:0]
    known = links[np.isin(links[:, 0], rows)]
    labeled, first = np.unique(known[:, 0], return_index=True)
    if len(labeled) > 1:
        if one_set:  # a query and the item that it is belong together
            known = np.concatenate([known, np.stack([labeled, labeled], axis=1)])
        query, item = torch.from_numpy(known).unbind(1)
        chosen_on = labeled[cut_halves(merge_groups(query, item)[first])[0].numpy()]
    if not len(chosen_on):
        raise UserError(
            "--tune needs right answers, for at least two queries with answers of their own; name a file of rows "
            "(query, item) with --links"
        )
    return chosen_on, np.setdiff1d(rows, chosen_on)


def links_among(links: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the links of some queries, numbered among them; `rows` are ascending."""
    kept = links[np.isin(links[:, 0], rows)]
    return np.stack([np.searchsorted(rows, kept[:, 0]), kept[:, 1]], axis=1)
