"""Folders of embeddings as clip-retrieval writes them."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SIZES = (7, 1, 12)  # rows of the parts


def make_features(seed: int = 0, rows: int = sum(SIZES), width: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Return float16 features of images and texts, of any norm."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, width)) + 0.5
    return (3 * x).astype(np.float16), (x + 0.4 * rng.normal(size=x.shape)).astype(np.float16)


def slices(sizes=SIZES) -> list[slice]:
    ends = np.cumsum([0, *sizes]).tolist()
    return [slice(start, stop) for start, stop in pairwise(ends)]


def make_clip_retrieval(folder: Path, x: np.ndarray, y: np.ndarray, sizes=SIZES, metadata: bool = True) -> Path:
    """Write the parts 0, 1, ... with image_path and caption."""
    for name in ("img_emb", "text_emb", *(["metadata"] if metadata else [])):
        (folder / name).mkdir(parents=True)
    for number, rows in enumerate(slices(sizes)):
        np.save(folder / "img_emb" / f"img_emb_{number}.npy", x[rows])
        np.save(folder / "text_emb" / f"text_emb_{number}.npy", y[rows])
        if metadata:
            row = range(len(x))[rows]
            columns = {"image_path": [f"{k}.jpg" for k in row], "caption": [f"caption {k}" for k in row]}
            path = folder / "metadata" / f"metadata_{number}.parquet"
            pq.write_table(pa.table(columns), path, row_group_size=5)
    return folder
