"""The interface of all sources: the same pairs in every format have the same numbers, ids, samples and batches."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from nuclr.data import ImageOptions, Loader, batches, epoch_order, open_pairs
from nuclr.data.builtin import BuiltinLabeled
from nuclr.data.modalities.image import decode_image
from nuclr.data.pairs import BadSample, Checkable, Sample
from tests.data import make


@pytest.fixture(params=make.FORMATS, ids=lambda form: form.__name__)
def pairs(request, tmp_path):
    if request.param.__name__.startswith(("parquet", "hf")):
        pytest.importorskip("pyarrow")
    if request.param is make.hf_dataset:
        pytest.importorskip("datasets")
    return open_pairs(request.param(tmp_path / "data"))


def test_all_formats_give_the_same_numbers_names_and_ids(pairs):
    assert isinstance(pairs, Checkable)
    assert len(pairs) == len(make.PAIRS)
    assert [pairs.y(number) for number in range(len(pairs))] == [caption for _, caption in make.PAIRS]
    assert pairs.x_id.tolist() == make.X_ID and pairs.x_id.dtype == np.int64
    assert pairs.y_id.tolist() == make.Y_ID and pairs.y_id.dtype == np.int64
    assert pairs.known_bad == {}
    for number, (name, _) in enumerate(make.PAIRS):
        assert name in pairs.name(number)


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


def test_opening_the_data_again_gives_the_same_fingerprint_and_stamp(request, pairs, tmp_path):
    again = open_pairs(pairs_path(request, tmp_path))
    assert again.fingerprint == pairs.fingerprint and again.stamp() == pairs.stamp()
    assert [again.y(number) for number in range(len(again))] == [caption for _, caption in make.PAIRS]


def pairs_path(request, tmp_path):
    """Return the path of the fixture's data, found by writing the same data elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    return tmp_path / "data" / request.node.callspec.params["pairs"](elsewhere).relative_to(elsewhere)


def test_other_captions_give_another_fingerprint(pairs, tmp_path, monkeypatch, request):
    monkeypatch.setitem(make.CAPTIONS, "e.jpg", ["changed"])
    monkeypatch.setattr(make, "PAIRS", [*make.PAIRS[:-1], ("e.jpg", "changed")])
    other = open_pairs(request.node.callspec.params["pairs"](tmp_path / "other"))
    assert other.fingerprint != pairs.fingerprint


def test_a_source_is_a_sequence_of_samples(pairs):
    for number in (0, 4, np.int64(7), np.uint8(3), torch.tensor(5)):
        sample = pairs[number]
        assert isinstance(sample, Sample) and type(sample.number) is int and sample.number == int(number)
        assert sample.x.mode == "RGB" and sample.x.size == (24, 20)
        np.testing.assert_array_equal(np.asarray(sample.x), np.asarray(decode_image(pairs.x(int(number)))))
        assert sample.y == make.PAIRS[sample.number][1]
        assert (sample.x_id, sample.y_id) == (make.X_ID[sample.number], make.Y_ID[sample.number])
    assert [sample.number for sample in pairs] == list(range(8))


def test_wrong_numbers_are_refused_with_the_allowed_range(pairs):
    for number in (-1, 8, np.int64(-8), 10**9):
        with pytest.raises(IndexError, match=rf"pairs\[{number}\]: there is no such pair; allowed: 0 to 7"):
            pairs[number]
    for number in (1.0, "1", slice(2), [0, 1], None):
        with pytest.raises(TypeError, match="needs one whole number"):
            pairs[number]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_reads_a_source(pairs, workers):
    def collate(samples):
        pixels = torch.stack([torch.from_numpy(np.array(sample.x)) for sample in samples])
        return pixels, [sample.y for sample in samples], torch.tensor([sample.number for sample in samples])

    loader = DataLoader(pairs, batch_size=3, num_workers=workers, collate_fn=collate)
    pixels, texts, numbers = zip(*loader, strict=True)
    assert torch.cat(pixels).shape == (8, 20, 24, 3)
    assert [text for batch in texts for text in batch] == [caption for _, caption in make.PAIRS]
    assert torch.cat(numbers).tolist() == list(range(8))


def test_a_source_can_be_sent_to_another_process(pairs):
    before = pairs[6]
    copy = pickle.loads(pickle.dumps(pairs))
    assert copy[6].y == before.y and copy[6].x.tobytes() == before.x.tobytes()
    assert copy.fingerprint == pairs.fingerprint and repr(copy) == repr(pairs)


def test_the_repr_is_one_line_with_source_size_and_kinds(pairs):
    name = type(pairs).__name__
    assert repr(pairs).startswith(f"{name}('") and repr(pairs).endswith("', 8 pairs, image to text)")


def test_reprs_of_sources(tmp_path):
    assert repr(open_pairs(make.jsonl(tmp_path))) == "ListedPairs('train.jsonl', 8 pairs, image to text)"
    assert repr(open_pairs(make.tars(tmp_path / "t"))) == "TarPairs('00000.tar to 00001.tar', 8 pairs, image to text)"
    np.savez(tmp_path / "e.npz", x=np.eye(3), y=np.eye(3))
    assert repr(open_pairs(tmp_path / "e.npz")) == "VectorPairs('e.npz', 3 pairs, vector to vector)"
    builtin = open_pairs("builtin:n=30000,seed=2")
    assert repr(builtin) == "BuiltinPairs('seed=2,split=train', 30,000 pairs, image to text)"
    assert repr(BuiltinLabeled(24)) == "BuiltinLabeled('seed=0,split=test', 24 pairs, image to text)"
    assert repr(builtin.truth) == "Truth(30,000 pairs)"
    assert repr(Loader(builtin, x=ImageOptions(32))) == f"Loader({builtin!r}, x={ImageOptions(32)!r}, workers=2)"
    (batch,) = Loader(builtin, x=ImageOptions(32)).load([np.arange(4)])
    assert repr(batch) == "Batch(4 pairs, x=(4, 3, 32, 32), y=4 texts)"


def test_samples_of_vectors_and_of_generated_pictures(tmp_path):
    np.savez(tmp_path / "e.npz", x=np.eye(3), y=2 * np.eye(4), y_to_x=[0, 0, 2, 1])
    sample = open_pairs(tmp_path / "e.npz")[2]
    np.testing.assert_array_equal(sample.x, [0, 0, 1])
    np.testing.assert_array_equal(sample.y, [0, 0, 2, 0])
    assert sample[2:] == (2, 2, 2)
    assert isinstance(open_pairs("builtin:n=5")[4].x, Image.Image)


def test_a_bad_sample_raises_its_reason(tmp_path):
    path = make.jsonl(tmp_path)
    (tmp_path / "train" / "c.jpg").write_bytes(make.IMAGES["c.jpg"][:300])
    with pytest.raises(BadSample, match=r"broken image|not an image"):
        open_pairs(path)[5]
