"""Which items of a search are hubs, and what correcting their popularity changes (`nuclr hubness`).

`Search` says which queries fit the correction and which are counted; what is written is fitted on all queries.
`verdict` explains the numbers, and `Searches` holds single queries for the page.
"""

import hashlib
import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nuclr import files
from nuclr.arrays import Integers, Rows
from nuclr.data.vectors import Vectors
from nuclr.errors import UserError
from nuclr.evaluation.intervals import Interval
from nuclr.evaluation.ranks import rank_correlation
from nuclr.popularity import Hubness, PopularityCorrection
from nuclr.popularity.bank import distinct_rows
from nuclr.popularity.correction import BANK_SIZE, FEWEST_TO_CHECK
from nuclr.popularity.hubs import QUERY_ROWS, nearest
from nuclr.studies.items.measures import Measures, coverage, recall_change
from nuclr.studies.items.row_maps import RowMap, row_maps
from nuclr.studies.items.rows import NO_ARRAY, Item, ItemReport, Origin, Source
from nuclr.studies.items.search import Search, links_among, tuning_halves
from nuclr.studies.items.searches import Searches
from nuclr.studies.items.verdict import judge, warnings_of

SEARCHES = "searches.json"
HUBS = 30  # in the summary
SUSPICIOUS = 12  # items that may be planted


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


@dataclass(frozen=True, kw_only=True)
class FoundItem(Item):
    """An item with its N_k under plain and corrected ranking.

    Attributes:
        plain: N_k before the correction.
        corrected: N_k after it.
        bias: what the correction subtracts from its scores.
        suspicion: score of `PopularityCorrection.suspicious`.

    """

    plain: int
    corrected: int
    bias: float
    suspicion: float


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
        won_count: number of queries whose first result is right only after the correction.
        lost_count: number of queries whose first result was right only before it.
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
    search = Search.open(queries, gallery, bank, names, query_names)
    search.check_sizes(k)
    search = search.checked(normalize)
    known = search.known_links(links)
    fitted, candidates, counted = search.divide()
    rows_fitted = np.setdiff1d(np.arange(len(search.queries)), counted)
    among_fitted = links_among(known, rows_fitted) if search.bank is None else known[:0]
    items = search.gallery
    tuning: dict[str, Any] = {}
    chosen_on = counted[:0]
    if tune:
        chosen_on, counted = tuning_halves(counted, known, search.one_set)
        tuning = {
            "pairs": (search.asked(chosen_on), items.rows, links_among(known, chosen_on)),
            "exclude": chosen_on if search.one_set else None,
        }
    HubnessReport.check_folder(out, create=True)
    if out is not None:
        _refuse_other_result(search, out)
    sources = (search.queries, items, search.bank, search.candidates)
    settings = [k, temperature, strength, normalize, tune, hashlib.sha256(known.tobytes()).hexdigest()]
    with row_maps(out, sources, settings) as maps:
        try:
            fix = PopularityCorrection(temperature, strength, normalize=normalize)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the verdict says if a correction changes nothing
                fix.fit(fitted, candidates, among_fitted if len(among_fitted) else None, items=search.one_set, **tuning)
                correction = _fit_on_all(search, fix, known)
        except ValueError as error:  # such as a log of one query
            raise UserError(f"{(search.bank or search.queries).name}: {error}") from None
        bias = fix.bias(items.rows, row_map=lambda name, *rest: maps(f"{name}-measured", *rest))
        tried = search.asked(counted)
        can_check = search.bank is not None and len(distinct_rows(tried)) >= FEWEST_TO_CHECK
        exclude = counted if search.one_set else None
        plain = _map_hubness(maps, "found-plain", tried, items.rows, k, None, exclude)
        corrected = _map_hubness(maps, "found-corrected", tried, items.rows, k, bias, exclude)
        known = links_among(known, counted)
        change = corrected.hits(known).int() - plain.hits(known).int() if len(known) else torch.zeros(0)
        suspicion = maps("suspicion", items.rows, lambda part, _: correction.suspicious(part).score)

        def highest(values: Tensor, count: int, above: float = 0) -> list[FoundItem]:
            """Return the items with the highest values, the highest first; equal ones in their order."""
            rows = values.argsort(descending=True, stable=True)[:count]
            return [
                FoundItem.of(
                    items,
                    row,
                    plain=int(plain.counts[row]),
                    corrected=int(corrected.counts[row]),
                    bias=float(bias[row]),
                    suspicion=float(suspicion[row]),
                )
                for row in rows[values[rows] > above].tolist()
            ]

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
            plain=Measures.of(plain, known),
            corrected=Measures.of(corrected, known),
            chance=Measures.of_chance(len(counted), len(items), k, known),
            correlation=correlation if math.isfinite(correlation) else None,
            links=str(links) if isinstance(links, str | Path) else None if links is None else "links",
            labeled=len(np.unique(known[:, 0])),
            recall_change=recall_change(plain, corrected, known, tried),
            suspicious=highest(suspicion, SUSPICIOUS, above=1),
            hubs=highest(plain.counts, HUBS),
            found_again=highest(torch.where(plain.counts == 0, corrected.counts, 0), HUBS),
            won_count=int((change > 0).sum()),
            lost_count=int((change < 0).sum()),
            correction=correction,
            bias=bias if correction is fix else correction.bias(items.rows, row_map=maps),
            counts=torch.stack([plain.counts, corrected.counts]),
            searches=Searches.of(search.queries, items, counted, tried, (plain, corrected), known),
        )
        if out is not None:
            _write(report, items, out)
    return report


def _map_hubness(
    maps: RowMap,
    name: str,
    queries: Rows,
    items: Rows,
    k: int,
    bias: Tensor | None,
    exclude: np.ndarray | None,
) -> Hubness:
    """Return `hubness`, a block of queries at a time."""

    def find(part: Rows, rows: slice) -> Tensor:
        return nearest(part, items, k, bias, None if exclude is None else exclude[rows])[1]

    found = maps(name, queries, find, QUERY_ROWS)
    return Hubness(found, torch.bincount(found.flatten(), minlength=len(items)))


def _fit_on_all(search: Search, fix: PopularityCorrection, known: np.ndarray) -> PopularityCorrection:
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
        files.write_npy(new / "bias.npy", report.bias.numpy())
        files.write_text(new / SEARCHES, json.dumps(files.to_record(report.searches), ensure_ascii=False))
        report.correction.save(new / "correction.safetensors")


def _refuse_other_result(search: Search, folder: Path) -> None:
    """Refuse a folder that holds the result of other vectors."""
    earlier = files.read_object(folder / "hubness.json")
    for key in ("queries", "gallery", "bank"):
        vectors = getattr(search, key)
        if not isinstance(earlier.get(key), dict):  # nothing was written, or not all of it
            continue
        name = earlier[key].get("name")
        if (vectors and Path(vectors.name).resolve()) != (name and Path(name).resolve()):
            raise UserError(
                f"{folder} holds the result of other vectors ({key}: {name}); delete it, or name another with --out"
            )
