"""build_model: every kind of encoder, and a clear message for every argument that cannot be used."""

import pytest
import torch
from torch import nn

from nuclr.errors import UserError
from nuclr.models import build_model, train_tokenizer

from .conftest import CAPTIONS, batch, check_features, step


@pytest.mark.parametrize("encoder", ["tiny_resnet", "tiny_vit"])
def test_tiny_presets_train(encoder, pictures):
    model = build_model(encoder, "tiny_text", y_texts=CAPTIONS)
    assert model.width == 256
    check_features(*step(model, *batch(model, pictures)), width=256)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_same_seed_gives_same_weights():
    torch.manual_seed(3)
    first = build_model(y_texts=CAPTIONS).state_dict()
    torch.manual_seed(3)
    second = build_model(y_texts=CAPTIONS).state_dict()
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
    model = build_model(y_tokenizer=text_folder, y_max_length=8)
    assert (len(model.y.inputs), model.y.inputs.max_length) == (300, 8)


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_vectors_with_heads(head):
    model = build_model("vectors", "vectors", x_width=5, y_width=7, x_head=head, y_head=head, width=12)
    check_features(*step(model, torch.randn(6, 5), torch.randn(6, 7)), width=12)


def test_modules_with_heads():
    x, y = nn.Linear(5, 12), nn.Sequential(nn.Linear(7, 12), nn.ReLU())
    model = build_model(x, y, x_width=12, y_width=12, width=4)
    check_features(*model(torch.randn(6, 5), torch.randn(6, 7)), width=4)


def test_unused_parameters_need_no_gradient(tmp_path, pictures):
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(tmp_path / "dino")
    model = build_model(tmp_path / "dino", y_texts=CAPTIONS, x_image_size=28)
    assert not model.x.tower.backbone.embeddings.mask_token.requires_grad
    step(model, *batch(model, pictures))
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_pixels_are_normalized_as_set_and_the_model_is_saved_with_it(tmp_path, image_folder):
    assert build_model(y_texts=CAPTIONS).x.inputs.mean == (0.485, 0.456, 0.406)
    for name, encoder in (("preset", "tiny_resnet"), ("folder", image_folder)):
        model = build_model(encoder, y_texts=CAPTIONS, x_image_normalization="clip")
        assert model.x.inputs.mean == (0.48145466, 0.4578275, 0.40821073)
        model.save_pretrained(tmp_path / name)
        assert build_model(pretrained=tmp_path / name).x.inputs == model.x.inputs


def test_only_norms_and_biases_have_one_dimension():
    """The optimizer exempts them from weight decay by their shape."""
    model = build_model(y_texts=CAPTIONS)
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        exempt = name.endswith(".bias") or isinstance(owner, nn.GroupNorm | nn.LayerNorm)
        assert exempt == (parameter.ndim < 2), name


class TestRefusals:
    """One or two lines that name the settings key and the fix."""

    def refused(self, *words, **arguments):
        with pytest.raises(UserError) as caught:
            build_model(**{"y_texts": CAPTIONS} | arguments)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert len(message.splitlines()) <= 2

    def test_misspelt_presets(self):
        self.refused("model.x.encoder", "did you mean 'tiny_resnet'", x="tiny_restnet")
        self.refused("model.y.encoder", "did you mean 'distilbert'", y="distillbert")

    def test_hub_name_without_network(self):
        self.refused("model.x.encoder", "microsoft/resnet-50", "not a folder", "AutoModel", x="microsoft/resnet-50")
        self.refused("model.y.encoder", "bert-base-uncased", "AutoTokenizer", y="bert-base-uncased")
        self.refused("model.y.tokenizer", "bert-base-uncased", y_tokenizer="bert-base-uncased")

    def test_missing_tokenizers(self, text_folder):
        self.refused("model.y.encoder", "texts=", "model.y.tokenizer", y_texts=None)
        for path in text_folder.glob("tokenizer*"):
            path.unlink()
        self.refused("model.y.encoder", "AutoTokenizer", y=text_folder)
        self.refused("model.y.tokenizer", "AutoTokenizer", y_tokenizer=text_folder)

    def test_lengths_and_vocabularies(self, text_folder, tmp_path):
        self.refused("model.y.max_length", "at most 512", y="distilbert", y_max_length=600)
        self.refused("model.y.max_length", "at most 16", y=text_folder, y_max_length=99)
        train_tokenizer([f"{number} {number:x}" for number in range(3000)], 900).save_pretrained(tmp_path / "large")
        self.refused("model.y.tokenizer", "knows 300", y=text_folder, y_tokenizer=tmp_path / "large")

    def test_decoder_as_text_encoder(self, tmp_path, tokenizer):
        from transformers import GPT2Config, GPT2Model

        config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300, bos_token_id=2, eos_token_id=3)
        GPT2Model(config).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        self.refused("model.y.encoder", "is a decoder", "BERT", y=tmp_path)

    def test_encoders_on_the_wrong_side(self, image_folder, text_folder):
        self.refused("model.x.encoder", x=text_folder, x_modality="image")
        self.refused("model.y.encoder", y=image_folder, y_modality="text")
        self.refused("resnet", y=image_folder, y_modality="text", y_tokenizer=text_folder)
        self.refused(
            "model.x.encoder: 'tiny_text' takes texts, but side x holds images", x="tiny_text", x_modality="image"
        )

    def test_pretrained(self, text_folder, joint, tmp_path):
        self.refused("model.pretrained", "bert", "clip, siglip", pretrained=text_folder)
        self.refused("model.width: 7", "features", pretrained=joint[0], width=7)
        build_model(y_texts=CAPTIONS).save_pretrained(tmp_path / "nuclr")
        self.refused("model.x.encoder", "model.pretrained=", x=tmp_path / "nuclr")
        self.refused("model.pretrained", "image_size", pretrained=tmp_path / "nuclr", x_image_size=64)

    def test_settings_that_pretrained_replaces(self, joint, text_folder):
        for key, argument, value in (
            ("model.x.encoder", "x", "tiny_vit"),
            ("model.y.encoder", "y", text_folder),
            ("model.x.head", "x_head", "mlp"),
            ("model.y.head", "y_head", "none"),
            ("model.y.tokenizer", "y_tokenizer", text_folder),
            ("model.x.image_normalization", "x_image_normalization", "clip"),
        ):
            self.refused(key, "model.pretrained", pretrained=joint[0], **{argument: value})

    def test_folder_of_a_run(self, tmp_path):
        (tmp_path / "unfinished").mkdir()
        (tmp_path / "unfinished" / "config.yaml").write_text("")
        self.refused("model.pretrained", "not finished", pretrained=tmp_path / "unfinished")
        resume = f"continue it with nuclr train {tmp_path / 'unfinished'} --resume"
        self.refused("model.pretrained", resume, pretrained=tmp_path / "unfinished" / "model")
        build_model(y_texts=CAPTIONS).save_pretrained(tmp_path / "run" / "model")
        (tmp_path / "run" / "config.yaml").write_text("")
        self.refused("model.pretrained", f"use {tmp_path / 'run' / 'model'}", pretrained=tmp_path / "run")

    def test_numbers_and_heads(self):
        self.refused("x_width", "coordinates", x="vectors")
        self.refused("y_width", "coordinates", y="vectors")
        self.refused("model.width: 0", width=0)
        self.refused("model.x.image_size: -1", x_image_size=-1)
        self.refused("model.y.max_length: 0", y_max_length=0)
        self.refused("model.x.head", "'conv'", "linear, mlp, none", x_head="conv")
        self.refused("model.x.image_normalization: 'cifar'", "clip, imagenet", x_image_normalization="cifar")
        self.refused("model.y.image_normalization: is for images", y_image_normalization="clip", y_texts=CAPTIONS)
        self.refused("model.y.head", "model.width is 99", y_head="none", width=99)


@pytest.mark.slow
def test_full_size_step():
    """The paper's towers, from random weights."""
    model = build_model("resnet50", "distilbert", y_texts=CAPTIONS)
    assert model.x.inputs.size == 256
    sizes = [sum(p.numel() for p in side.tower.parameters()) for side in (model.x, model.y)]
    assert sizes[0] == 23_508_032  # ResNet-50 without its classifier
    texts = model.prepare_texts((CAPTIONS * 3)[:8])
    fx, fy = step(model, torch.randn(8, 3, 256, 256), texts)
    assert fx.shape == fy.shape == (8, 256)
    assert all(parameter.grad is not None for parameter in model.parameters())
