"""Hubness on held-out queries: what a correction changes, and how well popularity predicts what is found often.

Training does not identify popularity as a density: s_ij + tau c_j with zeta_j + tau c_j is the same conditional model.
What popularity means can be measured instead: solved on some queries, it predicts how often each item is found by other
queries (N_k), and subtracting it makes the search fairer.
"""

import math
import warnings

import torch
from torch import Tensor

from nuclr.evaluation.ranks import rank_correlation
from nuclr.popularity import ConvergenceWarning, PopularityCorrection, hubness
from nuclr.popularity.problem import Array, Indices

K = 10
LARGEST = 4000  # anchors, and candidates: enough for a correlation, and about a second of work
MOST_CANDIDATES = 100_000  # that the held-out anchors search
PASSES = 150  # of the solver: a larger residual hardly changes ranks


def hubness_change(
    bank: tuple[Array, Array],
    queries: Array,
    gallery: Array,
    links: Indices | None = None,
    temperature: float | None = None,
    k: int = K,
) -> dict[str, float]:
    """Measure the hubness of a gallery before and after correction.

    Args:
        bank: Features of queries, and of the candidates that they choose from, such as training pairs.
        queries: Features of held-out queries, (n_queries, d).
        gallery: Features of what they search, (n_gallery, d).
        links: Rows (query, right answer), (n, 2).
        temperature: Of the correction. None: the default of `PopularityCorrection`.
        k: How many items a query looks at; at most the size of the gallery.

    Returns:
        `never_found`, `skewness` and, with links, `recall@1`, each also with the suffix `_corrected`; with links
        `recall@1_error`, the half-width of the 95 % interval of the gain in recall@1, paired over queries; and
        `correlation`, the rank correlation of the bias with N_k (NaN if one of the two is constant).

    Raises:
        ValueError: If an argument has a wrong type or shape.

    Example:
        >>> x = torch.nn.functional.normalize(torch.arange(24.0).sin().reshape(8, 3), dim=1)
        >>> change = hubness_change((x[:4], x[4:]), x[:4], x[4:], [[0, 1], [1, 0]], k=2)
        >>> sorted(change)[:2]
        ['correlation', 'never_found']

    """
    fix = _fit(PopularityCorrection(temperature), *bank)
    bias = fix.bias(gallery)
    change: dict[str, float] = {}
    hits: list[Tensor] = []
    for suffix, subtracted in (("", None), ("_corrected", bias)):
        found = hubness(queries, gallery, min(k, len(gallery)), bias=subtracted)
        change |= {f"never_found{suffix}": found.never_found, f"skewness{suffix}": found.skewness}
        if links is not None:
            hits.append(found.hits(links, 1).double())
            change[f"recall@1{suffix}"] = float(hits[-1].mean())
        if subtracted is None:
            change["correlation"] = rank_correlation(bias, found.counts)
    if hits:
        gain = hits[1] - hits[0]
        change["recall@1_error"] = 1.96 * float(gain.std(correction=0)) / math.sqrt(len(gain))
    return change


def popularity_agreement(
    anchors: Array, candidates: Array, temperature: float, k: int = K, *, normalize: bool = False
) -> float:
    """Return how well popularity predicts what other queries find.

    Popularity is solved with every other anchor. It is compared with N_k of the remaining anchors. At most 4,000 of
    each, and 100,000 candidates, are used, evenly spaced.

    Args:
        anchors: Features of the queries, (n_x, d).
        candidates: Features of the candidates, (n_y, d).
        temperature: Of the popularity problem.
        k: How many candidates an anchor finds.
        normalize: Scale all features to unit norm.

    Returns:
        The rank correlation of zeta with N_k; NaN with fewer than four anchors or no more than k candidates.

    Raises:
        ValueError: If an argument has a wrong type or shape.

    Example:
        >>> x = torch.nn.functional.normalize(torch.arange(90.0).sin().reshape(30, 3), dim=1)
        >>> -1 <= popularity_agreement(x[:15], x[15:], temperature=0.1) <= 1
        True

    """
    if len(anchors) < 4 or len(candidates) <= k:
        return math.nan
    if len(candidates) > MOST_CANDIDATES:
        candidates = candidates[_evenly_spaced(len(candidates), MOST_CANDIDATES)]
    fix = PopularityCorrection(temperature, strength=1.0, bank_size=LARGEST, normalize=normalize)
    _fit(fix, anchors[::2], candidates)
    others = anchors[1::2]
    found = hubness(others[_evenly_spaced(len(others), LARGEST)], candidates, k, normalize=normalize)
    return rank_correlation(fix.bias(candidates), found.counts)


def _evenly_spaced(total: int, size: int) -> Tensor:
    return torch.linspace(0, total - 1, min(size, total), dtype=torch.float64).round().long()


def _fit(fix: PopularityCorrection, queries: Array, candidates: Array) -> PopularityCorrection:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return fix.fit(queries, candidates, max_iterations=PASSES)
