"""build_model: every source of a tower, frozen towers, and every refusal."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from nuclr.errors import UserError
from nuclr.models import DualEncoder, build_model, train_tokenizer

from .conftest import CAPTIONS


def batch(model, pictures):
    texts = (CAPTIONS * 2)[: len(pictures)]
    return model.prepare_images(pictures), model.prepare_texts(texts)


def step(model, x, y):
    """One step of SGD on a contrastive loss; the features before it."""
    fx, fy = model(x, y)
    nn.functional.cross_entropy(fx @ fy.T / 0.1, torch.arange(len(fx))).backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    return fx, fy


def check_features(fx, fy, width):
    for features in (fx, fy):
        assert features.shape == (6, width)
        assert features.dtype == torch.float32
        torch.testing.assert_close(features.norm(dim=1), torch.ones(6))


@pytest.mark.parametrize("image", ["tiny_resnet", "tiny_vit"])
def test_tiny_presets_train(image, pictures):
    model = build_model(image, "tiny_text", texts=CAPTIONS)
    assert model.width == 256
    check_features(*step(model, *batch(model, pictures)), width=256)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("image", ["tiny_resnet", "tiny_vit"])
def test_tiny_presets_treat_each_sample_alone(image, pictures):
    """What two processes with half a batch each would compute, in train mode."""
    model = build_model(image, "tiny_text", texts=CAPTIONS)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    x, y = batch(model, pictures)
    whole = model(x, y)
    halves = [model(x[part], {k: v[part] for k, v in y.items()}) for part in (slice(0, 3), slice(3, 6))]
    for features, (first, second) in zip(whole, zip(*halves, strict=True), strict=True):
        torch.testing.assert_close(features, torch.cat([first, second]), atol=1e-6, rtol=0)


def test_same_seed_same_weights():
    torch.manual_seed(3)
    first = build_model(texts=CAPTIONS).state_dict()
    torch.manual_seed(3)
    second = build_model(texts=CAPTIONS).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_local_folders(image_folder, text_folder, pictures):
    model = build_model(image_folder, str(text_folder), width=12)
    assert model.images.size == 40
    assert model.images.mean == (0.1, 0.2, 0.3)
    assert model.tokenizer.max_length == 16
    x, y = batch(model, pictures)
    check_features(*step(model, x, y), width=12)
    # BERT's own pooler would be left without a gradient, which DistributedDataParallel does not forgive.
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_text_is_pooled_at_the_first_token(text_folder):
    model = build_model(y=text_folder, y_head="none", width=24).eval()
    y = model.prepare_texts(CAPTIONS)
    assert (y["input_ids"][:, 0] == model.tokenizer.tokenizer.cls_token_id).all()
    hidden = model.y.tower.backbone(**y).last_hidden_state
    assert torch.equal(model.y(y), normalize(hidden[:, 0]))


def test_images_are_pooled_globally(image_folder, pictures):
    model = build_model(image_folder, texts=CAPTIONS, x_head="none", width=16).eval()
    x = model.prepare_images(pictures)
    hidden = model.x.tower.backbone(pixel_values=x.contiguous(memory_format=torch.channels_last)).last_hidden_state
    torch.testing.assert_close(model.x(x), normalize(hidden.mean((2, 3))))


def test_vit_of_another_size(tmp_path, pictures):
    small = build_model("tiny_vit", texts=CAPTIONS)
    small.x.tower.backbone.save_pretrained(tmp_path / "vit")
    model = build_model(tmp_path / "vit", texts=CAPTIONS, image_size=48)
    check_features(*model(*batch(model, pictures)), width=256)


def test_frozen_towers(image_folder, text_folder, pictures):
    model = build_model(image_folder, text_folder, x_frozen=True, y_frozen=True)
    before = copy.deepcopy(model.state_dict())
    model.train()
    x, y = batch(model, pictures)
    for side in (model.x, model.y):
        assert side.training
        assert not any(module.training for module in side.tower.modules())
        assert not any(parameter.requires_grad for parameter in side.tower.parameters())
    assert all(parameter.requires_grad for side in (model.x, model.y) for parameter in side.head.parameters())
    step(model, x, y)
    for key, value in model.state_dict().items():  # batch norm's running statistics among them
        assert torch.equal(value, before[key]) == (".tower." in key), key
    with torch.no_grad():
        assert all(not features.requires_grad for features in model(x, y))


def test_clip_and_siglip_give_their_own_features(joint, pictures):
    folder, original = joint
    model = build_model(pretrained=folder).eval()
    assert (model.images.size, model.images.mean, model.images.std) == (32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert model.tokenizer.max_length == 16
    assert model.tokenizer.padding == ("max_length" if folder.name == "siglip" else "longest")
    assert model.width == (32 if folder.name == "siglip" else 24)
    assert model.joint.temperature == pytest.approx(original.logit_scale.neg().exp().item())
    x, y = batch(model, pictures)
    fx, fy = model(x, y)
    torch.testing.assert_close(fx, normalize(original.get_image_features(x).pooler_output))
    torch.testing.assert_close(fy, normalize(original.get_text_features(**y).pooler_output))


def test_clip_and_siglip_train(joint, pictures):
    folder, _ = joint
    model = build_model(pretrained=folder, y_frozen=True)
    step(model, *batch(model, pictures))
    assert all(parameter.grad is not None for parameter in model.x.parameters())
    assert all(parameter.grad is None for parameter in model.y.tower.parameters())


def test_one_tower_of_a_clip(tmp_path, tokenizer, pictures):
    from transformers import CLIPConfig, CLIPModel

    from .conftest import joint_folder

    original = joint_folder(tmp_path / "clip", CLIPModel, CLIPConfig, tokenizer)
    model = build_model(tmp_path / "clip", tmp_path / "clip", x_head="none", y_head="none", width=32).eval()
    x, y = batch(model, pictures)
    torch.testing.assert_close(model.x(x), normalize(original.vision_model(x).pooler_output))
    torch.testing.assert_close(model.y(y), normalize(original.text_model(**y).pooler_output))


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_vectors_with_heads(head):
    model = build_model("vectors", "vectors", x_width=5, y_width=7, x_head=head, y_head=head, width=12)
    check_features(*step(model, torch.randn(6, 5), torch.randn(6, 7)), width=12)
    assert model.encode_images(torch.randn(9, 5)).shape == (9, 12)
    assert model.encode_texts(torch.randn(9, 7).numpy(), batch_size=4).shape == (9, 12)


def test_any_two_modules():
    x, y = nn.Linear(5, 12), nn.Sequential(nn.Linear(7, 12), nn.ReLU())
    inputs = torch.randn(6, 5), torch.randn(6, 7)
    model = DualEncoder(x, y)
    check_features(*model(*inputs), width=12)
    assert torch.equal(model(*inputs)[0], normalize(x(inputs[0])))
    with_heads = build_model(x, y, x_width=12, y_width=12, width=4)
    check_features(*with_heads(*inputs), width=4)


def test_unreached_parameters_ask_for_no_gradient(tmp_path, pictures):
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(tmp_path / "dino")
    model = build_model(tmp_path / "dino", texts=CAPTIONS, image_size=28)
    assert not model.x.tower.backbone.embeddings.mask_token.requires_grad
    step(model, *batch(model, pictures))
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_autocast_features_are_unit_norm_in_float32(pictures):
    model = build_model(texts=CAPTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        fx, fy = model(*batch(model, pictures))
    check_features(fx, fy, width=256)


def test_float64(pictures):
    model = build_model(texts=CAPTIONS).double()
    x, y = batch(model, pictures)
    assert all(features.dtype == torch.float64 for features in model(x.double(), y))


def test_norms_and_biases_are_the_vectors():
    """The optimizer tells them by their shape: nothing else may be a vector, and they may be nothing else."""
    model = build_model(texts=CAPTIONS)
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        exempt = name.endswith(".bias") or isinstance(owner, nn.GroupNorm | nn.LayerNorm)
        assert exempt == (parameter.ndim < 2), name


class TestRefusals:
    """One or two lines that name the argument and what to do."""

    def refused(self, *words, **arguments):
        with pytest.raises(UserError) as caught:
            build_model(**{"texts": CAPTIONS} | arguments)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert len(message.splitlines()) <= 2

    def test_misspelt_preset(self):
        self.refused("model.x.encoder", "did you mean 'tiny_resnet'", x="tiny_restnet")
        self.refused("model.y.encoder", "did you mean 'distilbert'", y="distillbert")

    def test_hub_name_without_network(self):
        self.refused(
            "model.x.encoder", "microsoft/resnet-50", "not a folder", "save_pretrained", x="microsoft/resnet-50"
        )
        self.refused("model.y.encoder", "bert-base-uncased", "AutoTokenizer", y="bert-base-uncased")

    def test_folders(self, tmp_path):
        self.refused("model.x.encoder", "config.json", x=tmp_path)
        self.refused("not a folder", x=tmp_path / "none")
        (tmp_path / "config.json").write_text("{")
        self.refused("config.json", "JSON", x=tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
        self.refused("weights", "safetensors", x=tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
        self.refused("unheard_of", x=tmp_path)

    def test_truncated_weights(self, image_folder):
        weights = image_folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        self.refused("model.x.encoder", "cannot be loaded", x=image_folder)

    def test_pickled_weights(self, image_folder):
        (image_folder / "model.safetensors").unlink()
        torch.save({}, image_folder / "pytorch_model.bin")
        self.refused("model.x.encoder", "model.safetensors", x=image_folder)

    def test_weights_of_another_model(self, image_folder):
        from transformers import ResNetConfig

        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32], depths=[1, 1, 1]).save_pretrained(image_folder)
        self.refused("model.x.encoder", x=image_folder)

    def test_texts(self, text_folder, tmp_path):
        self.refused("texts", texts=None)
        self.refused("model.y.max_length", "at most 512", y="distilbert", max_length=600)
        self.refused("model.y.max_length", "at most 16", y=text_folder, max_length=99)
        train_tokenizer([f"{number} {number:x}" for number in range(3000)], 900).save_pretrained(tmp_path / "large")
        self.refused("model.y.tokenizer", "knows 300", y=text_folder, tokenizer=tmp_path / "large")
        for path in text_folder.glob("tokenizer*"):
            path.unlink()
        self.refused("tokenizer", "AutoTokenizer", y=text_folder)
        self.refused("model.y.tokenizer", tokenizer=text_folder)

    def test_decoder_as_text_tower(self, tmp_path, tokenizer):
        from transformers import GPT2Config, GPT2Model

        config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300, bos_token_id=2, eos_token_id=3)
        GPT2Model(config).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        self.refused("first token", y=tmp_path)

    def test_towers_on_the_wrong_side(self, image_folder, text_folder):
        self.refused("model.x.encoder", x=text_folder)
        self.refused("model.y.encoder", y=image_folder)
        self.refused("resnet", y=image_folder, tokenizer=text_folder)

    def test_pretrained(self, text_folder, joint, tmp_path):
        self.refused("model.pretrained", "bert", "clip, siglip", pretrained=text_folder)
        self.refused("model.width: 7", "features", pretrained=joint[0], width=7)
        build_model(texts=CAPTIONS).save_pretrained(tmp_path / "nuclr")
        self.refused("model.pretrained=", x=tmp_path / "nuclr")

    def test_widths(self):
        self.refused("x_width", x="vectors")
        self.refused("model.width: 0", width=0)
        self.refused("model.x.head", "linear, mlp, none", x_head="conv")
        self.refused("model.y.head", "width is 99", y_head="none", width=99)

    def test_inputs(self):
        model = build_model("vectors", nn.Linear(7, 12), x_width=5, width=4)
        with pytest.raises(UserError, match=r"\(6, 9\).*\(n, 5\)"):
            model(torch.randn(6, 9), torch.randn(6, 7))
        with pytest.raises(UserError, match="x has 4 features and y 12"):
            model(torch.randn(6, 5), torch.randn(6, 7))
        with pytest.raises(UserError, match="no texts"):
            model.prepare_texts(["a"])


@pytest.mark.slow
def test_full_size_step():
    """The paper's towers, from random weights."""
    model = build_model("resnet50", "distilbert", texts=CAPTIONS)
    assert model.images.size == 256
    sizes = [sum(p.numel() for p in side.tower.parameters()) for side in (model.x, model.y)]
    assert sizes[0] == 23_508_032  # ResNet-50 without its classifier
    texts = model.prepare_texts((CAPTIONS * 3)[:8])
    fx, fy = step(model, torch.randn(8, 3, 256, 256), texts)
    assert fx.shape == fy.shape == (8, 256)
    assert all(parameter.grad is not None for parameter in model.parameters())
