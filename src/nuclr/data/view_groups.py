"""Views from several pairs: a visit of an image takes m of its captions.

An image with five captions gives five pairs. If side y has several views, the five pairs are one group: an epoch visits
each group once, a visit takes m of its captions, and the objective keeps one row of state per group. In general, a row
that holds several x and several y is a group; in a source without such rows, the pairs that share an x are a group if
side y has several views, and the pairs that share a y are one if side x has.

Images are an exception: the views of an image are random augmentations of it (`modalities.augment`).
"""

import numpy as np

from nuclr.data.pairs import SIDES, Pairs, Side
from nuclr.errors import UserError


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
        >>> pairs = SimpleNamespace(label="list", group=None, x_id=np.array([0, 0, 0, 1]), y_id=np.arange(4))
        >>> groups = ViewGroups(pairs, y_views=2)
        >>> groups.row
        array([0, 0, 0, 1])
        >>> groups.draw(seed=0, epoch=0)["y"](np.array([2, 3]))
        array([[2, 1],
               [3, 3]])

    """

    def __init__(self, pairs: Pairs, x_views: int = 1, y_views: int = 1, numbers: np.ndarray | None = None) -> None:
        views: dict[Side, int] = {"x": x_views, "y": y_views}
        if pairs.group is not None:
            belongs = pairs.group
        elif x_views > 1 and y_views > 1:
            raise UserError(
                f"data.x.views={x_views} and data.y.views={y_views}: views on both sides need rows with several x and "
                f'several y, such as {{"en": [...], "de": [...]}}, and {pairs.label} has none; set one of them to 1'
            )
        else:
            belongs = pairs.x_id if y_views > 1 else pairs.y_id
        distinct, row = np.unique(belongs, return_inverse=True)
        self.row, self.count = row.astype(np.int64), len(distinct)
        usable = np.arange(len(row)) if numbers is None else numbers
        self._sides = {
            side: _GroupedItems(self.row, self.count, getattr(pairs, f"{side}_id"), usable, m)
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

    def draw(self, seed: int, epoch: int) -> dict[Side, "DrawnViews"]:
        """Return the views of an epoch for the sides that have several.

        They depend only on (seed, epoch) and the number of the visited pair, so a resumed run and a run on several
        processes take the same views.
        """
        return {
            side: DrawnViews(items, np.random.default_rng([seed, epoch, 0, 0, SIDES.index(side), 1]))
            for side, items in self._sides.items()
        }


class _GroupedItems:
    """The distinct items of one side, sorted by group; `pair` is the first usable pair that has an item."""

    def __init__(self, row: np.ndarray, count: int, ids: np.ndarray, usable: np.ndarray, views: int) -> None:
        self.views, self.n = views, len(row)
        sorted_pairs = usable[np.lexsort((ids[usable], row[usable]))]
        rows, own = row[sorted_pairs], ids[sorted_pairs]
        is_first = np.ones(len(sorted_pairs), bool)
        is_first[1:] = (rows[1:] != rows[:-1]) | (own[1:] != own[:-1])
        self.pair, self.group = sorted_pairs[is_first], rows[is_first]
        self.of_pair = np.full(self.n, -1, np.int64)
        self.of_pair[sorted_pairs] = np.cumsum(is_first) - 1
        self.size = np.bincount(self.group, minlength=count)
        self.start = np.cumsum(self.size) - self.size
        self.most = int(self.size.max(initial=0))


class DrawnViews:
    """The views of one side in one epoch: `views(numbers)` are the pairs whose items the visits of `numbers` take.

    The items of each group are put on a circle in random order. A visit takes the item of its pair and the m - 1 items
    that follow it. These are distinct, unless the group has fewer than m items; then they are repeated in turn.
    """

    def __init__(self, items: _GroupedItems, random: np.random.Generator) -> None:
        self._items = items
        # One random number per pair, so that the order of a group does not depend on bad samples in other groups.
        self._order = np.lexsort((random.random(items.n)[items.pair], items.group))
        self._place = np.empty_like(self._order)
        self._place[self._order] = np.arange(len(self._order))

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Return (b, m) numbers of pairs for the visited pairs (b,)."""
        items = self._items
        item = items.of_pair[numbers]
        start, size = (array[items.group[item]][:, None] for array in (items.start, items.size))
        step = np.arange(items.views)
        circle = (self._place[item][:, None] - start + step) % size
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
        _, first, copies = np.unique(taken[0], return_index=True, return_counts=True)
        for begin, length in zip(first[copies > 1], copies[copies > 1], strict=True):
            visits = taken[1, begin : begin + length]
            column = next((column for column in columns if (column[visits] < 0).all()), None)
            if column is None:
                column = alone.copy()
                columns.append(column)
            column[visits] = name
            name += 1
    return np.stack(columns, axis=1) if columns else np.empty((b, 0), np.int64)
