"""The loader: order and content of batches, memory, vectors, and threads that end."""

import threading

import numpy as np
import pytest
import torch

from nuclr.data import ImageOptions, Loader, all_batches, open_pairs
from nuclr.data.modalities.image import fit_image
from tests.data import make


@pytest.mark.parametrize("memory", [0, 2**20])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_have_the_requested_order_and_content(tmp_path, workers, memory):
    pairs = open_pairs(make.jsonl(tmp_path))
    loader = Loader(pairs, x=ImageOptions(12), workers=workers, ahead=2, memory=memory)
    requested = [np.array(numbers) for numbers in ([3, 1], [0, 7, 2], [5], [1, 4], [6, 3])]
    for _ in range(2):
        loaded = list(loader.load(iter(requested)))
        assert [batch.numbers.tolist() for batch in loaded] == [numbers.tolist() for numbers in requested]
        for batch in loaded:
            assert batch.x.dtype == torch.uint8 and batch.x.shape == (len(batch), 3, 12, 12)
            assert batch.x.is_contiguous()
            for number, x, y in zip(batch.numbers.tolist(), batch.x, batch.y, strict=True):
                np.testing.assert_array_equal(x, fit_image(pairs.x(number), 12))
                assert y == pairs.y(number)
            assert batch.x_id.tolist() == pairs.x_id[batch.numbers.numpy()].tolist()
            assert batch.y_id.tolist() == pairs.y_id[batch.numbers.numpy()].tolist()


def test_images_that_fit_into_memory_are_decoded_only_once(tmp_path, monkeypatch):
    pairs = open_pairs(make.jsonl(tmp_path))
    opened = []
    real = pairs.x
    monkeypatch.setattr(pairs, "x", lambda number: opened.append(number) or real(number))
    loader = Loader(pairs, x=ImageOptions(12), workers=1)
    for _ in range(3):
        list(loader.load(all_batches(np.arange(8), 3)))
    assert len(opened) == 5


def test_batches_of_vectors(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(2, 6, 3)).astype("f4")
    np.savez(tmp_path / "e.npz", x=x, y=y, y_to_x=[5, 4, 3, 2, 1, 0])
    (batch,) = Loader(open_pairs(tmp_path / "e.npz")).load([np.array([4, 0])])
    torch.testing.assert_close(batch.x, torch.from_numpy(x[[1, 5]]))
    torch.testing.assert_close(batch.y, torch.from_numpy(y[[4, 0]]))


def test_closing_the_stream_early_ends_the_threads(tmp_path):
    pairs = open_pairs(make.jsonl(tmp_path))
    stream = Loader(pairs, x=ImageOptions(12), workers=3).load(all_batches(np.tile(np.arange(8), 50), 2))
    next(stream)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nuclr-loader")]


def test_without_batches_nothing_is_loaded(tmp_path):
    assert list(Loader(open_pairs(make.jsonl(tmp_path))).load([])) == []


def test_numbers_may_be_arrays_tensors_or_lists():
    loader = Loader(open_pairs("builtin:n=9"), x=ImageOptions(16))
    batches = loader.load([np.array([3, 1], np.uint8), torch.tensor([3, 1]), [3, 1]])
    assert [batch.numbers.tolist() for batch in batches] == [[3, 1]] * 3


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ([0, 9], IndexError, "batches: numbers from 0 to 9; allowed: 0 to 8"),
        ([-1, 2], IndexError, "batches: numbers from -1 to 2; allowed: 0 to 8"),
        ([0.0, 1.0], TypeError, "batches: float64 of shape"),
        ([True, False], TypeError, "batches: bool of shape"),
        (3, TypeError, "needs whole numbers of shape"),
        ([], TypeError, "needs whole numbers of shape"),
    ],
)
def test_wrong_numbers_are_refused(tmp_path, numbers, error, message):
    np.savez(tmp_path / "e.npz", x=np.eye(9), y=np.eye(9))
    for pairs in (open_pairs("builtin:n=9"), open_pairs(tmp_path / "e.npz")):
        with pytest.raises(error, match=message):
            list(Loader(pairs, x=ImageOptions(16)).load([numbers]))


def test_one_side_only(tmp_path):
    pairs = open_pairs(make.jsonl(tmp_path))
    loader = Loader(pairs, x=ImageOptions(size=16))
    [both], [only_x], [only_y] = (list(loader.load([[0, 3, 5]], side)) for side in (None, "x", "y"))
    assert torch.equal(only_x.x, both.x) and only_x.y == []
    assert only_y.y == both.y and only_y.x == []
