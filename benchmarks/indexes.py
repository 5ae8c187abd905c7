"""What an index of faiss loses, with and without correction: recall@10 against exact search of the same vectors.

    python benchmarks/indexes.py QUERIES GALLERY [--bank FILE] [--candidates FILE] [--only PQ]

Arguments name vectors as those of `nuclr hubness` do (`.npy`, `.npz:ARRAY`, `RUN:y`, ...). The correction is fitted on
the bank; without one, the queries of even number fit it and those of odd number search. At most 1,000 queries search.

Each index is built three times: with the plain vectors (inner product), with the corrected vectors for inner product,
and with those for Euclidean distance. Recall@10 is the share of the exact first ten of the *same* ranking that the
index finds. So it shows only what the index loses, and not how the corrected ranking differs from the plain one.
In the columns `again`, the index returns 100 items, which are ranked again by their exact scores.

`PQ` has one byte per eight coordinates. Zeros are added to make the width a multiple of eight. At the end, they leave
the bias alone in its code if the width of the model is a multiple of eight. At the front (`PQ, shared code`), they make
it share a code with seven other coordinates.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from nuclr.popularity import PopularityCorrection
from nuclr.studies.items.rows import open_rows

K, FETCHED, PER_CODE, SEARCHED = 10, 100, 8, 1000
ROUNDING = 1e-6
METRICS = {"plain": faiss.METRIC_INNER_PRODUCT, "ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}
COLUMNS = ("plain", "ip", "l2", "plain again", "ip again", "l2 again")


def unchanged(vectors: np.ndarray) -> np.ndarray:
    return vectors


def pad_end(vectors: np.ndarray) -> np.ndarray:
    return np.pad(vectors, ((0, 0), (0, -vectors.shape[1] % PER_CODE)))


def pad_front(vectors: np.ndarray) -> np.ndarray:
    return np.pad(vectors, ((0, 0), (-vectors.shape[1] % PER_CODE, 0)))


@dataclass(frozen=True)
class Kind:
    """An index: its factory string without the numbers of lists and codes, its layout, and settings of the search."""

    factory: str
    layout: Callable[[np.ndarray], np.ndarray] = unchanged
    nprobe: int = 0
    ef_search: int = 0

    def build(self, items: np.ndarray, metric: int) -> Any:
        """Return a trained index that holds the items."""
        items = self.layout(items)
        numbers = {"lists": round(len(items) ** 0.5), "codes": items.shape[1] // PER_CODE}
        index = faiss.index_factory(items.shape[1], self.factory.format(**numbers), metric)
        if self.nprobe:
            index.nprobe = self.nprobe
        if self.ef_search:
            index.hnsw.efSearch = self.ef_search
        index.train(items)
        index.add(items)
        return index


KINDS = {
    "flat": Kind("Flat"),
    "IVF, sqrt(n) lists, 8 searched": Kind("IVF{lists},Flat", nprobe=8),
    "IVF, sqrt(n) lists, 32 searched": Kind("IVF{lists},Flat", nprobe=32),
    "HNSW32, efSearch 32": Kind("HNSW32", ef_search=32),
    "HNSW32, efSearch 128": Kind("HNSW32", ef_search=128),
    "SQfp16": Kind("SQfp16"),
    "SQ8": Kind("SQ8"),
    "SQ6": Kind("SQ6"),
    "SQ4": Kind("SQ4"),
    "PQ": Kind("PQ{codes}", pad_end),
    "PQ, shared code": Kind("PQ{codes}", pad_front),
}


@dataclass(frozen=True)
class Ranking:
    """Queries and items that are compared by inner product, and the score of the tenth item of each query."""

    queries: np.ndarray
    items: np.ndarray
    tenth: np.ndarray

    def recall(self, found: np.ndarray) -> tuple[float, float]:
        """Return the share of the exact first ten among the first ten of `found`, and among all of them.

        Items are compared by score, because equal items (captions that occur twice) may take each other's place.
        """
        hits = np.zeros(2)
        for query, row, tenth in zip(self.queries, found, self.tenth, strict=True):
            right = (row >= 0) & (self.items[row] @ query >= tenth - ROUNDING)  # -1: the index found fewer items
            hits += right[:K].sum(), min(right.sum(), K)
        first, all_of_them = hits / (K * len(found))
        return float(first), float(all_of_them)


def exact_ranking(queries: np.ndarray, items: np.ndarray) -> tuple[Ranking, np.ndarray]:
    """Return the ranking by inner product and the first ten items of each query."""
    scores, found = Kind("Flat").build(items, faiss.METRIC_INNER_PRODUCT).search(queries, K)
    return Ranking(queries, items, scores[:, -1]), found


def measure(kind: Kind, searches: dict[str, tuple[np.ndarray, np.ndarray]], exact: dict[str, Ranking]) -> dict:
    """Return the recall of one kind of index in every column."""
    row: dict[str, float] = {}
    for column, metric in METRICS.items():
        queries, items = searches[column]
        found = kind.build(items, metric).search(kind.layout(queries), FETCHED)[1]
        row[column], row[f"{column} again"] = exact[column].recall(found)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queries")
    parser.add_argument("gallery")
    parser.add_argument("--bank", help="queries to fit the correction on")
    parser.add_argument("--candidates", help="items that the bank's queries choose from; the gallery by default")
    parser.add_argument("--only", default="", help="measure only indexes whose names contain this")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "indexes.json")
    options = parser.parse_args()
    queries, gallery = open_rows(options.queries).rows, open_rows(options.gallery, "gallery").rows
    fix = PopularityCorrection(normalize=True)
    if options.bank is None:
        bank, queries = queries[::2], queries[1::2]
    else:
        bank = open_rows(options.bank, "bank").rows
    queries = queries[:: -(-len(queries) // SEARCHED)]
    fix.fit(bank, open_rows(options.candidates, "candidates").rows if options.candidates else gallery)

    searches = {name: (fix.queries(queries, name).numpy(), fix.gallery(gallery, name).numpy()) for name in ("ip", "l2")}
    width = gallery.shape[1]
    searches["plain"] = tuple(np.ascontiguousarray(array[:, :width]) for array in searches["ip"])
    plain, first_ten = exact_ranking(*searches["plain"])
    corrected, _ = exact_ranking(*searches["ip"])
    exact = {"plain": plain, "ip": corrected, "l2": corrected}
    shared, _ = corrected.recall(first_ten)
    bias = -searches["ip"][1][:, -1]
    print(f"{len(queries):,} queries, {len(gallery):,} items, {width} coordinates; {fix}")
    print(f"standard deviation of the bias {bias.std():.3f}, of a coordinate {searches['plain'][1].std():.3f}")
    print(f"plain and corrected ranking share {shared:.3f} of their first ten\n")

    print(f"{'':34}" + "".join(f"{column:>13}" for column in COLUMNS))
    rows = {}
    for name, kind in KINDS.items():
        if options.only not in name:
            continue
        rows[name] = row = measure(kind, searches, exact)
        print(f"{name:34}" + "".join(f"{row[column]:>13.3f}" for column in COLUMNS), flush=True)
    report = {"command": sys.argv, "faiss": faiss.__version__, "shared": shared, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
