"""Which items of a search are hubs, and what correcting their popularity changes (`nuclr hubness`).

The queries whose results are counted never take part in fitting the correction. Without a bank, the queries are
divided at random, always in the same way, with equal queries on one side: one half fits it, the other is counted. With
`tune`, half of the queries that would be counted choose temperature and strength instead. What is written is fitted on
all queries.

The correction makes all items equally likely to be found. That is right if queries ask for all parts of the gallery. If
they ask for one part only, the other items are not found because nobody wants them, and the correction would push them
into searches for something else. Hubness alone cannot show whether results improve, recall can: `judge` and
`warnings_of` explain the numbers. Without labels, `coverage` compares what the queries find with what as many items
find: items ask for all parts of the gallery, and hubs crowd out the rest for both.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nuclr import files
from nuclr.arrays import Integers, Rows, as_links, evenly_spaced
from nuclr.data.vectors import Vectors, split_argument
from nuclr.errors import UserError
from nuclr.evaluation.intervals import Interval, change_interval, cut_halves
from nuclr.evaluation.metrics import is_near_chance
from nuclr.evaluation.ranks import rank_correlation
from nuclr.popularity import Hubness, PopularityCorrection, chance_hubness, hubness
from nuclr.popularity.bank import distinct_rows, row_hashes
from nuclr.popularity.correction import BANK_SIZE, FEWEST_TO_CHECK, BankCheck
from nuclr.studies.items.rows import (
    NO_ARRAY,
    Item,
    ItemReport,
    Origin,
    Source,
    check_rows,
    find_links,
    name_rows,
    open_rows,
    read_links,
)
from nuclr.studies.items.searches import Searches

SEARCHES = "searches.json"
DEPTHS = (1, 5, 10)  # of recall
HUBS = 30  # in the summary
SUSPICIOUS = 12  # items that may be planted
EXAMPLES = 3  # queries per hub
EXCHANGED = 6  # queries that won, and that lost, the right first result
LARGEST_COUNT = 500  # of the histogram of N_k; larger ones are counted as this
COVERED = 1000  # queries, and items as queries, that measure the coverage
SMALL_COVERAGE = 0.9  # even logs mostly have 0.95 or more, and logs about one of eight parts less than 0.9
REPEATED = 0.2  # share of the bank's queries that repeat others


@dataclass(frozen=True)
class Measures:
    """How evenly a search finds its items.

    Attributes:
        never_found: share of the items that no query finds.
        skewness: of N_k.
        top_share: share of the results that are the 1 % largest hubs.
        largest: the largest N_k.
        mean: the mean N_k.
        histogram: number of items by N_k, from 0 to 500 and more.
        recall: by depth, as text; empty if no right answers are known.

    """

    never_found: float
    skewness: float
    top_share: float
    largest: int
    mean: float
    histogram: list[int]
    recall: dict[str, float] = field(default_factory=dict)

    def texts(self, k: int) -> dict[str, str]:
        """Return the main measures by their labels."""
        recall = {f"recall@{depth}": f"{value:.1%}" for depth, value in self.recall.items()}
        return {
            "items that nobody finds": f"{self.never_found:.1%}",
            "results that are the 1 % largest hubs": f"{self.top_share:.1%}",
            "queries that find the largest hub": f"{self.largest:,}",
            f"skewness of N_{k}": f"{self.skewness:.2f}",
            **recall,
        }


@dataclass(frozen=True)
class Bank:
    """The queries that fit the correction.

    Attributes:
        name: the argument that names them; None if they are half of the queries.
        queries: how many.
        used: how many different ones the correction is fitted on.
        candidates: how many items it is fitted on.
        repeated: share of the queries that repeat others.
        coverage: different items that they find, relative to those that as many items find (`coverage`).
        p_value: of the test that the counted queries are like the bank; None if the bank is half of the queries.

    """

    name: str | None
    queries: int
    used: int
    candidates: int
    repeated: float
    coverage: float
    p_value: float | None


@dataclass(frozen=True)
class CrowdedOut:
    """A query that finds a hub at a rank, and what it finds instead after the correction.

    Attributes:
        query: the query.
        rank: of the hub, from 1.
        instead: the first item that it did not find before.
        right: whether that is a right answer.
        was_right: whether the hub is one.

    """

    query: Item
    rank: int
    instead: Item
    right: bool
    was_right: bool


@dataclass(frozen=True)
class Exchanged:
    """A query whose first result the correction replaces, where one of the two is right."""

    query: Item
    before: Item
    after: Item


@dataclass(frozen=True, kw_only=True)
class FoundItem(Item):
    """An item with its N_k under plain and corrected ranking.

    Attributes:
        plain: N_k before the correction.
        corrected: N_k after it.
        bias: what the correction subtracts from its scores.
        suspicion: score of `PopularityCorrection.suspicious`, of items that may be planted.
        crowds_out: queries that do not find it any more.

    """

    plain: int
    corrected: int
    bias: float
    suspicion: float | None = None
    crowds_out: list[CrowdedOut] = field(default_factory=list)


@dataclass(frozen=True, repr=False, kw_only=True)
class HubnessReport(ItemReport):
    """What `hubness_report` measured.

    Attributes:
        queries: where the queries come from.
        gallery: where the items come from.
        bank: the queries that fitted the correction.
        counted: number of queries that were counted.
        same: whether the items search one another.
        k: how many items a query looks at.
        width: of the vectors.
        temperature: of the correction.
        strength: of the correction.
        tuned_on: number of labeled queries that chose temperature and strength; 0 if none did.
        plain: measures of plain ranking.
        corrected: measures of corrected ranking.
        chance: measures of random results.
        correlation: rank correlation of the bias with N_k of queries that it has not seen; None if one is constant.
        links: the file of right answers, if one was given.
        labeled: number of queries with a known right answer.
        recall_change: by depth, the change of recall with its 95 % interval.
        suspicious: the items with the highest scores of `PopularityCorrection.suspicious`, above 1.
        hubs: the items that most queries find.
        found_again: items that no query found before the correction.
        won: queries whose first result is right only after the correction: at most 6.
        lost: queries whose first result was right only before it: at most 6.
        won_count: number of all such queries.
        lost_count: number of all such queries.
        correction: the fitted correction; None if the report was read from a file, as are the other arrays.
        bias: (n,), of all items.
        counts: (2, n), N_k of all items, plain and corrected.
        searches: single queries with what they find, for the page.

    """

    KIND: ClassVar[str] = "hubness"
    FILES: ClassVar[tuple[str, ...]] = ("bias.npy", "correction.safetensors", SEARCHES)

    queries: Origin
    gallery: Origin
    bank: Bank
    counted: int
    same: bool
    k: int
    width: int
    temperature: float
    strength: float
    tuned_on: int
    plain: Measures
    corrected: Measures
    chance: Measures
    correlation: float | None
    links: str | None
    labeled: int
    recall_change: dict[str, Interval]
    suspicious: list[FoundItem]
    hubs: list[FoundItem]
    found_again: list[FoundItem]
    won: list[Exchanged]
    lost: list[Exchanged]
    won_count: int
    lost_count: int
    correction: PopularityCorrection = field(
        default=NO_ARRAY,
        repr=False,
        compare=False,
    )
    bias: Tensor = field(
        default=NO_ARRAY,
        repr=False,
        compare=False,
    )
    counts: Tensor = field(
        default=NO_ARRAY,
        repr=False,
        compare=False,
    )
    searches: Searches | None = field(
        default=None,
        repr=False,
        compare=False,
    )

    def __repr__(self) -> str:
        never = f"never_found={self.plain.never_found:.3g} -> {self.corrected.never_found:.3g}"
        return f"HubnessReport({self.queries.name} searches {self.gallery.name}, {never}, k={self.k})"

    @property
    def advice(self) -> list[str]:
        """Sentences on whether the correction helps, and what to beware of."""
        return [judge(self)[0], *warnings_of(self)]

    @property
    def recommended(self) -> bool:
        """Whether nothing speaks against the correction."""
        return judge(self)[1]

    def table(self) -> list[list[str]]:
        """Return the main measures as texts: a label, and their values plain, corrected and by chance."""
        columns = [measures.texts(self.k) for measures in (self.plain, self.corrected, self.chance)]
        return [[label, *(column[label] for column in columns)] for label in columns[0]]

    def to_json(self) -> dict[str, Any]:
        """Return the content of hubness.json: everything but the arrays, and the advice."""
        return {**super().to_json(), "advice": self.advice, "recommended": self.recommended}


def hubness_report(
    queries: Source,
    gallery: Source | None = None,
    *,
    bank: Source | None = None,
    links: str | Path | Integers | None = None,
    names: str | Path | None = None,
    query_names: str | Path | None = None,
    images: Path | None = None,
    k: int = 10,
    temperature: float | None = None,
    strength: float | None = None,
    normalize: bool = False,
    tune: bool = False,
    out: Path | None = None,
) -> HubnessReport:
    """Measure which items of a search are hubs, and what the correction changes.

    Args:
        queries: vectors of the queries: an array (n, d), or PATH or PATH:COLUMN of a file, a folder or a run.
        gallery: vectors of the items that they search, in the same forms. None: the y of the queries' file; an array
            of queries searches itself.
        bank: other queries to fit the correction on. A file of pairs gives the items that they search too. None: a
            random half of the queries; for a run, its training pairs.
        links: rows (query, right answer), (n, 2), or a file of them (`read_links`). None: of pairs, the pairs.
        names: a file with the names of the items (`name_rows`).
        query_names: a file with the names of the queries.
        images: the folder of the pictures that the names of the items are files of, for the page.
        k: how many items a query looks at.
        temperature: of the correction. None: the default of `PopularityCorrection`.
        strength: of the correction. None: the default.
        normalize: scale all vectors to unit norm.
        tune: choose temperature and strength, unless given, on half of the labeled queries; the others are counted.
        out: a folder for the report, the table, the bias and the correction. None: nothing is written.

    Returns:
        The report, with the fitted correction.

    Raises:
        UserError: if anything is wrong with the input, before the correction is fitted.

    Example:
        >>> x = torch.nn.functional.normalize(torch.arange(90.0).sin().reshape(30, 3), dim=1)
        >>> report = hubness_report(x, k=3)
        >>> report.counted, report.same, report.k
        (15, True, 3)

    """
    HubnessReport.check_folder(out, create=False)
    search = _open(queries, gallery, bank, names, query_names)
    _check_sizes(search, k)
    search = search.checked(normalize)
    known = _known_links(search, links)
    fitted, candidates, counted = _divide(search)
    rows_fitted = np.setdiff1d(np.arange(len(search.queries)), counted)
    among_fitted = _links_among(known, rows_fitted) if search.bank is None else known[:0]
    items = search.gallery
    tuning: dict[str, Any] = {}
    chosen_on = counted[:0]
    if tune:
        chosen_on, counted = _tuning_halves(counted, known, search.one_set)
        tuning = {
            "pairs": (search.asked(chosen_on), items.rows, _links_among(known, chosen_on)),
            "exclude": chosen_on if search.one_set else None,
        }
    HubnessReport.check_folder(out, create=True)
    if out is not None:
        _refuse_other_result(search, out)
    try:
        fix = PopularityCorrection(temperature, strength, normalize=normalize)
        fix.fit(fitted, candidates, among_fitted if len(among_fitted) else None, items=search.one_set, **tuning)
        correction = _fit_on_all(search, fix, known)
    except ValueError as error:  # such as a log of one query
        raise UserError(f"{(search.bank or search.queries).name}: {error}") from None
    bias = fix.bias(items.rows)
    tried = search.asked(counted)
    can_check = search.bank is not None and len(distinct_rows(tried)) >= FEWEST_TO_CHECK
    exclude = counted if search.one_set else None
    plain = hubness(tried, items.rows, k, exclude=exclude)
    corrected = hubness(tried, items.rows, k, bias=bias, exclude=exclude)
    known = _links_among(known, counted)
    found = Comparison(search, counted, plain, corrected, bias, known)
    won, lost = found.changed()
    correlation = rank_correlation(bias, plain.counts)
    distinct = len(distinct_rows(fitted))
    report = HubnessReport(
        queries=Origin.of(search.queries),
        gallery=Origin.of(items, images),
        bank=Bank(
            name=None if search.bank is None else search.bank.name,
            queries=len(fitted),
            used=min(distinct, BANK_SIZE),
            candidates=min(len(candidates), BANK_SIZE),
            repeated=1 - distinct / len(fitted),
            coverage=1.0 if search.one_set else coverage(fitted, candidates, k),
            p_value=fix.check(tried).p_value if can_check else None,
        ),
        counted=len(counted),
        same=search.one_set,
        k=k,
        width=int(items.rows.shape[1]),
        temperature=fix.temperature_,
        strength=fix.strength_,
        tuned_on=len(chosen_on),
        plain=_measure(plain, known),
        corrected=_measure(corrected, known),
        chance=_measure_chance(len(counted), len(items), k, known),
        correlation=correlation if math.isfinite(correlation) else None,
        links=str(links) if isinstance(links, str | Path) else None if links is None else "links",
        labeled=len(np.unique(known[:, 0])),
        recall_change=found.recall_change(tried),
        suspicious=found.suspicious(correction.suspicious(items.rows).score),
        hubs=found.hubs(),
        found_again=found.found_again(),
        won=[found.exchanged(query) for query in won[:EXCHANGED]],
        lost=[found.exchanged(query) for query in lost[:EXCHANGED]],
        won_count=len(won),
        lost_count=len(lost),
        correction=correction,
        bias=correction.bias(items.rows),
        counts=torch.stack([plain.counts, corrected.counts]),
        searches=Searches.of(search.queries, items, counted, tried, (plain, corrected), known),
    )
    if out is not None:
        _write(report, items, out)
    return report


def _fit_on_all(search: "Search", fix: PopularityCorrection, known: np.ndarray) -> PopularityCorrection:
    """Return the correction to use: with the same settings, and all queries if a half was held out to measure it."""
    if search.bank is not None:
        return fix
    tuned = {} if len(fix.scales_) > 1 else {"temperature": fix.temperature_, "strength": fix.strength_}
    whole = PopularityCorrection(**fix.get_params() | tuned)
    every = search.asked(np.arange(len(search.queries)))
    return whole.fit(every, search.gallery.rows, known if len(known) else None, items=search.one_set)


def _write(
    report: HubnessReport,
    items: Vectors,
    folder: Path,
) -> None:
    plain, corrected = report.counts.numpy()
    table: dict[str, Any] = {
        "row": np.arange(len(items)),
        f"n{report.k}": plain,
        f"n{report.k}_corrected": corrected,
        "bias": report.bias.numpy(),
    }
    if items.ids is not None:
        table["name"] = items.ids
    with report.publish(folder, [table]) as new:
        np.save(new / "bias.npy", report.bias.numpy())
        files.write_text(new / SEARCHES, json.dumps(files.to_record(report.searches), ensure_ascii=False))
        report.correction.save(new / "correction.safetensors")


def _refuse_other_result(search: "Search", folder: Path) -> None:
    """Refuse a folder that holds the result of other vectors."""
    earlier = files.read_object(folder / "hubness.json")
    for key in ("queries", "gallery", "bank"):
        vectors = getattr(search, key)
        if not isinstance(earlier.get(key), dict):  # nothing was written, or not all of it
            continue
        name = earlier[key].get("name")
        if (vectors and Path(vectors.name).resolve()) != (name and Path(name).resolve()):
            raise UserError(f"{folder} holds the result of other vectors ({key}: {name}); name another with --out")


# ---------------------------------------------------------------------------------------------------------------------
# What the numbers mean
# ---------------------------------------------------------------------------------------------------------------------


def judge(report: HubnessReport) -> tuple[str, bool]:
    """Return what recall says about the correction, and whether nothing speaks against it.

    A loss of recall speaks against it, and so do known answers without a gain.
    """
    changes = report.recall_change
    if not changes:
        plain = report.plain
        corrected = report.corrected
        return (
            f"{plain.never_found:.0%} of the items are never found, and one item turns up for {plain.largest:,} of "
            f"{report.counted:,} queries; after the correction {corrected.never_found:.0%} and {corrected.largest:,}. "
            "Whether results improve cannot be seen without known answers (--links).",
            False,
        )
    if _is_at_chance(report):
        return f"Recall is at chance level: are the rows of {report.links} (query, item), numbered from 0?", False
    improved = [depth for depth, change in changes.items() if change.low > 0]
    fell = [depth for depth, change in changes.items() if change.high < 0]
    # The first significant changes, and what happens to the first result in any case.
    texts = []
    for depth in dict.fromkeys([*improved[:1], *fell[:1], "1"]):
        change = changes[depth]
        interval = f"[{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
        texts.append(f"recall@{depth} changes by {100 * change.difference:+.1f} points {interval}")
    shown = "; ".join(texts)
    if improved:
        return f"{'Mixed' if fell else 'The correction helps'}: {shown}.", not fell
    if fell:
        return f"Do not use this correction: {shown}.", False
    if changes["1"].difference > 0:
        return f"No significant difference: {shown}.", True
    tune = "" if report.tuned_on else " (try --tune)"
    advice = f"No gain shown; do not use it without labeled queries that show one{tune}."
    return f"No significant difference: {shown}. {advice}", False


def _is_at_chance(report: HubnessReport) -> bool:
    """Return whether recall with a file of links is hardly above that of random results, as if the links were wrong."""
    chance = report.chance.recall
    if report.links is None or not chance:
        return False
    deepest = max(chance, key=int)
    best = max(report.plain.recall[deepest], report.corrected.recall[deepest])
    return is_near_chance(best, chance[deepest])


def warnings_of(report: HubnessReport) -> list[str]:
    """Return sentences on what to beware of."""
    bank = report.bank
    sentences = []
    if report.strength == 0:
        sentences.append(
            "The strength is 0, so the correction changes nothing: with these queries, popularity is mostly noise."
        )
    if bank.coverage < SMALL_COVERAGE:
        sentences.append(
            f"Beware: the queries that fit the correction find {1 - bank.coverage:.0%} fewer different items than as "
            "many items of the gallery do. If they are about a part of it, the correction shows the rest to people who "
            "want something else; fit it on queries for all parts of the gallery."
        )
    if bank.repeated > REPEATED and not report.same:
        sentences.append(
            f"{bank.repeated:.0%} of the queries repeat others; each counts once. People then ask for some items far "
            "more often than for others, and the correction treats all items alike: check it with --links or --tune."
        )
    if bank.p_value is not None and not BankCheck(bank.p_value).fits:
        sentences.append(f"Beware: {BankCheck(bank.p_value).message}.")
    if report.corrected.never_found > report.plain.never_found:
        sentences.append(
            f"The correction does not make the search more even: {bank.name or 'half of the queries'} may be too few, "
            "or of another kind than the queries that are asked."
        )
    for origin in (report.queries, report.gallery):
        if origin.index is not None:
            sentences.append(
                f"{origin.name} holds compressed vectors ({origin.index}), so all numbers are approximate; use the "
                "original vectors if you have them."
            )
    return sentences


# ---------------------------------------------------------------------------------------------------------------------
# Queries, gallery and bank
# ---------------------------------------------------------------------------------------------------------------------


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

    @property
    def one_set(self) -> bool:
        """Whether the items search one another."""
        return self.queries is self.gallery

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


def _open(
    queries: Source,
    gallery: Source | None,
    bank: Source | None,
    names: str | Path | None,
    query_names: str | Path | None,
) -> Search:
    asked = open_rows(queries, "queries")
    if gallery is None:
        gallery = asked.source if isinstance(queries, str | Path) else queries
    searched = name_rows(open_rows(gallery, "gallery"), names)
    asked = searched if asked.is_same(searched) else name_rows(asked, query_names)
    if bank is None and asked.numbers is not None and searched.numbers is not None:
        bank = asked.source  # the training pairs of the run
    if bank is None:
        return Search(asked, searched)
    path, column = split_argument(str(bank)) if isinstance(bank, str | Path) else ("", "array")
    fitted = open_rows(bank if column or asked.column is None else f"{path}:{asked.column}", "bank")
    candidates = None
    if column is None and asked is not searched and searched.column is not None and fitted.column is not None:
        candidates = open_rows(f"{path}:{searched.column}", "candidates")
    return Search(asked, searched, fitted, candidates)


def _check_sizes(search: Search, k: int) -> None:
    gallery = search.gallery
    bank = search.bank
    width = gallery.rows.shape[1]
    for vectors in (search.queries, bank, search.candidates):
        if vectors is not None and vectors.rows.shape[1] != width:
            raise UserError(
                f"{vectors.name} has {vectors.rows.shape[1]} columns and {gallery.name} {width}; "
                "queries, gallery and bank must come from the same model"
            )
    if bank is not None and bank.numbers is None and bank.is_same(search.queries):
        raise UserError(f"--bank {bank.name}: these are the queries themselves; name others, or leave out --bank")
    fitted = bank or search.queries
    if len(fitted) < 4:
        raise UserError(f"{fitted.name}: {len(fitted)} queries; at least 4 are needed to find hubs")
    most = len(gallery) - search.one_set
    if len(gallery) < 2 or not 1 <= k <= most:
        raise UserError(f"--k {k}: {gallery.name} has {most} items that a query can find")


def _known_links(search: Search, links: str | Path | Integers | None) -> np.ndarray:
    """Return rows (query, right answer), (n, 2); none if they are not known."""
    sizes = len(search.queries), len(search.gallery)
    if links is None:
        return find_links(search.queries, search.gallery)
    if isinstance(links, str | Path):
        return read_links(Path(links), search.queries, search.gallery)
    return as_links("links", links, *sizes, ("queries", "gallery")).numpy()


def _divide(search: Search) -> tuple[Rows, Rows, np.ndarray]:
    """Return queries to fit on, what they choose from, and the numbers of the queries to count."""
    if search.bank is None:
        fitted, counted = split_queries(search.queries.rows)
        return search.asked(fitted), search.gallery.rows, counted
    # Items that search one another do so in the bank as well.
    candidates = search.bank if search.one_set else search.candidates or search.gallery
    return search.bank.rows, candidates.rows, np.arange(len(search.queries))


def split_queries(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Divide queries at random, always in the same way; equal queries are in the same half.

    Every other query would not do: a log may alternate between two kinds.
    """
    counted, fitted = cut_halves(row_hashes(rows))
    return fitted.numpy(), counted.numpy()


def coverage(queries: Rows, gallery: Rows, k: int) -> float:
    """Return how many different items queries find, relative to how many as many items of the gallery find.

    Items ask for all parts of the gallery, and hubs reduce both numbers. At most 1,000 queries are used, and so few
    that they find every item twice by chance: with more, queries about a part of the gallery find all of it as well.

    Args:
        queries: features of the queries.
        gallery: features of the items.
        k: how many items each finds, if there are more than that.

    """
    k = min(k, len(gallery) - 1)
    asked = distinct_rows(queries)
    count = min(len(asked), len(gallery), COVERED, 2 * len(gallery) // k)
    some = evenly_spaced(len(gallery), count)
    by_queries = hubness(queries.take(asked[evenly_spaced(len(asked), count)]), gallery, k)
    by_items = hubness(gallery.take(some), gallery, k, exclude=some)
    return (1 - by_queries.never_found) / (1 - by_items.never_found)


def _tuning_halves(
    rows: np.ndarray,
    links: np.ndarray,
    one_set: bool,
) -> tuple[np.ndarray, np.ndarray]:
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


def _links_among(links: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the links of some queries, numbered among them; `rows` are ascending."""
    kept = links[np.isin(links[:, 0], rows)]
    return np.stack([np.searchsorted(rows, kept[:, 0]), kept[:, 1]], axis=1)


# ---------------------------------------------------------------------------------------------------------------------
# Measures
# ---------------------------------------------------------------------------------------------------------------------


def _depths(k: int, links: np.ndarray) -> list[int]:
    """Return the depths at which recall is measured: none without known answers."""
    return [depth for depth in DEPTHS if depth <= k and len(links)]


def _measure(found: Hubness, links: np.ndarray) -> Measures:
    counts = found.counts.numpy()
    return Measures(
        never_found=found.never_found,
        skewness=found.skewness,
        top_share=found.top_share(0.01),
        largest=int(counts.max()),
        mean=float(counts.mean()),
        histogram=np.bincount(np.minimum(counts, LARGEST_COUNT)).tolist(),
        recall={str(depth): found.recall(links, depth) for depth in _depths(found.k, links)},
    )


def _measure_chance(
    queries: int,
    items: int,
    k: int,
    links: np.ndarray,
) -> Measures:
    """Return what random results would measure."""
    answers = np.unique(np.unique(links, axis=0)[:, 0], return_counts=True)[1]
    recall = {str(depth): float(np.mean(1 - (1 - depth / items) ** answers)) for depth in _depths(k, links)}
    return replace(_measure(chance_hubness(queries, items, k), links[:0]), recall=recall)


@dataclass(frozen=True)
class Comparison:
    """What the counted queries find before and after the correction.

    Attributes:
        search: the search.
        counted: (n,), numbers of the counted queries.
        plain: what they find by plain ranking.
        corrected: what they find by corrected ranking.
        bias: of all items.
        links: rows (counted query, right answer), (m, 2).

    """

    search: Search
    counted: np.ndarray
    plain: Hubness
    corrected: Hubness
    bias: Tensor
    links: np.ndarray

    def recall_change(self, queries: Rows) -> dict[str, Interval]:
        """Return, per depth, the change of recall with its 95 % interval.

        Equal queries have equal results, so the interval is over distinct queries: a query that is asked a hundred
        times is one observation that weighs a hundred times as much.

        Args:
            queries: features of the counted queries.

        """
        labeled = torch.from_numpy(np.unique(self.links[:, 0]))
        group = torch.unique(queries[labeled], dim=0, return_inverse=True)[1]
        changes = {}
        for depth in _depths(self.plain.k, self.links):
            before = self.plain.hits(self.links, depth).double()
            after = self.corrected.hits(self.links, depth).double()
            changes[str(depth)] = change_interval(before, after, group)
        return changes

    def hubs(self) -> list[FoundItem]:
        """Return the items that most queries find, each with queries that it crowds out."""
        right = set(map(tuple, self.links.tolist()))
        worst = self.plain.worst(HUBS).tolist()
        return [self._item(row, crowds_out=self._crowded_out(row, right)) for row in worst if self.plain.counts[row]]

    def suspicious(self, scores: Tensor) -> list[FoundItem]:
        """Return the items with the highest scores, if these are above those of 99 % of the items."""
        highest = scores.argsort(descending=True, stable=True)[:SUSPICIOUS].tolist()
        return [self._item(row, suspicion=float(scores[row])) for row in highest if scores[row] > 1]

    def _crowded_out(self, hub: int, right: set[tuple[int, ...]]) -> list[CrowdedOut]:
        """Return queries that do not find the hub any more, with what they find instead; the hub's first ranks first.

        Whether the answers are right makes no difference: losses are shown as often as they occur.
        """
        examples = []
        for query in (self.plain.found == hub).any(dim=1).nonzero().flatten().tolist():
            before = self.plain.found[query].tolist()
            after = self.corrected.found[query].tolist()
            new = [item for item in after if item not in before]
            if hub not in after and new:
                examples.append((before.index(hub), query, new[0]))
        return [
            CrowdedOut(
                query=Item.of(self.search.queries, int(self.counted[query])),
                rank=position + 1,
                instead=Item.of(self.search.gallery, item),
                right=(query, item) in right,
                was_right=(query, hub) in right,
            )
            for position, query, item in sorted(examples)[:EXAMPLES]
        ]

    def changed(self) -> tuple[list[int], list[int]]:
        """Return the counted queries whose first result is right only after the correction, and only before it."""
        labeled = torch.from_numpy(np.unique(self.links[:, 0]))
        if not len(labeled):
            return [], []
        before = self.plain.hits(self.links, 1).bool()
        after = self.corrected.hits(self.links, 1).bool()
        return labeled[after & ~before].tolist(), labeled[before & ~after].tolist()

    def exchanged(self, query: int) -> Exchanged:
        """Return the first results of a counted query."""
        gallery = self.search.gallery
        return Exchanged(
            query=Item.of(self.search.queries, int(self.counted[query])),
            before=Item.of(gallery, int(self.plain.found[query, 0])),
            after=Item.of(gallery, int(self.corrected.found[query, 0])),
        )

    def found_again(self) -> list[FoundItem]:
        """Return items that no query found before the correction, those that are found most often after it first."""
        gained = torch.where(self.plain.counts == 0, self.corrected.counts, 0)
        order = gained.argsort(descending=True, stable=True)[:HUBS].tolist()
        return [self._item(row) for row in order if gained[row] > 0]

    def _item(self, row: int, **more: Any) -> FoundItem:
        return FoundItem.of(
            self.search.gallery,
            row,
            plain=int(self.plain.counts[row]),
            corrected=int(self.corrected.counts[row]),
            bias=float(self.bias[row]),
            **more,
        )
