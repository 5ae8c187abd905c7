"""Exact epochs: which pairs, in which order, in which batch, on which process.

An epoch is a permutation of the usable pairs, drawn from (seed, epoch) and nothing else. It is cut into global batches
of B; the fewer than B left over are the end of the permutation, so others each time. Process r of K takes the r-th
K-th of every global batch: K processes of b see the same global batches as one of K b. A run that stopped in mid-epoch
goes on by drawing the same permutation and starting at its step.
"""

from collections.abc import Iterator

import numpy as np

from nuclr.data.pairs import Pairs
from nuclr.errors import UserError


def epoch_order(
    pairs: Pairs, seed: int, epoch: int, one_pair_per_x: bool = False, numbers: np.ndarray | None = None
) -> np.ndarray:
    """Numbers of the pairs of this epoch in its order, each at most once, int64.

    `numbers` are the usable pairs (see `check.usable`), by default all. Leaving some out does not change the order of
    the others. With `one_pair_per_x` every image comes once, with a caption of its own drawn anew each epoch.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(pairs))
    if numbers is not None:
        wanted = np.zeros(len(pairs), bool)
        wanted[numbers] = True
        order = order[wanted[order]]
    if one_pair_per_x:
        _, first = np.unique(pairs.x_id[order], return_index=True)
        order = order[np.sort(first)]
    return order


def steps_per_epoch(order: np.ndarray, global_batch: int) -> int:
    """Full global batches in an epoch; `len(order) % global_batch` pairs are left over."""
    if len(order) < global_batch:
        raise UserError(
            f"batch size {global_batch} is larger than the {len(order)} samples of an epoch; make it smaller"
        )
    return len(order) // global_batch


def batches(
    order: np.ndarray, global_batch: int, rank: int = 0, world: int = 1, start: int = 0
) -> Iterator[np.ndarray]:
    """The slice (global_batch / world,) of this process of every full global batch, from step `start` on."""
    if global_batch % world:
        raise UserError(f"batch size {global_batch} cannot be divided among {world} processes; make it a multiple")
    local = global_batch // world
    for step in range(start, steps_per_epoch(order, global_batch)):
        begin = step * global_batch + rank * local
        yield order[begin : begin + local]


def all_batches(numbers: np.ndarray, batch: int, rank: int = 0, world: int = 1) -> Iterator[np.ndarray]:
    """Every number once, for evaluation and embedding: this process's consecutive share, the last batch smaller."""
    share = np.array_split(numbers, world)[rank]
    return (share[begin : begin + batch] for begin in range(0, len(share), batch))
