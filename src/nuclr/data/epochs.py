"""Epochs: which pairs are used, in which order, in which batch, on which process.

An epoch is a permutation of the usable pairs that depends only on (seed, epoch). It is cut into global batches of B.
The fewer than B pairs that remain at the end of the permutation are not used, so each epoch skips different ones.
Process r of K takes the r-th part of every global batch: K processes with b pairs each see the same global batches as
one process with K b. A run that stopped within an epoch resumes by drawing the same permutation and starting at its
step.
"""

from collections.abc import Iterator

import numpy as np

from nuclr.data.pairs import Pairs
from nuclr.errors import UserError


def epoch_order(
    pairs: Pairs,
    seed: int,
    epoch: int,
    one_pair_per_x: bool = False,
    numbers: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Return the numbers of the pairs of an epoch, in its order.

    Args:
        pairs: the source of pairs.
        seed: seed of the run.
        epoch: number of the epoch.
        one_pair_per_x: use every x once per epoch, with one of its pairs drawn at random in each epoch. Otherwise every
            pair is used once.
        numbers: the usable pairs (see `usable`); by default all. Leaving out pairs does not change the order of the
            others.
        groups: (n,), the group of each pair (see `ViewGroups`): use every group once per epoch, with one of its pairs
            drawn at random.

    Returns:
        Distinct numbers, int64.

    Example:
        >>> from nuclr.data import open_pairs
        >>> epoch_order(open_pairs("builtin:n=8"), seed=0, epoch=0)
        array([2, 4, 3, 6, 5, 0, 1, 7])

    """
    order = np.random.default_rng([seed, epoch]).permutation(len(pairs))
    if numbers is not None:
        is_used = np.zeros(len(pairs), bool)
        is_used[numbers] = True
        order = order[is_used[order]]
    if groups is None and one_pair_per_x:
        groups = pairs.x_id
    if groups is not None:
        _, first = np.unique(groups[order], return_index=True)
        order = order[np.sort(first)]
    return order


def steps_per_epoch(order: np.ndarray, global_batch: int) -> int:
    """Return the number of full global batches in an epoch.

    Args:
        order: the pairs of the epoch, from `epoch_order`.
        global_batch: pairs per batch, over all processes.

    Raises:
        UserError: if the epoch has fewer pairs than one batch.

    Example:
        >>> steps_per_epoch(np.arange(100), 32)
        3

    """
    if len(order) < 2:
        raise UserError(
            f"an epoch has {len(order)} sample, and training needs at least 2; "
            "with data.one_pair_per_x, the pairs need different x"
        )
    if len(order) < global_batch:
        raise UserError(
            f"data.batch_size={global_batch} is larger than the {len(order)} samples of an epoch; "
            f"set it to {len(order)} or less"
        )
    return len(order) // global_batch


def batches(
    order: np.ndarray, global_batch: int, rank: int = 0, world: int = 1, start: int = 0
) -> Iterator[np.ndarray]:
    """Yield this process's part of every full global batch.

    Args:
        order: the pairs of the epoch, from `epoch_order`.
        global_batch: pairs per batch, over all processes.
        rank: number of this process.
        world: number of processes.
        start: number of the first step to yield, greater than 0 to resume within an epoch.

    Yields:
        Numbers of pairs, (global_batch / world,).

    Raises:
        UserError: if the batch cannot be divided among the processes, or is larger than the epoch.

    Example:
        >>> list(batches(np.arange(5), global_batch=2))
        [array([0, 1]), array([2, 3])]

    """
    if global_batch % world:
        raise UserError(
            f"data.batch_size={global_batch} cannot be divided among {world} processes; make it a multiple of {world}"
        )
    order, local = np.asarray(order), global_batch // world
    for step in range(start, steps_per_epoch(order, global_batch)):
        begin = step * global_batch + rank * local
        yield order[begin : begin + local]


def all_batches(numbers: np.ndarray, batch: int, rank: int = 0, world: int = 1) -> Iterator[np.ndarray]:
    """Yield every number once, for evaluation and embedding.

    Args:
        numbers: numbers of pairs.
        batch: pairs per batch of this process.
        rank: number of this process.
        world: number of processes; each gets a consecutive share of `numbers`.

    Yields:
        Numbers of pairs, (batch,); the last batch may be smaller.

    Example:
        >>> list(all_batches(np.arange(5), batch=2))
        [array([0, 1]), array([2, 3]), array([4])]

    """
    share = np.array_split(numbers, world)[rank]
    return (share[begin : begin + batch] for begin in range(0, len(share), batch))
