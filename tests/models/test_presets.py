"""Encoders by name: bags of words, and encoders that plugins register."""

import pytest
import torch
from torch import nn

from nuclr.errors import UserError
from nuclr.models import (
    DualEncoder,
    EncoderSide,
    Inputs,
    build_model,
    encoder_names,
    presets,
    register_encoder,
)
from nuclr.models.towers import BagOfWords

from .conftest import CAPTIONS, step


class TestBagOfWords:
    def test_mean_of_the_embeddings_of_the_tokens(self):
        model = build_model(EncoderSide("bag_of_words", texts=CAPTIONS), shared=True).eval()
        features = model.x.tower(model.prepare_x(CAPTIONS))
        table = model.x.tower.embedding.weight.double()
        for row, text in zip(features, CAPTIONS, strict=True):
            ids = model.x.inputs.tokenizer(text)["input_ids"]
            torch.testing.assert_close(row.double(), sum(table[i] for i in ids) / len(ids), atol=1e-6, rtol=1e-5)

    def test_padding_has_no_gradient_and_order_does_not_matter(self):
        tower = BagOfWords(10, 4)
        ids, mask = torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]]), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
        tower({"input_ids": ids, "attention_mask": mask}).sum().backward()
        assert tower.embedding.weight.grad.abs().sum(1).nonzero().ravel().tolist() == [1, 2, 3, 4]
        turned = tower({"input_ids": ids[:1].flip(1), "attention_mask": mask[:1].flip(1)})
        torch.testing.assert_close(turned, tower({"input_ids": ids, "attention_mask": mask})[:1])

    def test_an_empty_text_has_features(self):
        model = build_model(EncoderSide("bag_of_words", texts=CAPTIONS), shared=True)
        features = model.encode_x(["", "never seen: 猫", CAPTIONS[0]])
        torch.testing.assert_close(features.norm(dim=1), torch.ones(3))


class Series(Inputs):
    """Lists of numbers of any length, cut or padded with zeros."""

    modality = "series"

    def __init__(self, length):
        self.length = length

    def prepare(self, items):
        rows = [torch.as_tensor(item, dtype=torch.float32)[: self.length] for item in items]
        return torch.stack([nn.functional.pad(row, (0, self.length - len(row))) for row in rows])


def build_series(max_length=6):
    module = nn.Sequential(nn.Linear(max_length, 5), nn.Tanh())
    module.width = 5
    return module, Series(max_length)


@pytest.fixture
def series(monkeypatch):
    monkeypatch.setattr(presets, "REGISTERED", dict(presets.REGISTERED))
    monkeypatch.setattr(presets, "MODALITIES", dict(presets.MODALITIES))
    monkeypatch.setattr("nuclr.models.build.REGISTERED", presets.REGISTERED)
    monkeypatch.setattr("nuclr.models.build.MODALITIES", presets.MODALITIES)
    register_encoder("tiny_series", build_series, "series")


ITEMS = [[1.0, 2.0], [0.5] * 9, [3.0], [0.0, 1.0, 0.0]] + [[0.1 * k] for k in range(2)]


class TestRegisteredEncoders:
    def test_training_encoding_saving(self, series, tmp_path):
        model = build_model(EncoderSide("tiny_series", max_length=4), EncoderSide(texts=CAPTIONS), width=12)
        assert (model.x.modality, model.x.inputs.length) == ("series", 4)
        step(model, model.prepare_x(ITEMS), model.prepare_y(CAPTIONS * 2))
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.save_pretrained(tmp_path)
        again = DualEncoder.from_pretrained(tmp_path)
        assert again.x.inputs.length == 4
        assert torch.equal(again.encode_x(ITEMS, batch_size=4), model.encode_x(ITEMS, batch_size=4))
        assert build_model(EncoderSide(modality="series"), pretrained=tmp_path).width == 12
        assert "RegisteredTower('tiny_series')" in repr(model)

    def test_names(self, series):
        assert encoder_names("series") == ["tiny_series"]
        assert {"tiny_resnet", "bag_of_words", "vectors", "tiny_series"} <= set(encoder_names())
        for name, modality in {"tiny_vit": "image", "bag_of_words": "text", "vectors": "vector"}.items():
            assert name in encoder_names(modality)
        assert "bert" not in encoder_names()
        with pytest.raises(ValueError, match="'tiny_vit'"):
            register_encoder("tiny_vit", build_series, "series")

    def test_refusals(self, series, tmp_path, monkeypatch):
        with pytest.raises(UserError, match=r"model\.x: .*'tiny_series'.*pooling"):
            build_model(EncoderSide("tiny_series", pooling="mean"), shared=True)
        with pytest.raises(UserError, match=r"'tiny_series'.*images"):
            build_model(EncoderSide("tiny_series", modality="image"), shared=True)
        build_model("tiny_series", shared=True).save_pretrained(tmp_path)
        presets.REGISTERED.clear()
        with pytest.raises(UserError, match="'tiny_series'"):
            DualEncoder.from_pretrained(tmp_path)
