r"""Export embeddings as a faiss index with the popularity correction built in.

The index holds the items with one more coordinate, (g, -b), where b is the bias of the item (`PopularityCorrection`). A
linear map in front of it appends the constant one to every query, so queries of the old width work unchanged, and their
inner products are the corrected scores <q, g> - b:

    faiss.IndexPreTransform( q -> (q, 1) ) -> IndexFlatIP | IndexIVFFlat | IndexHNSWFlat, width d + 1

The map applies to what is *added* as well, and would give new items a bias of -1, which puts them first in every
search. So new items go to the inner index, with their own bias: `add_items`.
"""

import math
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from nuclr.errors import UserError, require
from nuclr.popularity import PopularityCorrection
from nuclr.popularity.kernel import free_memory
from nuclr.popularity.problem import Array
from nuclr.popularity.tiles import ROWS, feature_tiles
from nuclr.runs.vectors import Vectors, check_rows, open_vectors, split_argument

Kind = Literal["flat", "ivf", "hnsw"]

INDEX, CORRECTION, IDS = "index.faiss", "correction.safetensors", "ids.npy"
POINTS_PER_LIST = 39, 256  # fewest and most items per list that faiss trains inverted lists on
PROBES, NEIGHBORS, EF_CONSTRUCTION, EF_SEARCH = 16, 32, 200, 128
OPTIONS: dict[str, tuple[str, ...]] = {
    "flat": (),
    "ivf": ("lists", "probes"),
    "hnsw": ("neighbors", "ef_construction", "ef_search"),
}


def write(
    source: Path,
    folder: Path,
    bank: str | None = None,
    correction: Path | None = None,
    index: str = "flat",
    normalize: bool = False,
    temperature: float | None = None,
    strength: float | None = None,
    **options: int,
) -> list[str]:
    """Write `index.faiss` and `correction.safetensors`, and `ids.npy` if the items come from an index with ids.

    Args:
        source: vectors of the items, PATH or PATH:COLUMN as `nuclr hubness` takes them.
        folder: an empty folder.
        bank: queries to fit the correction on, in the same forms. If they have a column like that of the items, they
            choose from that column, else from the items.
        correction: a file of `nuclr hubness` or `PopularityCorrection.save`, instead of a bank.
        index: "flat", "ivf" or "hnsw".
        normalize: scale all vectors to unit norm; the index scales its queries too.
        temperature: of the correction. None: the default.
        strength: of the correction. None: the default.
        options: of `build_index`.

    Returns:
        Lines that say what was written.

    Raises:
        UserError: if something is wrong with the vectors, the bank, the correction or an option.

    """
    check_options(index, options)
    if (bank is None) == (correction is None):
        raise UserError(
            "--to faiss needs either --bank QUERIES or --correction FILE, which corrects the index; without a log of "
            "queries, name the items themselves as the bank"
        )
    faiss = require("faiss", purpose="--to faiss")
    items = open_vectors(str(source), "y")
    if correction is not None:
        fix = _load(correction, items, normalize, temperature, strength)
        check_rows(items, fix.normalize)
    else:
        assert bank is not None
        fix = _fit(bank, items, normalize, temperature, strength)
    _refuse_larger_than_memory(items)
    built = build_index(items.features, fix, index, **options)
    faiss.write_index(built, str(folder / INDEX))
    fix.save(folder / CORRECTION)
    notes = []
    if items.index is not None:
        notes.append(f"{items.name} holds compressed vectors ({items.index}), so the items are approximate")
    if items.ids is not None:
        np.save(folder / IDS, items.ids)
        notes.append(f"The index numbers its items from 0; {IDS} has the id of each in {items.name}")
    return [
        f"{len(items):,} items of width {items.features.shape[1]} in {INDEX}: {describe(built)}",
        f"Search it with faiss.read_index and queries of width {items.features.shape[1]}"
        f"{'' if fix.normalize else ' and unit norm'}; {CORRECTION} is for new items (nuclr.export.index.add_items)",
        *notes,
    ]


def check_options(index: str, options: dict[str, int]) -> None:
    """Refuse an unknown kind of index, and options of another kind.

    Raises:
        UserError: names the option.

    """
    if index not in get_args(Kind):
        raise UserError(f"--index {index}: unknown kind of index; use one of {', '.join(get_args(Kind))}")
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if name not in OPTIONS[index]:
            kind = next((kind for kind, names in OPTIONS.items() if name in names), "no kind of index")
            raise UserError(f"{option} belongs to --index {kind}, not to --index {index}")
        if value < 1:
            raise UserError(f"{option} {value}: needs a number of at least 1")


def _load(
    path: Path, items: Vectors, normalize: bool, temperature: float | None, strength: float | None
) -> PopularityCorrection:
    for option, value in (("--temperature", temperature), ("--strength", strength)):
        if value is not None:
            raise UserError(f"{option} is part of --correction {path}; leave it out, or give --bank instead")
    fix = PopularityCorrection.load(path)
    fix.normalize = fix.normalize or normalize
    width = fix.dimensions
    if width != items.features.shape[1]:
        raise UserError(
            f"--correction {path} has {width} columns and {items.name} {items.features.shape[1]}; "
            "both must come from the same model"
        )
    return fix


def _fit(
    bank: str, items: Vectors, normalize: bool, temperature: float | None, strength: float | None
) -> PopularityCorrection:
    """Fit the correction on a bank: on its queries, and on its items if it has a column of them."""
    path, column = split_argument(bank)
    queries = open_vectors(bank, "x", training=True)
    candidates: Vectors | None = None
    if column is None and queries.column is not None and items.column not in (None, queries.column):
        candidates = open_vectors(f"{path}:{items.column}", "y", training=True)
    for vectors in (queries, *(() if candidates is None else (candidates,))):
        if vectors.features.shape[1] != items.features.shape[1]:
            raise UserError(
                f"--bank {vectors.name} has {vectors.features.shape[1]} columns and {items.name} "
                f"{items.features.shape[1]}; both must come from the same model (FILE:NAME names another array)"
            )
    for vectors in (items, queries, *(() if candidates is None else (candidates,))):
        check_rows(vectors, normalize)
    try:
        fix = PopularityCorrection(temperature, strength, normalize=normalize)
        return fix.fit(queries.features, (items if candidates is None else candidates).features)
    except ValueError as error:
        raise UserError(f"--bank {bank}: {error}") from None


def _refuse_larger_than_memory(items: Vectors) -> None:
    size, free = 4 * len(items) * (items.features.shape[1] + 1), free_memory(torch.device("cpu"))
    if size > 0.8 * free:
        raise UserError(
            f"{items.name}: the index needs {size / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free; "
            "faiss builds an index in memory"
        )


def build_index(
    vectors: Array,
    correction: PopularityCorrection | None,
    kind: str = "flat",
    *,
    lists: int | None = None,
    probes: int = PROBES,
    neighbors: int = NEIGHBORS,
    ef_construction: int = EF_CONSTRUCTION,
    ef_search: int = EF_SEARCH,
) -> Any:
    """Build a faiss index of inner products that takes ordinary queries and ranks by corrected scores.

    Args:
        vectors: Features of the items, (n, d), unit norm unless the correction normalizes; read in blocks.
        correction: A fitted correction. None: an index of the same kind without correction.
        kind: "flat" (exact), "ivf" (inverted lists) or "hnsw" (a graph).
        lists: Of "ivf": number of lists. None: the square root of n.
        probes: Of "ivf": number of lists that a query searches.
        neighbors: Of "hnsw": number of neighbors per item in the graph (M).
        ef_construction: Of "hnsw": how many candidates are kept while the graph is built.
        ef_search: Of "hnsw": how many candidates a search keeps; at least the number of items asked for.

    Returns:
        The index, which `faiss.write_index` writes.

    Raises:
        UserError: If faiss is not installed, or the kind is unknown.
        ValueError: If the vectors have a wrong type, shape or norm, or the correction is not fitted.

    Example:
        >>> fix = PopularityCorrection(temperature=0.5).fit(np.eye(3), np.eye(3))  # doctest: +SKIP
        >>> build_index(np.eye(3), fix).search(np.eye(3, dtype="float32"), 1)[1]  # doctest: +SKIP
        array([[0], [1], [2]])

    """
    check_options(kind, {})
    faiss = require("faiss", purpose="build_index")
    n, width = len(vectors), int(vectors.shape[1])
    inner_width = width if correction is None else width + 1
    if kind == "flat":
        inner = faiss.IndexFlatIP(inner_width)
    elif kind == "ivf":
        count = lists if lists is not None else max(1, min(round(math.sqrt(n)), n // POINTS_PER_LIST[0]))
        if count > n:
            raise UserError(f"--lists {count}: there are only {n} items")
        quantizer = faiss.IndexFlatIP(inner_width)
        inner = faiss.IndexIVFFlat(quantizer, inner_width, count, faiss.METRIC_INNER_PRODUCT)
        inner.nprobe = min(probes, count)
        rows = np.linspace(0, n - 1, min(n, POINTS_PER_LIST[1] * count)).round().astype(np.int64)
        inner.train(_items(vectors[rows], correction))
    else:
        inner = faiss.IndexHNSWFlat(inner_width, neighbors, faiss.METRIC_INNER_PRODUCT)
        inner.hnsw.efConstruction, inner.hnsw.efSearch = ef_construction, ef_search
    for start in range(0, n, ROWS):
        inner.add(_items(vectors[start : start + ROWS], correction))
    if correction is None:
        return inner
    append_one = faiss.LinearTransform(width, width + 1, True)
    faiss.copy_array_to_vector(np.eye(width + 1, width, dtype=np.float32).ravel(), append_one.A)
    faiss.copy_array_to_vector(np.eye(1, width + 1, width, dtype=np.float32).ravel(), append_one.b)
    append_one.is_trained = True
    index = faiss.IndexPreTransform(append_one, inner)
    if correction.normalize:
        index.prepend_transform(faiss.NormalizationTransform(width, 2.0))
    return index


def _items(vectors: Array, correction: PopularityCorrection | None) -> np.ndarray:
    """Return rows for the inner index."""
    if correction is None:
        return np.concatenate([block.float().numpy() for _, block in feature_tiles("vectors", vectors, False)])
    return np.ascontiguousarray(correction.gallery(vectors).float().numpy())


def add_items(index: Any, correction: PopularityCorrection, vectors: Array) -> None:
    """Add new items to an exported index; rows that are in it stay as they are.

    Args:
        index: What `faiss.read_index` returned for an index of `nuclr export --to faiss`.
        correction: `PopularityCorrection.load` of the file next to it.
        vectors: Features of the new items, (n, d). Their numbers continue those of the index.

    Raises:
        ValueError: If `index` was not exported with a correction, or the vectors do not fit to the correction.

    Example:
        >>> index = faiss.read_index("out/index.faiss")  # doctest: +SKIP
        >>> fix = PopularityCorrection.load("out/correction.safetensors")  # doctest: +SKIP
        >>> add_items(index, fix, new_vectors)  # doctest: +SKIP

    """
    faiss = require("faiss", purpose="add_items")
    if not isinstance(index, faiss.IndexPreTransform):
        raise ValueError(f"index is {type(index).__name__}; give an index of nuclr export --to faiss")
    inner = faiss.downcast_index(index.index)
    rows = _items(vectors, correction)
    if rows.shape[1] != inner.d:
        raise ValueError(f"the correction gives rows of {rows.shape[1]} columns, and the index has {inner.d}")
    inner.add(rows)
    index.ntotal = inner.ntotal


def describe(index: Any) -> str:
    """Return the kind of an exported index in a few words."""
    faiss = require("faiss", purpose="describe")
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    if isinstance(inner, faiss.IndexIVFFlat):
        return f"inverted lists ({inner.nlist:,} lists, {inner.nprobe} searched), inner product"
    if isinstance(inner, faiss.IndexHNSWFlat):
        return f"HNSW graph (efSearch {inner.hnsw.efSearch}), inner product"
    return "flat (exact), inner product"
