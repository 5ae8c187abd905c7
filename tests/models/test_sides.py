"""Any modality on either side, one encoder for both, one tokenizer for both, and the options of each side."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from nuclr.errors import UserError
from nuclr.models import DualEncoder, EncoderSide, build_model

from .conftest import CAPTIONS, check_features, step

GERMAN = ["ein roter Kreis auf Blau", "zwei grüne Quadrate", "drei kleine gelbe Dreiecke oben links"]


def loss_of(model, x, y):
    fx, fy = model(x, y)
    return nn.functional.cross_entropy(fx @ fy.T / 0.1, torch.arange(len(fx)))


class TestCombinations:
    """The kind of inputs, features of both sides, and a gradient for every parameter."""

    def check(self, model, x_items, y_items, modalities):
        assert (model.x.modality, model.y.modality) == modalities
        check_features(*step(model, model.prepare_x(x_items), model.prepare_y(y_items)), width=model.width)
        assert all(parameter.grad is not None for parameter in model.parameters())
        for features in (model.encode_x(x_items), model.encode_y(y_items)):
            assert features.shape == (6, model.width)

    def test_folders_say_what_they_take(self, image_folder, text_folder, pictures):
        model = build_model(text_folder, image_folder, width=12)
        self.check(model, CAPTIONS * 2, pictures, ("text", "image"))
        model = build_model(text_folder, text_folder, width=12)
        assert not model.shared
        self.check(model, CAPTIONS * 2, GERMAN * 2, ("text", "text"))

    @pytest.mark.parametrize("joint", ["clip"], indirect=True)
    def test_both_towers_of_a_clip_in_either_order(self, joint, pictures):
        folder, original = joint
        model = build_model(
            EncoderSide(folder, modality="text", head="none"),
            EncoderSide(folder, modality="image", head="none"),
            width=32,
        )
        pixels = model.prepare_y(pictures)
        torch.testing.assert_close(model.eval().y(pixels), normalize(original.vision_model(pixels).pooler_output))


class TestShared:
    def model(self):
        return build_model(EncoderSide("tiny_text", texts=CAPTIONS), EncoderSide(texts=GERMAN), shared=True, width=12)

    def test_one_encoder_counted_once(self):
        model = self.model()
        two = build_model(EncoderSide("tiny_text", texts=CAPTIONS), EncoderSide(texts=GERMAN), width=12)
        assert model.shared and model.y is model.x
        assert not two.shared
        count = sum(parameter.numel() for parameter in model.parameters())
        assert 2 * count == sum(parameter.numel() for parameter in two.parameters())
        assert all(key.startswith("x.") for key in model.state_dict())
        assert repr(model) == f"DualEncoder(x=y=TextTower('distilbert'), width=12, {count:,} parameters)"

    def test_gradient_is_the_sum_over_both_sides(self):
        """Two encoders with the same weights: their gradients add up to that of the shared one."""
        model = self.model()
        apart = DualEncoder(copy.deepcopy(model.x), copy.deepcopy(model.x))
        x, y = model.prepare_x(CAPTIONS * 2), model.prepare_y(GERMAN * 2)
        for each in (model, apart):
            loss_of(each, x, y).backward()
        first, second = dict(apart.x.named_parameters()), dict(apart.y.named_parameters())
        for name, parameter in model.x.named_parameters():
            assert first[name].grad.abs().sum() > 0 or second[name].grad.abs().sum() > 0 or "k_lin.bias" in name
            torch.testing.assert_close(parameter.grad, first[name].grad + second[name].grad, atol=1e-6, rtol=1e-4)

    def test_copies_stay_shared(self):
        model = copy.deepcopy(self.model())
        assert model.shared
        assert torch.equal(model.to(torch.float64).encode_x(CAPTIONS), model.encode_y(CAPTIONS))
        model.load_state_dict(self.model().state_dict())
        model.eval()
        assert not model.y.training

    def test_modules(self):
        module = nn.Linear(5, 4)
        model = DualEncoder(module, module)
        assert model.shared and len(list(model.parameters())) == 2
        assert build_model(nn.Linear(5, 4), shared=True).shared

    def test_the_same_options_on_both_sides_are_allowed(self):
        side = EncoderSide("tiny_text", max_length=9, pooling="mean", head="mlp", modality="text", texts=CAPTIONS)
        assert build_model(side, side, shared=True).x.inputs.max_length == 9


class TestTokenizers:
    def test_one_tokenizer_is_trained_on_both_sides(self):
        x, y = EncoderSide("tiny_text", texts=CAPTIONS * 9), EncoderSide(texts=(text for text in GERMAN * 9))
        model = build_model(x, y)
        assert model.x.inputs.tokenizer is model.y.inputs.tokenizer
        pieces = [model.x.inputs.tokenizer.tokenize(text) for text in ("squares", "Quadrate")]
        assert all(len(tokens) == 1 for tokens in pieces), pieces

    def test_a_side_with_its_own_tokenizer(self, text_folder):
        model = build_model(EncoderSide("tiny_text", tokenizer=text_folder), EncoderSide("tiny_text", texts=GERMAN))
        assert len(model.x.inputs) == 300
        assert model.x.inputs.tokenizer is not model.y.inputs.tokenizer


class TestPooling:
    def hidden_mean(self, model, texts):
        """The mean over each text alone, without padding."""
        rows = []
        for text in texts:
            tokens = model.prepare_x(text)
            hidden = model.x.tower.backbone(**tokens).last_hidden_state[0].double()
            rows.append(sum(hidden) / len(hidden))
        return torch.stack(rows)

    @pytest.mark.parametrize("source", ["preset", "folder"])
    def test_mean_leaves_out_padding(self, source, text_folder):
        encoder = "tiny_text" if source == "preset" else text_folder
        model = build_model(EncoderSide(encoder, texts=CAPTIONS, pooling="mean"), shared=True).eval()
        assert "'mean'" in repr(model)
        tower = model.x.tower(model.prepare_x(CAPTIONS))
        torch.testing.assert_close(tower.double(), self.hidden_mean(model, CAPTIONS), atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize(
        ("content", "pooling"),
        [
            ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
            ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "first"),
            ({"embedding_dimension": 24, "pooling_mode": "mean"}, "mean"),
            ({"pooling_mode": "cls"}, "first"),
        ],
    )
    def test_sentence_transformers_folders_say_it(self, text_folder, content, pooling):
        (text_folder / "1_Pooling").mkdir()
        (text_folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
        assert build_model(text_folder, shared=True).x.tower.pooling == pooling
        assert build_model(EncoderSide(text_folder, pooling="first"), shared=True).x.tower.pooling == "first"

    @pytest.mark.parametrize(
        "content",
        [{"pooling_mode_max_tokens": True}, {"pooling_mode": "lasttoken"}, {}, {"pooling_mode": ["mean", "max"]}],
    )
    def test_other_poolings_are_refused_unless_set(self, text_folder, content):
        (text_folder / "1_Pooling").mkdir()
        (text_folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=r"model\.x\.pooling: .*1_Pooling"):
            build_model(text_folder, shared=True)
        assert build_model(EncoderSide(text_folder, pooling="mean"), shared=True).x.tower.pooling == "mean"

    def test_a_decoder_can_be_pooled_by_its_mean(self, tmp_path, tokenizer):
        from transformers import GPT2Config, GPT2Model

        config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300, bos_token_id=2, eos_token_id=3)
        GPT2Model(config).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        with pytest.raises(UserError, match=r"model\.x\.pooling"):
            build_model(tmp_path, shared=True)
        assert build_model(EncoderSide(tmp_path, pooling="mean"), shared=True).x.tower.pooling == "mean"


class TestPretrained:
    def test_a_joint_model_with_text_on_side_x(self, joint, pictures, tmp_path):
        straight = build_model(y=EncoderSide(max_length=12), pretrained=joint[0])
        model = build_model(
            EncoderSide(modality="text", max_length=12),
            EncoderSide(modality="image", image_size=48),
            pretrained=joint[0],
        )
        assert (model.x.inputs.max_length, model.y.inputs.size) == (12, 48)
        texts = CAPTIONS[:2]
        torch.testing.assert_close(model.encode_x(texts), straight.encode_texts(texts))
        model.save_pretrained(tmp_path / "model")
        again = DualEncoder.from_pretrained(tmp_path / "model")
        assert torch.equal(again.encode_x(texts), model.encode_x(texts))
        assert torch.equal(again.encode_y(pictures), model.encode_y(pictures))

    def test_shared(self, tmp_path):
        build_model(EncoderSide("bag_of_words", texts=CAPTIONS), shared=True).save_pretrained(tmp_path / "model")
        assert build_model(pretrained=tmp_path / "model").shared
        assert build_model(pretrained=tmp_path / "model", shared=True).shared


class TestFeaturesWithoutHead:
    def test_towers_features(self):
        model = build_model(EncoderSide("tiny_text", texts=CAPTIONS, head="mlp"), shared=True, width=12).eval()
        tokens = model.prepare_x(CAPTIONS)
        features = model.x.features(tokens, head=False)
        assert torch.equal(features, normalize(model.x.tower(tokens)))
        assert torch.equal(model.x.features(tokens), model.x(tokens))
        assert torch.equal(model.encode_x(CAPTIONS, head=False), features)
        assert model.encode_y(CAPTIONS, head=False).shape == (3, 128)


def test_encoding_a_modality_that_both_sides_or_neither_take():
    model = build_model(EncoderSide("tiny_text", texts=CAPTIONS), EncoderSide("tiny_text", texts=GERMAN))
    with pytest.raises(UserError, match="encode_x or encode_y"):
        model.encode_texts(CAPTIONS)
    with pytest.raises(UserError, match="images"):
        model.encode_images([])
    assert model.takes("text") and not model.takes("image")
