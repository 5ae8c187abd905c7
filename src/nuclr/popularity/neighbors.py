"""The k best candidates of every query under score minus bias, computed in tiles.

Only k candidates per query are kept. The gallery may be a memory-mapped array: it is read in blocks of rows, once per
block of queries.
"""

import torch
from torch import Tensor

from nuclr.popularity.problem import NORMALIZE, Array, Indices, as_tensor, as_vector
from nuclr.popularity.tiles import feature_tiles, matrix_size

QUERY_ROWS, GALLERY_ROWS = 2048, 16_384  # of a tile: 128 MiB of float32 scores


@torch.no_grad()
def nearest(
    queries: Array,
    gallery: Array,
    k: int,
    bias: Array | None = None,
    exclude: Indices | None = None,
    *,
    normalize: bool = False,
    hint: str = NORMALIZE,
) -> tuple[Tensor, Tensor]:
    """Find the k candidates with the highest score minus bias for every query.

    Args:
        queries: Features, (n_queries, d), unit norm.
        gallery: Features of the candidates, (n_gallery, d), unit norm.
        k: Number of candidates per query.
        bias: Subtracted from the scores of each candidate, (n_gallery,).
        exclude: Per query, the row of the gallery that it must not find, (n_queries,); -1 for none. If the queries are
            the gallery itself, pass `range(n)` as an array, so that no item finds itself.
        normalize: Scale all features to unit norm first.
        hint: How the caller's user asks for it, for the message.

    Returns:
        Scores minus bias, (n_queries, k), highest first, and the rows of the candidates, (n_queries, k) int64.

    Raises:
        ValueError: If an argument has a wrong type, shape or value.

    Example:
        >>> scores, rows = nearest(torch.eye(3), torch.eye(3), k=1, bias=torch.tensor([0.0, 2.0, 0.0]))
        >>> rows[:, 0].tolist()
        [0, 0, 2]

    """
    (n_queries, width), (n_gallery, gallery_width) = matrix_size("queries", queries), matrix_size("gallery", gallery)
    if width != gallery_width:
        raise ValueError(f"queries has {width} columns and gallery {gallery_width}; give features of one model")
    if not 1 <= k <= n_gallery - (exclude is not None):
        most = n_gallery - (exclude is not None)
        raise ValueError(f"k={k}; allowed: 1 to {most}, the number of candidates that a query can find")
    subtracted = None if bias is None else as_vector("bias", bias, n_gallery)
    excluded = None if exclude is None else as_tensor("exclude", exclude, lists=True).long()
    if excluded is not None and excluded.shape != (n_queries,):
        raise ValueError(f"exclude has shape {tuple(excluded.shape)}; it must be ({n_queries},)")
    best_scores, best_rows = [], []
    for query_rows, block in feature_tiles("queries", queries, normalize, QUERY_ROWS, hint):
        scores, rows = block.new_empty(len(block), 0), torch.empty(len(block), 0, dtype=torch.long, device=block.device)
        for gallery_rows, candidates in feature_tiles("gallery", gallery, normalize, GALLERY_ROWS, hint):
            tile = block @ candidates.to(block).T
            if subtracted is not None:
                tile -= subtracted[gallery_rows].to(tile)
            if excluded is not None:
                own = excluded[query_rows].to(block.device) - gallery_rows.start
                inside = ((own >= 0) & (own < tile.shape[1])).nonzero().flatten()
                tile[inside, own[inside]] = -torch.inf
            tile_scores, tile_rows = tile.topk(min(k, tile.shape[1]), dim=1)
            scores = torch.cat([scores, tile_scores], dim=1)
            rows = torch.cat([rows, tile_rows + gallery_rows.start], dim=1)
            scores, order = scores.topk(min(k, scores.shape[1]), dim=1)
            rows = rows.gather(1, order)
        best_scores.append(scores)
        best_rows.append(rows)
    return torch.cat(best_scores), torch.cat(best_rows)
