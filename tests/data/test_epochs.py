"""Epochs and views: the same pairs in the same order on any number of processes and from any step."""

from types import SimpleNamespace

import numpy as np
import pytest

from nuclr.data import (
    ImageOptions,
    Loader,
    SideChoice,
    ViewGroups,
    all_batches,
    batches,
    check_samples,
    epoch_order,
    open_pairs,
    steps_per_epoch,
    usable,
)
from nuclr.data.epochs import shared_items
from nuclr.errors import UserError
from tests.data import make


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


def listed(x_ids, y_ids, group=None):
    sides = {"x": SimpleNamespace(ids=np.array(x_ids)), "y": SimpleNamespace(ids=np.array(y_ids))}
    return Numbered(label="list", sides=sides, group=None if group is None else np.array(group))


FIVE = listed(np.repeat(np.arange(30), 5), np.arange(150))  # 30 images with five captions each


def test_an_epoch_visits_every_group_once_with_one_of_its_pairs():
    groups = ViewGroups(FIVE, y_views=2)
    assert groups.count == 30 and groups.row.tolist() == FIVE.sides["x"].ids.tolist()
    orders = [epoch_order(FIVE, 0, epoch, groups=groups.row) for epoch in range(100)]
    assert all(sorted(groups.row[order]) == list(range(30)) for order in orders)
    assert np.bincount(np.concatenate(orders), minlength=150).min() > 5  # 20 expected


@pytest.mark.parametrize("m", [2, 3])
def test_a_visit_takes_its_own_item_and_other_distinct_ones_of_its_group(m):
    numbers = np.arange(150)
    views = ViewGroups(FIVE, y_views=m).draw(seed=3, epoch=1)["y"](numbers)
    assert views.shape == (150, m) and np.array_equal(views[:, 0], numbers)
    assert np.array_equal(FIVE.sides["x"].ids[views], np.repeat(FIVE.sides["x"].ids[:, None], m, axis=1))
    assert all(len(set(row)) == m for row in views.tolist())
    # Over all pairs of an image, each caption is taken equally often.
    assert np.array_equal(np.bincount(views.reshape(-1)), np.full(150, m))


def test_a_visit_of_all_items_takes_them_in_the_same_order():
    groups = ViewGroups(FIVE, y_views=5)
    views = groups.draw(seed=3, epoch=1)["y"](np.arange(150))
    assert np.array_equal(groups.stored()["y"][groups.row], views)
    assert np.array_equal(groups.stored()["y"], np.arange(150).reshape(30, 5))
    assert np.array_equal(groups.position("y"), np.tile(np.arange(5), 30))
    assert ViewGroups(FIVE, y_views=4).stored() == {}


def test_stored_views_of_groups_with_unusable_pairs_and_equal_items():
    pairs = listed([0, 0, 0, 0, 1, 1, 2], [3, 1, 1, 2, 5, 6, 7])
    groups = ViewGroups(pairs, y_views=2, numbers=np.array([0, 1, 2, 5]))
    assert groups.stored()["y"].tolist() == [[0, 1], [5, 5], [-1, -1]]
    position = groups.position("y")
    assert position[[0, 1, 2, 5]].tolist() == [0, 1, 1, 0] and (position >= 0).all()


def test_every_choice_is_equally_likely():
    groups = ViewGroups(FIVE, y_views=2)
    counts = np.zeros((5, 5))
    for epoch in range(400):
        order = epoch_order(FIVE, 0, epoch, groups=groups.row)
        one, two = (groups.draw(0, epoch)["y"](order) % 5).T
        np.add.at(counts, (one, two), 1)
    assert counts.trace() == 0
    apart = counts[~np.eye(5, dtype=bool)]  # 600 expected
    assert apart.min() > 500 and apart.max() < 700


def test_views_depend_on_seed_and_epoch_and_not_on_the_process_or_the_step():
    groups = ViewGroups(FIVE, y_views=3)
    order = epoch_order(FIVE, 0, 0, groups=groups.row)
    whole = groups.draw(0, 0)["y"](order)
    for rank in range(2):
        parts = [groups.draw(0, 0)["y"](numbers) for numbers in batches(order, 10, rank, 2, start=1)]
        expected = [whole[begin + 5 * rank : begin + 5 * rank + 5] for begin in (10, 20)]
        assert np.array_equal(parts, expected)
    assert not np.array_equal(groups.draw(0, 1)["y"](order), whole)
    assert not np.array_equal(groups.draw(1, 0)["y"](order), whole)


def test_too_few_items_are_repeated_in_turn():
    pairs = listed([0, 0, 0, 1, 1, 2], range(6))
    views = ViewGroups(pairs, y_views=3).draw(0, 0)["y"](np.array([0, 3, 4, 5]))
    assert views.tolist() == [[0, 1, 2], [3, 4, 3], [3, 4, 3], [5, 5, 5]]


def test_equal_items_of_a_group_count_once():
    pairs = listed([0, 0, 0, 1, 1], [0, 0, 1, 2, 3])  # an image with one caption twice
    views = ViewGroups(pairs, y_views=2).draw(0, 0)["y"](np.array([0, 1, 2]))
    assert pairs.sides["y"].ids[views].tolist() == [[0, 1], [0, 1], [0, 1]]
    several_x = ViewGroups(listed(range(6), [0, 0, 0, 1, 1, 1]), x_views=2)
    assert several_x.row.tolist() == [0, 0, 0, 1, 1, 1] and list(several_x.draw(0, 0)) == ["x"]


def test_views_on_both_sides_come_from_rows_of_lists(tmp_path):
    rows = [{"en": [f"{row} a", f"{row} b"], "de": [f"{row} {letter}" for letter in "ABC"]} for row in range(4)]
    pairs = open_pairs(make.write_lines(tmp_path / "p.jsonl", *rows), x=SideChoice("en"), y=SideChoice("de"))
    groups = ViewGroups(pairs, x_views=2, y_views=3)
    assert len(pairs) == 12 and groups.count == 4
    drawn = groups.draw(0, 0)
    for number in range(12):
        x, y = (drawn[side](np.array([number]))[0] for side in "xy")
        assert [pairs.item("x", int(n)) for n in x] == rows[number // 3]["en"]
        assert [pairs.item("y", int(n)) for n in y] == rows[number // 3]["de"]


def test_bad_samples_and_pairs_left_out_are_never_taken(tmp_path):
    make.write_images(tmp_path)
    captions = ["one", "", "three", "four"]
    path = make.write_lines(
        tmp_path / "p.jsonl", *({"image": name, "caption": captions} for name in ("a.jpg", "b.png"))
    )
    pairs = open_pairs(path)
    numbers = usable(pairs, check_samples(pairs, max_bad_share=0.5), keep=np.arange(1, 8))
    assert numbers.tolist() == [2, 3, 4, 6, 7]
    views = ViewGroups(pairs, y_views=3, numbers=numbers).draw(0, 0)["y"](np.array([3, 4]))
    assert sorted(set(views[0])) == [2, 3] and sorted(views[1]) == [4, 6, 7]
    [batch] = Loader(pairs, x=ImageOptions(8)).load([np.array([3, 4])], views=[{"y": views}])
    assert batch.x.shape == (2, 3, 8, 8) and batch.numbers.tolist() == [3, 4]
    assert batch.y == [pairs.item("y", int(number)) for number in views.reshape(-1)]


def test_vectors_are_read_next_to_each_other(tmp_path):
    y = np.arange(12.0).reshape(6, 2)
    np.savez(tmp_path / "e.npz", x=np.eye(2), y=y, y_to_x=[0, 0, 0, 1, 1, 1])
    pairs = open_pairs(tmp_path / "e.npz")
    views = ViewGroups(pairs, y_views=2).draw(0, 0)["y"](np.array([1, 4]))
    [batch] = Loader(pairs).load([np.array([1, 4])], views=[{"y": views}])
    assert np.array_equal(batch.y.numpy(), y[views.reshape(-1)]) and batch.x.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ({"y_views": 6}, r"data\.y\.views=6.* 5"),
        ({"x_views": 2}, r"data\.x\.views=2.* 1"),
        ({"x_views": 2, "y_views": 2}, r"data\.x\.views=2 and data\.y\.views=2"),
    ],
)
def test_views_that_do_not_exist_are_refused(views, message):
    with pytest.raises(UserError, match=message):
        ViewGroups(FIVE, **views)


def test_shared_items_mark_exactly_the_visits_that_share_one():
    random = np.random.default_rng(0)
    for spread in (4, 20, 200):
        x, y = random.integers(spread, size=(12, 1)), random.integers(spread, size=(12, 3))
        columns = shared_items(x, y)
        marked = (columns[:, None] == columns[None]).any(axis=2)
        expected = [[bool(set(x[i]) & set(x[j]) or set(y[i]) & set(y[j])) for j in range(12)] for i in range(12)]
        assert np.array_equal(marked | np.eye(12, dtype=bool), expected)
    assert shared_items(np.array([[0], [1]]), np.array([[0, 0], [1, 1]])).shape == (2, 0)
