"""A Parquet file for viewers of embeddings, such as Embedding Atlas or Spotlight: one row per pair.

Columns: `number` of the pair, `path` of the image and `text` if they are known, DataComp's `uid`, `popularity`, `zeta`
and `rank` of y, the same of x with the prefix `x_`, `nearest` and `nearest_score` (the pair whose y is most similar to
this one, and their cosine), `projection_x` and `projection_y`.

The projection is the one onto the first two principal components of y (PCA of the unit vectors). It is linear, so
distances in it are never larger than the real ones, and it shows only the largest differences.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr import files
from nuclr.data.formats.stored_texts import StoredTexts
from nuclr.errors import require
from nuclr.popularity.cells import kmeans, nearest_center
from nuclr.popularity.neighbors import nearest
from nuclr.popularity.rows import READ, Rows
from nuclr.studies.popularity.inputs import Names
from nuclr.studies.popularity.sides import SidePopularity, WeightedPairs

WRITTEN = 2**16  # rows of a row group
EXACT_SCORES = 2**32  # up to this many, the nearest item is searched among all: 65,536 x 65,536
MOST_CELLS, PROBED = 8192, 8  # cells of similar items above it, and how many of them are searched
SAMPLED = 2**17  # items from which the centers of the cells are computed
QUERIES, CANDIDATES = 2048, 16_384  # of a tile of scores


def write_viewer(
    path: Path, pairs: WeightedPairs, sides: dict[str, SidePopularity], names: Names, uids: StoredTexts | None = None
) -> None:
    """Write the table.

    Args:
        path: the file to create.
        pairs: the features.
        sides: the popularity of "y" and, unless both sides are views of the same items, of "x".
        names: texts and file names.
        uids: DataComp's identifiers of the pairs, if they are known.

    Raises:
        UserError: if pyarrow is not installed.
        OSError: if the file cannot be written.

    """
    pyarrow, parquet = require("pyarrow", purpose=f"--table {path}"), require("pyarrow.parquet")
    features = Rows(pairs.y, torch.float32, unit=pairs.normalize)
    projection, (row, score) = project(features), nearest_items(features)
    with files.write_atomically(path) as file:
        writer = None
        for start in range(0, len(features), WRITTEN):
            block = np.arange(start, min(start + WRITTEN, len(features)))
            columns = _columns(block, pairs, sides, names) | ({} if uids is None else {"uid": uids.take(block)})
            columns |= {
                "nearest": names.numbers_of_rows("y", row[block]),
                "nearest_score": score[block],
                "projection_x": projection[block, 0],
                "projection_y": projection[block, 1],
            }
            table = pyarrow.table(columns)
            if writer is None:
                writer = parquet.ParquetWriter(file, table.schema)
            writer.write_table(table)
        assert writer is not None
        writer.close()


def _columns(block: np.ndarray, pairs: WeightedPairs, sides: dict[str, SidePopularity], names: Names) -> dict[str, Any]:
    """Return the names and the popularity of some pairs."""
    columns: dict[str, Any] = {"number": names.numbers_of_rows("y", block)}
    position = pairs.links[torch.from_numpy(block), 0].numpy()
    x_rows = pairs.x_row[torch.from_numpy(position)].numpy()
    kinds = {side: words.kind for side, words in names.words.items()}
    labeled = {"y": block} if names.views else {"x": x_rows, "y": block}
    for side, rows in labeled.items():
        if names.labels[side]:
            name = "path" if kinds[side] == "image" else "text"
            columns[f"{side}_{name}" if name in columns else name] = names.labels_of_rows(side, rows.tolist())
    for solved in sides.values():
        own, prefix = (block, "") if solved.name == "y" else (position, "x_")
        columns |= {
            f"{prefix}popularity": solved.popularity[own],
            f"{prefix}zeta": solved.zeta[own],
            f"{prefix}rank": solved.rank[own],
        }
    return columns


def project(features: Rows) -> np.ndarray:
    """Return the projection onto the first two principal components, (n, 2) float32.

    The sign of a component is such that its largest entry is positive. If there is only one dimension, the second
    coordinate is zero.
    """
    width = features.shape[1]
    total, moments = torch.zeros(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    for rows in features.tiles(READ):
        block = features[rows].double()
        total += block.sum(dim=0)
        moments += block.T @ block
    mean = total / len(features)
    _, vectors = torch.linalg.eigh(moments / len(features) - torch.outer(mean, mean))
    basis = vectors.flip(1)[:, :2]
    basis = basis * basis.gather(0, basis.abs().argmax(dim=0, keepdim=True)).sign()
    basis = torch.nn.functional.pad(basis, (0, 2 - basis.shape[1]))
    parts = [((features[rows].double() - mean) @ basis).float() for rows in features.tiles(READ)]
    return torch.cat(parts).numpy()


def nearest_items(features: Rows, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the most similar other row of each row, and their score.

    Up to 65,536 rows all scores are computed. Of more, rows are grouped into cells by k-means, and each row searches
    the cells whose centers are nearest to the center of its own. So the nearest row is missed if it lies elsewhere.

    Args:
        features: (n, d), of unit norm when they are read.
        seed: of the random numbers.

    Returns:
        Rows, (n,) int64, and scores, (n,) float32.

    """
    n = len(features)
    if n * n <= EXACT_SCORES:
        everything = features[:]
        scores, rows = nearest(everything, everything, 1, exclude=torch.arange(n), normalize=True)
        return rows[:, 0].numpy(), scores[:, 0].float().numpy()
    generator = torch.Generator().manual_seed(seed)
    count = min(MOST_CELLS, 4 * math.isqrt(n))
    sample = torch.randperm(n, generator=generator)[:SAMPLED].sort().values
    centers = kmeans(features[sample], count, 5, generator)
    home = torch.cat([nearest_center(features[rows], centers) for rows in features.tiles(READ)])
    members = torch.split(home.argsort(stable=True), torch.bincount(home, minlength=count).tolist())
    best_row, best_score = torch.zeros(n, dtype=torch.long), torch.full((n,), -torch.inf)
    probed = torch.cat([(part @ centers.T).topk(min(PROBED, count), dim=1).indices for part in centers.split(QUERIES)])
    for cell, own in enumerate(members):
        if not len(own):
            continue
        # Its own cell may hold no other row, and empty cells hold none.
        others = torch.cat([own, *(members[other] for other in probed[cell].tolist() if other != cell)])
        if len(others) < 2:
            others = sample[:CANDIDATES]
        for few, many in _tiles(own, others):
            scores = features[few] @ features[many].T
            scores[few[:, None] == many] = -torch.inf
            score, column = scores.max(dim=1)
            better = score > best_score[few]
            best_score[few[better]], best_row[few[better]] = score[better], many[column[better]]
    return best_row.numpy(), best_score.numpy()


def _tiles(own: Tensor, others: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for few in own.split(QUERIES):
        for many in others.split(CANDIDATES):
            yield few, many
