"""Apply a popularity correction to a folder of Parquet files on a Ray cluster, or on all cores of this machine.

    pip install '.[engines]'
    python examples/ray_apply.py FIX.safetensors GALLERY OUT [COLUMN]

FIX is what `nuclr hubness` or `PopularityCorrection.save` has written, and COLUMN ("embedding") holds the vectors. OUT
gets the same rows with a column `bias`: rank by the score minus it. The bias of an item depends on nothing but the item
and FIX, so this is a map: batches are computed anywhere in any order, and again if a worker dies.
"""

import sys

import numpy as np
import ray
import torch

from nuclr.popularity import PopularityCorrection

BATCH = 8192  # rows at a time: 25 MB at a width of 768


def add_bias(batch: dict[str, np.ndarray], stored: ray.ObjectRef, column: str) -> dict[str, np.ndarray]:
    torch.set_num_threads(1)  # Ray starts a worker per core
    fix: PopularityCorrection = ray.get(stored)  # from the shared memory of the machine
    # With center=True, each batch would have a constant of its own.
    return batch | {"bias": fix.bias(np.stack(batch[column]), center=False).numpy()}


def main() -> None:
    path, gallery, out, column = [*sys.argv[1:], "embedding"][:4]
    stored = ray.put(PopularityCorrection.load(path))  # workers need not see the file
    data = ray.data.read_parquet(gallery)
    data.map_batches(add_bias, batch_size=BATCH, fn_args=(stored, column)).write_parquet(out)


if __name__ == "__main__":
    main()
