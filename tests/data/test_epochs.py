"""Epochs: the same pairs in the same order on any number of processes and from any step."""

from types import SimpleNamespace

import numpy as np
import pytest

from nuclr.data import all_batches, batches, epoch_order, steps_per_epoch
from nuclr.errors import UserError


class Numbered(SimpleNamespace):
    def __len__(self):
        return len(self.sides["x"].ids)


PAIRS = Numbered(sides={"x": SimpleNamespace(ids=np.repeat(np.arange(21), 5))})  # 105 pairs


def test_each_epoch_has_its_own_permutation():
    orders = [epoch_order(PAIRS, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert sorted(order) == list(range(105))
    assert len({tuple(order) for order in orders}) == 3
    np.testing.assert_array_equal(orders[1], epoch_order(PAIRS, 0, 1))


def test_one_pair_per_x_uses_every_x_once():
    orders = [epoch_order(PAIRS, 0, epoch, one_pair_per_x=True) for epoch in range(200)]
    for order in orders:
        assert sorted(PAIRS.sides["x"].ids[order]) == list(range(21))
    counts = np.bincount(np.concatenate(orders), minlength=105)
    assert counts.sum() == 21 * 200 and counts.min() > 15 and counts.max() < 70  # 40 expected
    firsts = np.bincount([PAIRS.sides["x"].ids[order[0]] for order in orders], minlength=21)
    assert firsts.max() < 30  # 10 expected: the images are shuffled as well


def test_one_pair_per_x_uses_only_usable_pairs():
    numbers = np.setdiff1d(np.arange(105), [0, 1, 2, 3, 5, 6, 7, 8, 9])
    order = epoch_order(PAIRS, 0, 3, one_pair_per_x=True, numbers=numbers)
    assert len(order) == 20 and 4 in order and set(order) <= set(numbers)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_together_see_the_same_global_batches(world):
    order = epoch_order(PAIRS, 0, 0)
    whole = list(batches(order, 8))
    shares = [list(batches(order, 8, rank, world)) for rank in range(world)]
    for step, batch in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([share[step] for share in shares]), batch)
    assert len(whole) == steps_per_epoch(order, 8) == 13
    np.testing.assert_array_equal(np.concatenate(whole), order[: 13 * 8])  # the end of the permutation is not used


def test_batches_can_start_at_any_step():
    order = epoch_order(PAIRS, 0, 0)
    np.testing.assert_array_equal(list(batches(order, 8, 1, 2, start=5)), list(batches(order, 8, 1, 2))[5:])
    assert list(batches(order, 8, start=13)) == []


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_batches_yield_every_number_once(world):
    shares = [np.concatenate(list(all_batches(np.arange(105), 8, rank, world))) for rank in range(world)]
    np.testing.assert_array_equal(np.concatenate(shares), np.arange(105))


def test_impossible_batch_sizes_are_refused():
    with pytest.raises(UserError, match=r"data\.batch_size=200.*105"):
        next(batches(epoch_order(PAIRS, 0, 0), 200))
    with pytest.raises(UserError, match=r"data\.batch_size=9.*2 processes"):
        next(batches(epoch_order(PAIRS, 0, 0), 9, 0, 2))
