"""Epochs: which pairs are used, in which order, in which batch, on which process.

An epoch is a permutation of the usable pairs that depends only on (seed, epoch). It is cut into global batches of B.
The fewer than B pairs that remain at the end of the permutation are not used, so each epoch skips different ones.
Process r of K takes the r-th part of every global batch: K processes with b pairs each see the same global batches as
one process with K b. A run that stopped within an epoch resumes by drawing the same permutation and starting at its
step.

A visit of an image may take m of its captions (`ViewGroups`). An image with five captions gives five pairs. If side y
has several views, the five pairs are one group: an epoch visits each group once, a visit takes m of its captions, and
the objective keeps one row of state per group. In general, a row that holds several x and several y is a group; in a
source without such rows, the pairs that share an x are a group if side y has several views, and the pairs that share a
y are one if side x has. Images are an exception: the views of an image are random augmentations of it
(`modalities.augment`).
"""

from collections.abc import Iterator

import numpy as np

from nuclr.data.pairs import SIDES, Pairs, SideName
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
        groups = pairs.sides["x"].ids
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
    if len(order) < max(2, global_batch):
        raise UserError(
            f"data.batch_size={global_batch}: an epoch has {len(order)} samples, at least 2 and one batch are needed; "
            "set a smaller data.batch_size, or with data.one_pair_per_x use pairs with different x"
        )
    return len(order) // global_batch


def batches(
    order: np.ndarray,
    global_batch: int,
    rank: int = 0,
    world: int = 1,
    start: int = 0,
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
    order = np.asarray(order)
    local = global_batch // world
    for step in range(start, steps_per_epoch(order, global_batch)):
        begin = step * global_batch + rank * local
        yield order[begin : begin + local]


def all_batches(
    numbers: np.ndarray,
    batch: int,
    rank: int = 0,
    world: int = 1,
) -> Iterator[np.ndarray]:
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


# -- views from several pairs ------------------------------------------------------------------------------------------


class ViewGroups:
    """Groups of pairs that belong together, and the views that a visit takes from them.

    Args:
        pairs: the source of pairs.
        x_views: the number of x that a visit takes; 1 if views of x do not come from several pairs.
        y_views: the same for y. At least one of both is greater than 1.
        numbers: the usable pairs (see `usable`); by default all.

    Attributes:
        row: (n,) int64, the number of each pair's group: its row in the objective's state. It does not depend on which
            pairs are usable.
        count: the number of groups.

    Raises:
        UserError: if no group has so many distinct items on a side, or both sides need views and the source does not
            have rows with several x and several y.

    Example:
        >>> from types import SimpleNamespace
        >>> sides = {"x": SimpleNamespace(ids=np.array([0, 0, 0, 1])), "y": SimpleNamespace(ids=np.arange(4))}
        >>> pairs = SimpleNamespace(label="list", group=None, sides=sides)
        >>> groups = ViewGroups(pairs, y_views=2)
        >>> groups.row
        array([0, 0, 0, 1])
        >>> groups.draw(seed=0, epoch=0)["y"](np.array([2, 3]))
        array([[2, 1],
               [3, 3]])

    """

    def __init__(
        self,
        pairs: Pairs,
        x_views: int = 1,
        y_views: int = 1,
        numbers: np.ndarray | None = None,
    ) -> None:
        views: dict[SideName, int] = {"x": x_views, "y": y_views}
        if pairs.group is not None:
            belongs = pairs.group
        elif x_views > 1 and y_views > 1:
            raise UserError(
                f"data.x.views={x_views} and data.y.views={y_views}: views on both sides need rows with several x and "
                f'several y, such as {{"en": [...], "de": [...]}}, and {pairs.label} has none; set one of them to 1'
            )
        else:
            belongs = pairs.sides["x" if y_views > 1 else "y"].ids
        distinct, row = np.unique(belongs, return_inverse=True)
        self.row = row.astype(np.int64)
        self.count = len(distinct)
        usable = np.arange(len(row)) if numbers is None else numbers
        self._sides = {
            side: _GroupedItems(self.row, self.count, pairs.sides[side].ids, usable, m)
            for side, m in views.items()
            if m > 1
        }
        for side, items in self._sides.items():
            if items.most < items.views:
                has = "several" if items.most == 1 else f"more than {items.most}"
                raise UserError(
                    f"data.{side}.views={items.views}: nothing in {pairs.label} has {has} distinct {side} that belong "
                    f"to it; set data.{side}.views to {items.most}{' or less' if items.most > 1 else ''}"
                )

    def draw(self, seed: int, epoch: int) -> dict[SideName, "DrawnViews"]:
        """Return the views of an epoch for the sides that have several.

        They depend only on (seed, epoch) and the number of the visited pair, so a resumed run and a run on several
        processes take the same views.
        """
        return {
            side: DrawnViews(items, np.random.default_rng([seed, epoch, 0, 0, SIDES.index(side), 1]))
            for side, items in self._sides.items()
        }

    def stored(self) -> dict[SideName, np.ndarray]:
        """Return the views of the sides of which a visit takes all items, always in the same order.

        Returns:
            Per side (count, m): the pairs whose items are the views of each group. A group with fewer than m items
            repeats them in turn; one without usable pairs has -1.

        Example:
            >>> from types import SimpleNamespace
            >>> sides = {"x": SimpleNamespace(ids=np.array([0, 1, 0, 1, 0])), "y": SimpleNamespace(ids=np.arange(5))}
            >>> ViewGroups(SimpleNamespace(label="list", group=None, sides=sides), y_views=3).stored()
            {'y': array([[0, 2, 4],
                   [1, 3, 1]])}

        """
        views = {}
        for side, drawn in self.draw(seed=0, epoch=0).items():
            items = self._sides[side]
            if drawn.all:
                used = items.size > 0
                views[side] = np.full((self.count, items.views), -1)
                views[side][used] = drawn(items.pair[items.start[used]])
        return views

    def position(self, side: SideName) -> np.ndarray:
        """Return (n,) int64, the first view that is the item of a pair, on a side in `stored`; 0 for unusable pairs."""
        items = self._sides[side]
        place = DrawnViews(items, np.random.default_rng()).place[items.of_pair] - items.start[self.row]
        return np.where(items.of_pair < 0, 0, place)


class _GroupedItems:
    """The distinct items of one side, sorted by group; `pair` is the first usable pair that has an item."""

    def __init__(
        self,
        row: np.ndarray,
        count: int,
        ids: np.ndarray,
        usable: np.ndarray,
        views: int,
    ) -> None:
        self.views = views
        self.n = len(row)
        key = row[usable] * (ids.max() + 1) + ids[usable]  # ascending by group, and by item within a group
        _, first, item = np.unique(key, return_index=True, return_inverse=True)
        self.pair = usable[first]
        self.group = row[self.pair]
        self.of_pair = np.full(self.n, -1, np.int64)
        self.of_pair[usable] = item
        self.size = np.bincount(self.group, minlength=count)
        self.start = np.cumsum(self.size) - self.size
        self.most = int(self.size.max(initial=0))


class DrawnViews:
    """The views of one side in one epoch: `views(numbers)` are the pairs whose items the visits of `numbers` take.

    The items of each group are put on a circle in random order. A visit takes the item of its pair and the m - 1 items
    that follow it. These are distinct, unless the group has fewer than m items; then they are repeated in turn. If no
    group has more than m items, a visit takes all, and always in the same order, so that each has a number of its own.
    """

    def __init__(self, items: _GroupedItems, random: np.random.Generator) -> None:
        self._items = items
        self.all = items.views == items.most
        # One random number per pair, so that the order of a group does not depend on bad samples in other groups.
        number = np.arange(items.n) if self.all else random.random(items.n)
        self._order = np.lexsort((number[items.pair], items.group))
        self.place = np.empty_like(self._order)
        self.place[self._order] = np.arange(len(self._order))

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Return (b, m) numbers of pairs for the visited pairs (b,)."""
        items = self._items
        item = items.of_pair[numbers]
        group = items.group[item]
        start = items.start[group][:, None]
        size = items.size[group][:, None]
        step = np.arange(items.views)
        first = 0 if self.all else self.place[item][:, None] - start
        circle = (first + step) % size
        return np.asarray(items.pair[self._order[start + circle]])


def shared_items(*sides: np.ndarray) -> np.ndarray:
    """Return columns of ids in which two visits agree if and only if they share an item on one of the sides.

    Args:
        sides: for each side (b, m), the ids of the items that the b visits take.

    Returns:
        (b, k) int64. k is 0 if no two visits share an item, and small if few do.

    Example:
        >>> shared_items(np.array([[0], [1], [2]]), np.array([[5, 6], [7, 5], [8, 9]]))
        array([[ 0],
               [ 0],
               [-3]])

    """
    b = len(sides[0])
    alone = -1 - np.arange(b)  # no two visits agree in these
    columns: list[np.ndarray] = []
    name = 0
    for ids in sides:
        visit = np.repeat(np.arange(b), ids.shape[1])
        taken = np.unique(np.stack([ids.reshape(-1), visit]), axis=1)  # a visit that takes an item twice counts once
        _, first, copies = np.unique(
            taken[0],
            return_index=True,
            return_counts=True,
        )
        for begin, length in zip(first[copies > 1], copies[copies > 1], strict=True):
            visits = taken[1, begin : begin + length]
            column = next((column for column in columns if (column[visits] < 0).all()), None)
            if column is None:
                column = alone.copy()
                columns.append(column)
            column[visits] = name
            name += 1
    return np.stack(columns, axis=1) if columns else np.empty((b, 0), np.int64)
