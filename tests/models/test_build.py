"""build_model: every kind of encoder, and a clear message for every argument that cannot be used."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nuclr.errors import UserError
from nuclr.models import EncoderSide, build_model, train_tokenizer

from .conftest import CAPTIONS, batch, check_features, step


def test_same_seed_gives_same_weights():
    torch.manual_seed(3)
    first = build_model(y=EncoderSide(texts=CAPTIONS)).state_dict()
    torch.manual_seed(3)
    second = build_model(y=EncoderSide(texts=CAPTIONS)).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_local_folders(image_folder, text_folder, pictures):
    model = build_model(image_folder, str(text_folder), width=12)
    assert model.x.inputs.size == 40
    assert model.x.inputs.mean == (0.1, 0.2, 0.3)
    assert model.y.inputs.max_length == 16
    x, y = batch(model, pictures)
    check_features(*step(model, x, y), width=12)
    # Without a gradient, BERT's own pooler would make DistributedDataParallel fail.
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_tokenizer_of_another_folder(text_folder):
    model = build_model(y=EncoderSide(tokenizer=text_folder, max_length=8))
    assert (len(model.y.inputs), model.y.inputs.max_length) == (300, 8)


def test_unused_parameters_need_no_gradient(tmp_path, pictures):
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(tmp_path / "dino")
    model = build_model(EncoderSide(tmp_path / "dino", image_size=28), EncoderSide(texts=CAPTIONS))
    assert not model.x.tower.backbone.embeddings.mask_token.requires_grad
    step(model, *batch(model, pictures))
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_pixels_are_normalized_as_set_and_the_model_is_saved_with_it(tmp_path, image_folder):
    assert build_model(y=EncoderSide(texts=CAPTIONS)).x.inputs.mean == (0.485, 0.456, 0.406)
    for name, encoder in (("preset", "tiny_resnet"), ("folder", image_folder)):
        model = build_model(EncoderSide(encoder, image_normalization="clip"), EncoderSide(texts=CAPTIONS))
        assert model.x.inputs.mean == (0.48145466, 0.4578275, 0.40821073)
        model.save_pretrained(tmp_path / name)
        assert build_model(pretrained=tmp_path / name).x.inputs == model.x.inputs


def test_only_norms_and_biases_have_one_dimension():
    """The optimizer exempts them from weight decay by their shape."""
    model = build_model(y=EncoderSide(texts=CAPTIONS))
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        exempt = name.endswith(".bias") or isinstance(owner, nn.GroupNorm | nn.LayerNorm)
        assert exempt == (parameter.ndim < 2), name


TEXT_X, TEXT_Y = EncoderSide("tiny_text", texts=CAPTIONS), EncoderSide(texts=CAPTIONS)


def refused(*words, x=None, y=TEXT_Y, **options):
    """Check that a model is refused with one or two lines that hold these words: a settings key, a value."""
    with pytest.raises(UserError) as caught:
        build_model(x, y, **options)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert len(message.splitlines()) <= 2


class TestRefusals:
    @pytest.mark.parametrize(
        ("key", "value", "side"),
        [
            ("model.x.encoder", "tiny_resnet", EncoderSide("tiny_restnet")),  # among the presets
            ("model.x.encoder", "microsoft/resnet-50", EncoderSide("microsoft/resnet-50")),  # without a network
            ("model.x.encoder", "texts=", EncoderSide("tiny_text")),
            ("model.x.encoder", "'vectors'", EncoderSide("vectors", width=3, modality="text")),
            ("model.x.encoder", "tiny_vit", EncoderSide("tiny_text", modality="image")),  # encoders of images
            ("model.x.encoder", "waveform", EncoderSide(modality="waveform")),
            ("model.x.tokenizer", "bert-base-uncased", EncoderSide("tiny_text", tokenizer="bert-base-uncased")),
            ("model.x.width", "coordinates", EncoderSide("vectors")),
            ("model.x.image_size", "images", replace(TEXT_X, image_size=8)),
            ("model.x.image_normalization", "images", replace(TEXT_X, image_normalization="clip")),
            ("model.x.max_length", "512", EncoderSide("distilbert", texts=CAPTIONS, max_length=600)),
            ("model.x.max_length", "texts", EncoderSide(max_length=8)),
            ("model.x.pooling", "texts", EncoderSide(pooling="mean")),
            ("model.x.head", "model.width", EncoderSide(head="none")),
        ],
    )
    def test_options_of_a_side(self, key, value, side):
        refused(key, value, x=side)
        if side.encoder is not None:
            refused(key.replace(".x.", ".y."), value, x=TEXT_X, y=side)

    @pytest.mark.parametrize(
        ("key", "y"),
        [
            ("model.y.encoder", EncoderSide("bag_of_words")),
            ("model.y.head", EncoderSide(head="mlp")),
            ("model.shared", EncoderSide(modality="image")),
            ("model.shared", EncoderSide(width=7)),
        ],
    )
    def test_options_of_side_y_that_differ_from_those_of_a_shared_encoder(self, key, y):
        refused(key, x=replace(TEXT_X, modality="text", width=5), y=y, shared=True)

    def test_folders(self, text_folder, image_folder, tmp_path):
        bert = EncoderSide(text_folder)
        refused("model.x.encoder", x=replace(bert, modality="image"))
        refused("model.x.encoder", "vectors", x=replace(bert, modality="vector"))
        refused("model.y.encoder", y=EncoderSide(image_folder, modality="text"))
        refused("resnet", y=EncoderSide(image_folder, modality="text", tokenizer=text_folder))
        refused("model.y.max_length", "16", y=replace(bert, max_length=99))
        train_tokenizer([f"{number} {number:x}" for number in range(3000)], 900).save_pretrained(tmp_path / "large")
        refused("model.y.tokenizer", "300", y=replace(bert, tokenizer=tmp_path / "large"))
        for path in text_folder.glob("tokenizer*"):
            path.unlink()
        refused("model.y.encoder", "AutoTokenizer", y=bert)
        refused("model.y.tokenizer", "AutoTokenizer", y=EncoderSide(tokenizer=text_folder))

    def test_pretrained(self, text_folder, joint, tmp_path):
        refused("model.pretrained", "bert", "clip, siglip", pretrained=text_folder)
        refused("model.width: 7", pretrained=joint[0], width=7)
        refused("model.shared", pretrained=joint[0], shared=True)
        text = EncoderSide(modality="text")
        refused("model.pretrained", "side x", "texts", x=text, y=text, pretrained=joint[0])
        refused("model.y.image_size", y=EncoderSide(image_size=48), pretrained=joint[0])
        build_model(y=TEXT_Y).save_pretrained(tmp_path / "nuclr")
        refused("model.x.encoder", "model.pretrained=", x=tmp_path / "nuclr")
        refused("model.x.image_size", "model.pretrained", x=EncoderSide(image_size=64), pretrained=tmp_path / "nuclr")
        refused(
            "model.pretrained", "side y", "vectors", y=EncoderSide(modality="vector"), pretrained=tmp_path / "nuclr"
        )

    @pytest.mark.parametrize("joint", ["clip"], indirect=True)
    def test_options_that_pretrained_replaces(self, joint):
        refused("model.y.pooling", y=EncoderSide(joint[0], pooling="mean"))
        options = {"encoder": "tiny_vit", "head": "mlp", "tokenizer": "folder", "image_normalization": "clip"}
        for option, value in options.items():
            side = EncoderSide(**{option: value})
            refused(f"model.x.{option}", "model.pretrained", pretrained=joint[0], x=side)

    def test_folder_of_a_run(self, tmp_path):
        (tmp_path / "config.yaml").write_text("")
        for folder in (tmp_path, tmp_path / "model"):
            refused("model.pretrained", str(tmp_path / "model"), "--resume", pretrained=folder)


@pytest.mark.slow
def test_full_size_step():
    """The paper's towers, from random weights."""
    model = build_model("resnet50", EncoderSide("distilbert", texts=CAPTIONS))
    assert model.x.inputs.size == 256
    sizes = [sum(p.numel() for p in side.tower.parameters()) for side in (model.x, model.y)]
    assert sizes[0] == 23_508_032  # ResNet-50 without its classifier
    texts = model.prepare_y((CAPTIONS * 3)[:8])
    fx, fy = step(model, torch.randn(8, 3, 256, 256), texts)
    assert fx.shape == fy.shape == (8, 256)
    assert all(parameter.grad is not None for parameter in model.parameters())
