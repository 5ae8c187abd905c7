"""Images, captions, and model folders as other tools write them, all tiny."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from nuclr.models import train_tokenizer

CAPTIONS = ["a red circle on blue", "two green squares", "three small yellow triangles at the top left of a grey field"]


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network in tests")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)


@pytest.fixture
def pictures():
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (40, 52, 3), dtype=np.uint8)) for _ in range(6)]


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(CAPTIONS, 300)


def batch(model, pictures):
    """Inputs of both sides, as in training."""
    texts = (CAPTIONS * 2)[: len(pictures)]
    return model.prepare_x(pictures), model.prepare_y(texts)


def step(model, x, y):
    """Take one SGD step on a contrastive loss; return the features before it."""
    fx, fy = model(x, y)
    nn.functional.cross_entropy(fx @ fy.T / 0.1, torch.arange(len(fx))).backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    return fx, fy


def check_features(fx, fy, width):
    for features in (fx, fy):
        assert features.shape == (6, width)
        assert features.dtype == torch.float32
        torch.testing.assert_close(features.norm(dim=1), torch.ones(6))


def joint_folder(folder, model_class, config_class, tokenizer, text=(), **options):
    shared = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"vocab_size": 300, "max_position_embeddings": 16, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    config = config_class(
        text_config=shared | tokens | dict(text),
        vision_config=shared | {"image_size": 32, "patch_size": 8},
        **options,
    )
    model = model_class(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"shortest_edge": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


@pytest.fixture(params=["clip", "siglip"])
def joint(request, tmp_path, tokenizer):
    """(folder, the model saved there)."""
    from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

    folder = tmp_path / request.param
    if request.param == "clip":
        return folder, joint_folder(folder, CLIPModel, CLIPConfig, tokenizer, projection_dim=24)
    return folder, joint_folder(folder, SiglipModel, SiglipConfig, tokenizer, text={"projection_size": 32})


@pytest.fixture
def text_folder(tmp_path, tokenizer):
    """A BERT with a pooler, which nuclr does not use."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=300, max_position_embeddings=16, **sizes)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def image_folder(tmp_path):
    """A ResNet with batch norm."""
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ResNetModel(config).save_pretrained(tmp_path / "resnet")
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": 40}
    (tmp_path / "resnet" / "preprocessor_config.json").write_text(json.dumps(processor))
    return tmp_path / "resnet"
