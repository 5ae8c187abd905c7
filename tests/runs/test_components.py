"""The parts of a run, built from its settings."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nuclr.data.modalities.image import fit_image
from nuclr.errors import UserError
from nuclr.models import ImageFormat
from nuclr.runs import components, settings
from tests.data import make
from tests.training import runs


def test_vectors_are_standardized(tmp_path):
    loaded = runs.load(tmp_path)
    source = components.open_train(loaded.data)
    model = components.make_model(loaded.model, source, 0)
    x = torch.from_numpy(np.stack([source.pairs.item("x", i) for i in range(120)]))
    standard = model.x.tower(x)
    assert standard.mean(0).abs().max() < 1e-5
    assert float(standard.square().mean()) == pytest.approx(1, rel=1e-4)
    np.savez(tmp_path / "same.npz", x=np.full((4, 3), 1.0), y=np.eye(4, 3))
    data = dataclasses.replace(loaded.data, train="same.npz")
    shared = components.make_model(settings.Model(shared=True, width=4), components.open_train(data), 0)
    assert torch.equal(shared.x.tower.mean, torch.tensor([5, 5, 5]) / 8), "a shared encoder is fitted to both sides"


def test_images_outside_of_the_root_need_allow_outside(tmp_path):
    make.write_images(tmp_path / "elsewhere")
    make.write_images(tmp_path / "data")
    names = ["a.jpg", str(tmp_path / "elsewhere" / "a.jpg")]
    make.write_lines(tmp_path / "data" / "train.jsonl", *({"image": name, "caption": "c"} for name in names))
    data = settings.Data(train="train.jsonl", root=str(tmp_path / "data"))
    with pytest.raises(UserError, match=r"1 of 2 samples are bad.*data\.allow_outside=true allows this"):
        components.open_train(data)
    source = components.open_train(dataclasses.replace(data, allow_outside=True))
    assert source.bad == {} and source.numbers.tolist() == [0, 1]


@pytest.mark.parametrize("pins", [False, True])
def test_batches_are_pinned_if_the_model_is_on_an_accelerator(tmp_path, monkeypatch, pins):
    loaded = runs.load(tmp_path)
    source = components.open_train(loaded.data)
    model = components.make_model(loaded.model, source, 0)
    assert not components.make_loader(loaded.data, source.pairs, model).pin_memory
    monkeypatch.setattr(components.arrays, "can_pin", lambda device: pins and device.type == "cpu")
    assert components.make_loader(loaded.data, source.pairs, model).pin_memory == pins


def test_pairs_outside_of_training_have_a_fit_of_their_own_and_captions_a_form(tmp_path):
    make.write_images(tmp_path)
    make.write_lines(tmp_path / "train.jsonl", {"image": "a.jpg", "caption": "A Cat."})
    data = settings.Data(
        train="train.jsonl", root=str(tmp_path), val_fit="squash", y=settings.DataSide(text="albef"), workers=1
    )
    source = components.open_train(data)
    encoder = SimpleNamespace(inputs=ImageFormat(32, (0.5,) * 3, (0.5,) * 3))
    image = source.pairs.item("x", 0)
    for chosen, fit in ((data, "crop"), (data.outside_training(), "squash")):
        loader = components.make_loader(chosen, source.pairs, torch.nn.Module(), encoders=(encoder, None))
        [batch] = loader.load([np.array([0])])
        assert batch.y == ["a cat"]
        np.testing.assert_array_equal(batch.x[0].numpy(), fit_image(image, 32, fit))
    assert image.size[0] != image.size[1], "this test needs an image that is not square"
    assert source.pairs.item("y", 0) == "A Cat.", "pages show the caption as it is"
