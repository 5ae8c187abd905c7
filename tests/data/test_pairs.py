"""The interface of all sources: the same pairs in every format have the same numbers, ids, samples and batches."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from nuclr.data import ImageOptions, Loader, batches, epoch_order, open_pairs
from nuclr.data.modalities.image import ImageModality
from nuclr.data.pairs import Sample
from nuclr.data.side import name_sides
from tests.data import make


@pytest.fixture(params=make.FORMATS, ids=lambda form: form.__name__)
def pairs(request, tmp_path):
    if request.param.__name__.startswith(("parquet", "hf")):
        pytest.importorskip("pyarrow")
    if request.param is make.hf_dataset:
        pytest.importorskip("datasets")
    return open_pairs(request.param(tmp_path / "data"))


def test_all_formats_give_the_same_numbers_names_ids_and_samples(pairs):
    assert pairs.folder is not None and len(pairs) == len(make.PAIRS) and pairs.known_bad == {}
    assert [pairs.item("y", number) for number in range(len(pairs))] == [caption for _, caption in make.PAIRS]
    assert pairs.sides["x"].ids.tolist() == make.X_ID and pairs.sides["x"].ids.dtype == np.int64
    assert pairs.sides["y"].ids.tolist() == make.Y_ID and pairs.sides["y"].ids.dtype == np.int64
    for number, (name, _) in enumerate(make.PAIRS):
        assert name in pairs.name(number)
    for number in (0, 4, np.int64(7), np.uint8(3), torch.tensor(5)):
        sample = pairs[number]
        assert isinstance(sample, Sample) and type(sample.number) is int and sample.number == int(number)
        assert sample.x.mode == "RGB" and sample.x.size == (24, 20)
        np.testing.assert_array_equal(
            np.asarray(sample.x), np.asarray(ImageModality().decode(pairs.item("x", int(number))))
        )
        assert sample.y == make.PAIRS[sample.number][1]
        assert (sample.x_id, sample.y_id) == (make.X_ID[sample.number], make.Y_ID[sample.number])
    assert [sample.number for sample in pairs] == list(range(8))
    copy = pickle.loads(pickle.dumps(pairs))
    assert copy[6].y == pairs[6].y and copy[6].x.tobytes() == pairs[6].x.tobytes()
    assert copy.fingerprint == pairs.fingerprint and repr(copy) == repr(pairs)
    assert repr(pairs).startswith(f"{type(pairs).__name__}('") and repr(pairs).endswith("', 8 pairs, image to text)")


def test_all_formats_give_the_same_first_batches(pairs, tmp_path):
    expected = open_pairs(make.jsonl(tmp_path / "expected"))
    for epoch in range(2):
        for ours, theirs in zip(*(first_batches(source, epoch) for source in (pairs, expected)), strict=True):
            assert ours.y == theirs.y
            for field in ("numbers", "x_id", "y_id", "x"):
                torch.testing.assert_close(getattr(ours, field), getattr(theirs, field), rtol=0, atol=0)


def first_batches(pairs, epoch):
    order = epoch_order(pairs, seed=3, epoch=epoch)
    return list(Loader(pairs, x=ImageOptions(16), workers=2).load(batches(order, 4)))


def test_the_fingerprint_depends_on_the_pairs_only(request, pairs, tmp_path, monkeypatch):
    write = request.node.callspec.params["pairs"]
    path = tmp_path / "data" / write(tmp_path / "elsewhere").relative_to(tmp_path / "elsewhere")
    again = open_pairs(path)
    assert again.fingerprint == pairs.fingerprint and again.stamp() == pairs.stamp()
    monkeypatch.setitem(make.CAPTIONS, "e.jpg", ["changed"])
    monkeypatch.setattr(make, "PAIRS", [*make.PAIRS[:-1], ("e.jpg", "changed")])
    assert open_pairs(write(tmp_path / "other")).fingerprint != pairs.fingerprint


def test_wrong_numbers_are_refused_with_the_allowed_range():
    pairs = open_pairs("builtin:n=8")
    for number in (-1, 8, np.int64(-8), 10**9):
        with pytest.raises(IndexError, match=rf"pairs\[{number}\].*0 to 7"):
            pairs[number]
    for number in (1.0, "1", slice(2), [0, 1], None):
        with pytest.raises(TypeError, match="number"):
            pairs[number]


def test_a_data_loader_reads_a_source(pairs):
    def collate(samples):
        pixels = torch.stack([torch.from_numpy(np.array(sample.x)) for sample in samples])
        return pixels, [sample.y for sample in samples], torch.tensor([sample.number for sample in samples])

    loader = DataLoader(pairs, batch_size=3, num_workers=2, collate_fn=collate)
    pixels, texts, numbers = zip(*loader, strict=True)
    assert torch.cat(pixels).shape == (8, 20, 24, 3)
    assert [text for batch in texts for text in batch] == [caption for _, caption in make.PAIRS]
    assert torch.cat(numbers).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("sides", "many"),
    [
        (("image", "image", "text", "text"), ["images", "captions"]),
        (("text", "text", "image", "image"), ["captions", "images"]),
        (("image", "vector", "text", "vector"), ["images", "captions"]),
        (("en", "text", "de", "text"), ["en texts", "de texts"]),
        (("x", "vector", "y", "vector"), ["x vectors", "y vectors"]),
        (("number", "text", "text", "text"), ["number texts", "texts"]),
        (("price", "series", "text", "text"), ["price series", "texts"]),
    ],
)
def test_words(sides, many):
    assert [side.many for side in name_sides(*sides)] == many


def test_views_have_one_name():
    assert {side.many for side in name_sides("view 1", "image", "view 2", "image", views=True)} == {"images"}
