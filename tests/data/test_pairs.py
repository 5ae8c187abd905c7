"""The same tiny data in every format: same numbers, same ids, same first batches."""

import numpy as np
import pytest
import torch

from nuclr.data import Loader, batches, epoch_order, open_pairs
from nuclr.data.pairs import Checkable
from tests.data import make


@pytest.fixture(params=make.FORMATS, ids=lambda form: form.__name__)
def pairs(request, tmp_path):
    if request.param.__name__.startswith(("parquet", "hf")):
        pytest.importorskip("pyarrow")
    if request.param is make.hf_dataset:
        pytest.importorskip("datasets")
    return open_pairs(request.param(tmp_path / "data"))


def test_numbers_names_and_ids(pairs):
    assert isinstance(pairs, Checkable)
    assert len(pairs) == len(make.PAIRS)
    assert [pairs.y(number) for number in range(len(pairs))] == [caption for _, caption in make.PAIRS]
    assert pairs.x_id.tolist() == make.X_ID and pairs.x_id.dtype == np.int64
    assert pairs.y_id.tolist() == make.Y_ID and pairs.y_id.dtype == np.int64
    assert pairs.known_bad == {}
    for number, (name, _) in enumerate(make.PAIRS):
        assert name in pairs.name(number)


def test_first_batches(pairs, tmp_path):
    expected = open_pairs(make.jsonl(tmp_path / "expected"))
    for epoch in range(2):
        for ours, theirs in zip(*(first_batches(source, epoch) for source in (pairs, expected)), strict=True):
            assert ours.y == theirs.y
            for field in ("numbers", "x_id", "y_id", "x"):
                torch.testing.assert_close(getattr(ours, field), getattr(theirs, field), rtol=0, atol=0)


def first_batches(pairs, epoch):
    order = epoch_order(pairs, seed=3, epoch=epoch)
    return list(Loader(pairs, size=16, workers=2).load(batches(order, 4)))


def test_opened_again_it_is_the_same(request, pairs, tmp_path):
    again = open_pairs(pairs_path(request, tmp_path))
    assert again.fingerprint == pairs.fingerprint and again.stamp() == pairs.stamp()
    assert [again.y(number) for number in range(len(again))] == [caption for _, caption in make.PAIRS]


def pairs_path(request, tmp_path):
    """Where the fixture's data lies: what the maker returned, found again by making it elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    return tmp_path / "data" / request.node.callspec.params["pairs"](elsewhere).relative_to(elsewhere)


def test_other_captions_give_another_fingerprint(pairs, tmp_path, monkeypatch, request):
    monkeypatch.setitem(make.CAPTIONS, "e.jpg", ["changed"])
    monkeypatch.setattr(make, "PAIRS", [*make.PAIRS[:-1], ("e.jpg", "changed")])
    other = open_pairs(request.node.callspec.params["pairs"](tmp_path / "other"))
    assert other.fingerprint != pairs.fingerprint
