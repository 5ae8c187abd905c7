"""`nuclr hubness`: measure a search before and after correction, and write the table, the bias and the summary.

The queries whose results are counted never take part in fitting the correction. Without a bank, the queries are
divided at random, always in the same way: one half fits it, the other is counted. With `tune`, half of the queries that
would be counted choose temperature and strength instead.
"""

import csv
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nuclr
from nuclr import files
from nuclr.errors import UserError
from nuclr.evaluation import rank_correlation
from nuclr.popularity import ConvergenceWarning, Hubness, PopularityCorrection, chance_hubness, hubness
from nuclr.popularity.correction import BANK_SIZE
from nuclr.popularity.tiles import evenly_spaced
from nuclr.runs.folder import environment
from nuclr.runs.vectors import Vectors, check_rows
from nuclr.stacked import Stacked
from nuclr.studies.hubness.advice import advice, is_recommended
from nuclr.studies.hubness.links import find_links, tuning_halves

COMMAND = "nuclr hubness"
SUMMARY, TABLE, BIAS, CORRECTION = "hubness.json", "hubness.csv", "bias.npy", "correction.safetensors"
FILES = (SUMMARY, TABLE, BIAS, CORRECTION)
DEPTHS = (1, 5, 10)  # of recall
HUBS, EXAMPLES = 30, 3  # hubs in the summary, and queries per hub
WRITTEN = 2**16  # rows of the table that are written at a time


@dataclass(frozen=True)
class Search:
    """Queries and what they search.

    Attributes:
        queries: all queries.
        gallery: the items.
        bank: queries to fit the correction on; None: a half of `queries`.
        bank_candidates: what the bank's queries choose from; None: the gallery.
        links: rows (query, right answer), (n, 2); None if it is not known.
        links_name: the file of the links, for messages.

    """

    queries: Vectors
    gallery: Vectors
    bank: Vectors | None = None
    bank_candidates: Vectors | None = None
    links: np.ndarray | None = None
    links_name: str | None = None


def write_hubness(
    search: Search,
    folder: Path,
    k: int = 10,
    temperature: float | None = None,
    strength: float | None = None,
    normalize: bool = False,
    images: Path | None = None,
    tune: bool = False,
) -> dict[str, Any]:
    """Measure, write everything into `folder`, and return the content of hubness.json.

    Args:
        search: queries, gallery and bank.
        folder: created if necessary; files of an earlier `nuclr hubness` of the same vectors are replaced.
        k: how many items a query looks at.
        temperature: of the correction; None: the default.
        strength: of the correction; None: the default.
        normalize: scale all vectors to unit norm.
        images: the folder that the names of the gallery are files of, for the page.
        tune: choose temperature and strength, unless given, on half of the labeled queries; the others are counted.

    Raises:
        UserError: anything wrong with the input, before the solver starts.

    """
    queries, gallery = search.queries, search.gallery
    one_set = queries.is_same(gallery)
    _check(search, k, one_set, normalize)
    links = find_links(queries, gallery) if search.links is None else search.links
    fit_queries, candidates, rows, bank = _divide(search, one_set)
    tuning: dict[str, Any] = {}
    if tune:
        chosen_on, rows = tuning_halves(rows, links, one_set)
        pairs = queries.features[chosen_on], gallery.features, _links_among(links, chosen_on)
        tuning = {"pairs": pairs, "exclude": chosen_on if one_set else None}
    files.prepare_folder(folder, COMMAND, SUMMARY, FILES)
    _refuse_other_result(search, folder)
    fix = PopularityCorrection(temperature, strength, normalize=normalize)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a larger residual hardly changes ranks
        fix.fit(fit_queries, candidates, **tuning)
    bias = fix.bias(gallery.features)
    tried = queries.features if len(rows) == len(queries) else queries.features[rows]
    options: dict[str, Any] = {"exclude": rows if one_set else None, "normalize": normalize}
    plain = hubness(tried, gallery.features, k, **options)
    corrected = hubness(tried, gallery.features, k, bias=bias, **options)
    links = _links_among(links, rows)

    content: dict[str, Any] = {
        "written_by": COMMAND,
        "version": nuclr.__version__,
        "command": environment()["command"],
        "queries": _describe(queries) | {"counted": len(rows)},
        "gallery": _describe(gallery) | {"images": None if images is None else str(images)},
        "bank": bank,
        "same": one_set,
        "k": k,
        "width": int(gallery.features.shape[1]),
        "temperature": fix.temperature,
        "strength": fix.strength,
        "tuned_on": len(chosen_on) if tune else 0,
        "plain": _measures(plain, links),
        "corrected": _measures(corrected, links),
        "chance": _chance(len(rows), len(gallery), k, links),
        "correlation": _finite(rank_correlation(bias, plain.counts)),
        "links": search.links_name,
        "labeled": 0 if links is None else len(np.unique(links[:, 0])),
        "recall_change": {} if links is None else _recall_change(plain, corrected, links, tried),
        "hubs": _hubs(search, rows, plain, corrected, bias, links),
        "found_again": _found_again(search, plain, corrected),
    }
    content["advice"], content["recommended"] = advice(content), is_recommended(content)
    with files.user_errors(folder):
        _write_table(folder / TABLE, gallery, plain, corrected, bias)
        with files.write_atomically(folder / BIAS) as file:
            np.save(file, bias.numpy())
        fix.save(folder / CORRECTION)
        files.write_json(folder / SUMMARY, content)
    return content


def _check(search: Search, k: int, one_set: bool, normalize: bool) -> None:
    queries, gallery = search.queries, search.gallery
    width = gallery.features.shape[1]
    named = {v.name: v for v in (queries, search.bank, search.bank_candidates, gallery) if v is not None}
    for vectors in named.values():
        if vectors.features.shape[1] != width:
            raise UserError(
                f"{vectors.name} has {vectors.features.shape[1]} columns and {gallery.name} {width}; "
                "queries, gallery and bank must come from the same model"
            )
    if search.bank is not None and search.bank.pairs is None and search.bank.is_same(queries):
        raise UserError(
            f"--bank {search.bank.name}: these are the queries themselves; name others, or leave out --bank"
        )
    if len(gallery) < 2:
        raise UserError(f"{gallery.name}: has one row; a gallery needs at least two items")
    if search.bank is None and len(queries) < 4:
        raise UserError(f"{queries.name}: {len(queries)} queries; without --bank, at least 4 are needed")
    if search.bank is not None and len(search.bank) < (4 if search.bank_candidates is None and one_set else 2):
        raise UserError(
            f"--bank {search.bank.name}: {len(search.bank)} rows are too few to find hubs; give more queries"
        )
    most = len(gallery) - one_set
    if k > most:
        raise UserError(f"--k {k}: the gallery has only {most} items that a query can find")
    for vectors in named.values():
        check_rows(vectors, normalize)


def _refuse_other_result(search: Search, folder: Path) -> None:
    """Refuse a folder that holds the result of other vectors."""
    if not (folder / SUMMARY).is_file():
        return
    earlier = files.parse_json((folder / SUMMARY).read_text(encoding="utf-8"))
    names = [earlier.get(key, {}).get("name") for key in ("queries", "gallery", "bank")]
    present = [None if v is None else v.name for v in (search.queries, search.gallery, search.bank)]
    if [name and Path(name).resolve() for name in names] != [name and Path(name).resolve() for name in present]:
        fitted = "" if names[2] is None else f" with the bank {names[2]}"
        raise UserError(
            f"{folder} holds the result of {names[0]} searching {names[1]}{fitted}; name another folder with --out"
        )


def split_queries(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide queries at random, always in the same way.

    Every other query would not do: a log may alternate between two kinds.

    Args:
        count: number of queries.

    Returns:
        The rows that fit the correction and those that are counted, both in ascending order.

    """
    order = np.random.default_rng(0).permutation(count)
    return np.sort(order[: (count + 1) // 2]), np.sort(order[(count + 1) // 2 :])


def _divide(
    search: Search, one_set: bool
) -> tuple[np.ndarray | Stacked, np.ndarray | Stacked, np.ndarray, dict[str, Any]]:
    """Return queries to fit on, what they choose from, the rows of the queries to count, and the bank in words.

    Of a memory-mapped file, only the queries to fit on are read.
    """
    queries, gallery = search.queries.features, search.gallery.features
    if search.bank is None:
        fitted, counted = split_queries(len(queries))
        bank = queries[fitted[_bank_rows(len(fitted))]]
        return bank, gallery, counted, _describe_bank(None, len(fitted), len(gallery), bank)
    bank = search.bank.features
    candidates = gallery if search.bank_candidates is None else search.bank_candidates.features
    if one_set:  # items search one another, in the bank as well
        candidates = bank
    described = _describe_bank(search.bank.name, len(bank), len(candidates), bank[_bank_rows(len(bank))])
    return bank, candidates, np.arange(len(queries)), described


def _bank_rows(count: int) -> np.ndarray:
    """Return the rows that the correction uses of a larger bank."""
    return evenly_spaced(count, BANK_SIZE).numpy()


def _describe_bank(name: str | None, queries: int, candidates: int, used: np.ndarray) -> dict[str, Any]:
    repeated = 1 - len(np.unique(used, axis=0)) / len(used)  # share of the queries that repeat another one
    return {"name": name, "queries": queries, "candidates": candidates, "repeated": repeated}


def _links_among(links: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    """Return the links of some queries, numbered among them."""
    if links is None:
        return None
    position = np.full(max(int(links[:, 0].max()), int(rows.max())) + 1, -1)
    position[rows] = np.arange(len(rows))
    kept = links[position[links[:, 0]] >= 0]
    return np.stack([position[kept[:, 0]], kept[:, 1]], axis=1) if len(kept) else None


def _describe(vectors: Vectors) -> dict[str, Any]:
    run = None if vectors.pairs is None else str(vectors.path)
    return {
        "name": vectors.name,
        "rows": len(vectors),
        "run": run,
        "side": vectors.column,
        "words": vectors.words,
        "index": vectors.index,
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _measures(found: Hubness, links: np.ndarray | None) -> dict[str, Any]:
    counts = found.counts.numpy()
    measures: dict[str, Any] = {
        "never_found": found.never_found,
        "skewness": found.skewness,
        "top_share": found.top_share(0.01),
        "largest": int(counts.max()),
        "mean": float(counts.mean()),
        "histogram": np.bincount(np.minimum(counts, 500)).tolist(),
    }
    if links is not None:
        measures["recall"] = {str(k): found.recall(links, k) for k in DEPTHS if k <= found.k}
    return measures


def _chance(queries: int, items: int, k: int, links: np.ndarray | None) -> dict[str, Any]:
    """Return what random results would measure."""
    measures = _measures(chance_hubness(queries, items, k), None)
    if links is not None:
        answers = np.unique(np.unique(links, axis=0)[:, 0], return_counts=True)[1]
        recall = {str(depth): float(np.mean(1 - (1 - depth / items) ** answers)) for depth in DEPTHS if depth <= k}
        measures["recall"] = recall
    return measures


def _recall_change(
    plain: Hubness, corrected: Hubness, links: np.ndarray, queries: np.ndarray | Stacked
) -> dict[str, dict[str, float]]:
    """Return, per depth, the change of recall with its 95 % interval.

    Equal queries have equal results, so the interval is over distinct queries: a query that is asked a hundred times is
    one observation that weighs a hundred times as much.

    Args:
        plain: Results of plain ranking.
        corrected: Results of corrected ranking.
        links: Rows (query, right answer), (n, 2).
        queries: Features of the queries, (n_queries, d).

    """
    labeled = np.unique(links[:, 0])
    _, group = np.unique(np.asarray(queries[labeled]), axis=0, return_inverse=True)
    changes = {}
    for k in DEPTHS:
        if k <= plain.k:
            change = (corrected.hits(links, k).double() - plain.hits(links, k).double()).numpy()
            mean = float(change.mean())
            sums = np.bincount(group.ravel(), change - mean)
            reach = 1.96 * float(np.sqrt((sums**2).sum())) / len(change)
            changes[str(k)] = {"difference": mean, "low": mean - reach, "high": mean + reach}
    return changes


def _hubs(
    search: Search,
    rows: np.ndarray,
    plain: Hubness,
    corrected: Hubness,
    bias: Tensor,
    links: np.ndarray | None,
) -> list[dict[str, Any]]:
    """Return the worst hubs, each with queries that it crowds out: those that do not find it any more."""
    right: dict[int, set[int]] = {}
    for query, item in [] if links is None else links.tolist():
        right.setdefault(query, set()).add(item)
    before, after = plain.found, corrected.found
    hubs = []
    for hub in plain.worst(HUBS).tolist():
        asked = (before == hub).any(dim=1).nonzero().flatten().tolist()
        freed = [query for query in asked if hub not in after[query].tolist()]
        examples = []
        for query in freed:
            new = [item for item in after[query].tolist() if item not in before[query].tolist()]
            answers = [item for item in new if item in right.get(query, ())]
            if new:
                # First the queries that now find a right answer, then those for which the hub was near the top.
                rank = before[query].tolist().index(hub)
                examples.append((not answers, rank, query, (answers or new)[0], bool(answers)))
        wrong = [query for query in asked if query in right and hub not in right[query]]
        entry = {
            **_item(search.gallery, hub),
            "plain": int(plain.counts[hub]),
            "corrected": int(corrected.counts[hub]),
            "bias": float(bias[hub]),
            "crowds_out": [
                {
                    "query": _item(search.queries, int(rows[query])),
                    "rank": rank + 1,
                    "instead": _item(search.gallery, item),
                    "right": is_right,
                }
                for _, rank, query, item, is_right in sorted(examples)[:EXAMPLES]
            ],
        }
        hubs.append(entry | ({"wrong": len(wrong)} if links is not None else {}))
    return hubs


def _found_again(search: Search, plain: Hubness, corrected: Hubness) -> list[dict[str, Any]]:
    """Return items that no query found before the correction, those that are found most often after it first."""
    gained = torch.where(plain.counts == 0, corrected.counts, 0)
    order = gained.argsort(descending=True, stable=True)[:HUBS].tolist()
    return [
        {**_item(search.gallery, row), "plain": 0, "corrected": int(gained[row])} for row in order if gained[row] > 0
    ]


def _item(vectors: Vectors, row: int) -> dict[str, Any]:
    item: dict[str, Any] = {"row": row}
    if vectors.numbers is not None:
        item["number"] = int(vectors.numbers[row])
    return item | ({} if vectors.texts is None else {"name": vectors.texts[row]})


def _write_table(path: Path, gallery: Vectors, plain: Hubness, corrected: Hubness, bias: Tensor) -> None:
    named = gallery.texts is not None
    with files.write_atomically(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "replace", newline="")
        writer = csv.writer(text)
        writer.writerow(["row", f"n{plain.k}", f"n{plain.k}_corrected", "bias", *(["name"] if named else [])])
        for start in range(0, len(gallery), WRITTEN):
            block = slice(start, start + WRITTEN)
            columns = (plain.counts[block].tolist(), corrected.counts[block].tolist(), bias[block].tolist())
            names = [] if gallery.texts is None else [files.csv_cell(name) for name in gallery.texts[block]]
            for offset, (before, after, value) in enumerate(zip(*columns, strict=True)):
                writer.writerow([start + offset, before, after, f"{value:.8g}", *names[offset : offset + 1]])
        text.flush()
        text.detach()  # otherwise it would close the file before it is renamed
