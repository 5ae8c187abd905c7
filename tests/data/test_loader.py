"""The loader: order and content of batches, memory, vectors, and threads that end."""

import json
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from nuclr.data import ImageOptions, Loader, all_batches, open_pairs
from nuclr.data.modalities.augment import random_crops
from nuclr.data.modalities.image import fit_image
from nuclr.errors import UserError
from tests.data import make


@pytest.mark.parametrize("memory", [0, 1000, 2**20])
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
                np.testing.assert_array_equal(x, fit_image(pairs.item("x", number), 12))
                assert y == pairs.item("y", number)
            assert batch.x_id.tolist() == pairs.sides["x"].ids[batch.numbers.numpy()].tolist()
            assert batch.y_id.tolist() == pairs.sides["y"].ids[batch.numbers.numpy()].tolist()


def test_images_that_fit_into_memory_are_decoded_only_once(tmp_path, monkeypatch):
    pairs = open_pairs(make.jsonl(tmp_path))
    opened = []
    real = pairs.item
    monkeypatch.setattr(pairs, "item", lambda side, number: opened.append(number) or real(side, number))
    loader = Loader(pairs, x=ImageOptions(12), workers=1)
    for _ in range(3):
        list(loader.load(all_batches(np.arange(8), 3)))
    assert len(opened) == 5


def write_wide_images(folder):
    """Write images of 60 x 30 pixels, red on the left, green in the middle, blue on the right, and open them."""
    pixels = np.zeros((30, 60, 3), np.uint8)
    for part in range(3):
        pixels[:, part * 20 : (part + 1) * 20, part] = 255
    for number in range(20):
        Image.fromarray(np.roll(pixels, number % 2, axis=0)).save(folder / f"{number}.png")
    (folder / "list.jsonl").write_text(
        "".join(json.dumps({"image": f"{n}.png", "caption": f"number {n}"}) + "\n" for n in range(20))
    )
    return open_pairs(folder / "list.jsonl")


def test_random_crops_come_from_the_whole_image_whatever_the_memory(tmp_path):
    pairs = write_wide_images(tmp_path)
    numbers = [np.arange(20), np.arange(20)[::-1].copy()]
    crops = [{"x": [random_crops(20, (0.2, 1.0), 0, 0, step)]} for step in range(2)]
    loaded = {}
    for memory, workers in ((0, 1), (3 * 60 * 30 * 3, 3), (2**20, 2)):
        loader = Loader(pairs, x=ImageOptions(16, smallest_crop=0.2), workers=workers, memory=memory)
        loaded[memory] = [batch.x for _ in range(2) for batch in loader.load(numbers, crops=iter(crops))]
        squares = [batch.x for batch in loader.load(numbers)]  # without crops: as in evaluation
        assert all(
            np.array_equal(square, fit_image(pairs.item("x", int(number)), 16))
            for number, square in zip(np.concatenate(numbers), torch.cat(squares), strict=True)
        )
    for batches in loaded.values():
        assert len(batches) == 4 and all(map(torch.equal, batches, loaded[0]))
    for row, number in enumerate(numbers[1]):
        box = crops[1]["x"][0].box(row, 60, 30)
        expected = pairs[int(number)].x.crop(box).resize((16, 16), Image.Resampling.BICUBIC)
        shown = loaded[0][1][row].permute(1, 2, 0).numpy().astype(int)
        assert np.abs(shown - np.asarray(expected).astype(int)).max() <= 2
    colors = torch.cat(loaded[0][:2]).float().mean(dim=(2, 3))
    assert colors[:, 0].max() > 100 and colors[:, 2].max() > 100  # the central square has little red and blue


def test_views_of_an_image_are_different_crops_and_need_one_decoding(tmp_path, monkeypatch):
    write_wide_images(tmp_path)
    pairs = open_pairs(tmp_path / "list.jsonl", views=True)
    opened = []
    real = pairs.item
    monkeypatch.setattr(pairs, "item", lambda side, number: opened.append(number) or real(side, number))
    loader = Loader(pairs, x=ImageOptions(16, smallest_crop=0.2), memory=0)
    views = [random_crops(20, (0.2, 1.0), 0, 0, 0, view) for view in range(3)]
    [batch] = loader.load([np.arange(20)], crops=[{"x": views[:2], "y": views[2:]}])
    assert len(opened) == 20
    assert batch.x.shape == (20, 2, 3, 16, 16) and batch.y.shape == (20, 3, 16, 16)
    listed = open_pairs(tmp_path / "list.jsonl")
    for items, view in ((batch.x[:, 0], 0), (batch.x[:, 1], 1), (batch.y, 2)):
        [alone] = Loader(listed, x=ImageOptions(16, smallest_crop=0.2)).load(
            [np.arange(20)], crops=[{"x": [views[view]]}]
        )
        assert torch.equal(items, alone.x)
    [square] = loader.load([np.arange(20)])
    assert square.x.shape == (20, 3, 16, 16) and torch.equal(square.x, square.y)


def test_a_file_that_vanished_is_named_if_crops_are_read(tmp_path):
    pairs = write_wide_images(tmp_path)
    (tmp_path / "7.png").unlink()
    crops = [{"x": [random_crops(20, (0.5, 1.0), 0, 0, 0)]}]
    with pytest.raises(UserError, match=r"sample 7 \(7\.png\): missing file"):
        list(Loader(pairs, x=ImageOptions(16, smallest_crop=0.5)).load([np.arange(20)], crops=crops))


def test_closing_the_stream_early_ends_the_threads(tmp_path):
    pairs = open_pairs(make.jsonl(tmp_path))
    stream = Loader(pairs, x=ImageOptions(12), workers=3).load(all_batches(np.tile(np.arange(8), 50), 2))
    next(stream)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nuclr-loader")]


def test_numbers_may_be_arrays_tensors_or_lists():
    loader = Loader(open_pairs("builtin:n=9"), x=ImageOptions(16))
    batches = loader.load([np.array([3, 1], np.uint8), torch.tensor([3, 1]), [3, 1]])
    assert [batch.numbers.tolist() for batch in batches] == [[3, 1]] * 3
    assert list(loader.load([])) == []


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([0, 9], "0, 9.*0 to 8"),
        ([-1, 2], "-1, 2"),
        ([0.0, 1.0], "float64"),
        ([True, False], "bool"),
        (3, "3"),
        ([], "0"),
    ],
)
def test_wrong_numbers_are_refused(tmp_path, numbers, message):
    np.savez(tmp_path / "e.npz", x=np.eye(9), y=np.eye(9))
    for pairs in (open_pairs("builtin:n=9"), open_pairs(tmp_path / "e.npz")):
        with pytest.raises(IndexError, match=message):
            list(Loader(pairs, x=ImageOptions(16)).load([numbers]))


def test_one_side_only(tmp_path):
    pairs = open_pairs(make.jsonl(tmp_path))
    loader = Loader(pairs, x=ImageOptions(size=16))
    [both], [only_x], [only_y] = (list(loader.load([[0, 3, 5]], side)) for side in (None, "x", "y"))
    assert torch.equal(only_x.x, both.x) and only_x.y == []
    assert only_y.y == both.y and only_y.x == []


@pytest.mark.parametrize("pin_memory", [False, True])
def test_every_tensor_of_a_batch_is_pinned_if_asked(tmp_path, monkeypatch, pin_memory):
    """Pinning needs an accelerator, so here the requests for page-locked memory are counted."""
    np.savez(tmp_path / "e.npz", x=np.eye(9), y=np.eye(9))
    requests, empty = [], torch.empty

    def count(shape, *, pin_memory=False, **options):
        requests.append("empty") if pin_memory else None
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", count)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: requests.append("copy") or tensor)
    images, vectors = open_pairs(make.jsonl(tmp_path)), open_pairs(tmp_path / "e.npz")
    for pairs in (images, vectors):
        list(Loader(pairs, x=ImageOptions(12), pin_memory=pin_memory).load([[0, 1], [2]]))
    # Images are written to page-locked memory; vectors, which have a tensor on both sides, are copied to it.
    assert requests == (["empty"] * 2 + ["copy"] * 4 if pin_memory else [])


def test_batches_never_share_memory(tmp_path):
    """A batch may still be on its way to a device while the next ones are read."""
    loader = Loader(open_pairs(make.jsonl(tmp_path)), x=ImageOptions(12), workers=2, ahead=1)
    loaded = list(loader.load([[0, 1, 2]] * 8))
    assert len({batch.x.untyped_storage().data_ptr() for batch in loaded}) == 8
