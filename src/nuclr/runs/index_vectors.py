"""Vectors that a faiss index holds: flat indexes, inverted lists and graphs, with the ids of their items.

Quantized indexes keep codes instead of vectors; what they give back is approximate.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.errors import UserError, printable, require

SUFFIXES = (".faiss", ".index")


@dataclass(frozen=True)
class IndexVectors:
    """Vectors of an index.

    Attributes:
        features: (n, d) float32.
        ids: (n,), of the items; None if the index numbers them from 0.
        kind: class of the index, such as "IndexIVFPQ".
        exact: False if the index stores compressed vectors.

    """

    features: np.ndarray
    ids: np.ndarray | None
    kind: str
    exact: bool


def read_index_vectors(path: Path) -> IndexVectors:
    """Read the vectors of a faiss index.

    Args:
        path: what `faiss.write_index` wrote.

    Returns:
        The vectors, in the order of the index; those of inverted lists in the order of their ids.

    Raises:
        UserError: if faiss is not installed, the file cannot be read, or the index cannot give its vectors back.

    """
    faiss = require("faiss", purpose=str(path))
    try:
        outer = faiss.read_index(str(path))  # it owns the indexes inside, so it must outlive them
    except RuntimeError as error:
        raise UserError(f"{path}: cannot be read as a faiss index ({_reason(error)})") from None
    index, kind, ids = outer, type(outer).__name__, None
    # `reconstruct_n` of IndexIDMap ends the process, so the index inside is read.
    while isinstance(index, faiss.IndexIDMap):
        ids = faiss.vector_to_array(index.id_map)
        index = faiss.downcast_index(index.index)
        kind = f"{kind}({type(index).__name__})"
    try:
        if isinstance(index, faiss.IndexIVFFastScan):  # faiss 1.15 crashes
            raise RuntimeError("not implemented for fast scan")
        if isinstance(index, faiss.IndexIVF):
            features, rows = _read_lists(faiss, index)
            ids = rows if ids is None else ids[rows]
        else:
            features = index.reconstruct_n(0, index.ntotal)
    except RuntimeError as error:
        raise UserError(
            f"{path}: {kind} does not give its vectors back ({_reason(error)}); save the vectors themselves as .npy"
        ) from None
    if ids is not None and np.array_equal(ids, np.arange(len(ids))):
        ids = None
    return IndexVectors(features, ids, kind, _is_exact(faiss, index))


def _read_lists(faiss: Any, index: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors of inverted lists, in ascending order of their ids, and the ids."""
    lists = index.invlists
    parts = [faiss.rev_swig_ptr(lists.get_ids(n), lists.list_size(n)).copy() for n in range(index.nlist)]
    ids = np.sort(np.concatenate(parts)).astype(np.int64)
    index.set_direct_map_type(faiss.DirectMap.Hashtable)
    return index.reconstruct_batch(ids), ids


def _is_exact(faiss: Any, index: Any) -> bool:
    """Return whether an index stores float32 vectors and not codes."""
    if isinstance(index, faiss.IndexPreTransform):
        return index.index.d >= index.d and _is_exact(faiss, faiss.downcast_index(index.index))
    if isinstance(index, faiss.IndexHNSW | faiss.IndexNSG):
        return _is_exact(faiss, faiss.downcast_index(index.storage))
    if isinstance(index, faiss.IndexRefine):
        return _is_exact(faiss, faiss.downcast_index(index.refine_index))
    return isinstance(index, faiss.IndexFlat | faiss.IndexIVFFlat)


def _reason(error: Exception) -> str:
    """Return the part of a message of faiss that follows the place in its source."""
    text = str(error).splitlines()[0]
    return printable(text.rpartition(": ")[2][:200])
