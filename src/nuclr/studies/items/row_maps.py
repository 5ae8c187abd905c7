"""Results per row of vectors in shards, which a command that was killed leaves for the next one.

A map computes each block of rows from these rows alone, such as the bias of items, or what queries find. Each block is
a file in a hidden folder of the command's output. So whatever kills the process, the same command computes only what is
missing. Vectors are never in memory together, only the results are.
"""

import contextlib
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nuclr
from nuclr import files
from nuclr.arrays import Rows
from nuclr.data.vectors import Vectors
from nuclr.errors import UserError
from nuclr.stacked import Stacked

FOLDER = ".unfinished"

RowMap = Callable[..., Tensor]  # called with a name, rows and a function of them; see `_map_blocks`


@contextlib.contextmanager
def row_maps(
    out: Path | None,
    sources: Sequence[Vectors | None],
    settings: Sequence[Any],
) -> Iterator[RowMap]:
    """Give a function that maps others over rows. Its results are kept in `out` until the block ends without an error.

    Args:
        out: the folder of the command. None: nothing is kept.
        sources: the checked vectors that the command reads. If none is in shards, nothing is kept.
        settings: everything else that results depend on, as JSON.

    Yields:
        A function of the arguments of `_map_blocks` after the folder.

    Raises:
        UserError: if another process uses the folder.

    """
    stored = [vectors.rows.stored for vectors in sources if vectors is not None]
    if out is None or not any(isinstance(rows, Stacked) for rows in stored):
        yield lambda name, rows, compute, height=None: compute(rows, slice(0, len(rows)))  # noqa: ARG005
        return
    # Another number of threads sums in another order, so that a fit would differ by rounding.
    content = [nuclr.__version__, torch.get_num_threads(), settings, [_stamp(rows) for rows in stored]]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    folder = out / f"{FOLDER}-{key}"
    folder.mkdir(exist_ok=True)
    with files.take_lock(folder, "command", "--out "):
        yield partial(_map_blocks, folder)
    for path in out.glob(f"{FOLDER}-*"):  # also of other inputs or settings
        with contextlib.suppress(UserError), files.take_lock(path, "command"):  # unless one is using it
            shutil.rmtree(path)


def _stamp(rows: Tensor | Stacked) -> Any:
    """Return what changes if vectors do: place in their files, size and time of these, or a hash."""
    if isinstance(rows, Stacked):
        return [[str(part.source), part.offset, *files.file_stamp(part.source)] for part in rows.parts]
    return hashlib.sha256(rows.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def _map_blocks(
    folder: Path,
    name: str,
    rows: Rows,
    compute: Callable[[Rows, slice], Tensor],
    height: int | None = None,
) -> Tensor:
    """Return what `compute` returns for all rows.

    Args:
        folder: where the results of blocks are kept.
        name: of the results, different for each map of a command.
        rows: the rows.
        compute: returns the results of consecutive rows, (m, ...), from these rows and their slice.
        height: rows per block. None: as many as are read at a time.

    Returns:
        The results, (n, ...).

    """
    begin = time.monotonic()
    cpu = time.process_time()
    computed = 0
    paths = [folder / f"{name}-{tile.start}.npy" for tile in rows.tiles(height)]
    for path, tile in zip(paths, rows.tiles(height), strict=True):
        if not path.is_file():
            files.write_npy(path, compute(rows.part(tile), tile).cpu().numpy())
            computed += tile.stop - tile.start
        if len(paths) > 1 and (sys.stderr.isatty() or tile.stop == len(rows)):
            rates = (computed / (time.monotonic() - begin), computed / max(time.process_time() - cpu, 1e-9))
            line = f"{name}: {tile.stop:,} of {len(rows):,} rows, {computed:,} computed now: {rates[0]:,.0f} per second"
            end = "\n" if tile.stop == len(rows) else "\r"
            print(f"{line}, {rates[1]:,.0f} per second of one core", end=end, file=sys.stderr, flush=True)  # noqa: T201
    return torch.from_numpy(np.concatenate([np.load(path) for path in paths]))
