"""Backbones: where a name leads, and weights that cannot be used."""

import pytest
import torch

from nuclr.errors import UserError
from nuclr.models.backbones import load_backbone, locate, read_json

KEY = "model.x.encoder"


def test_folders_are_used_without_the_hub(image_folder):
    assert locate(image_folder, KEY) == image_folder
    assert locate(str(image_folder), KEY) == image_folder


def test_hub_names_are_downloaded_once(image_folder, monkeypatch):
    calls = []

    def download(name, allow_patterns, local_files_only):
        calls.append(local_files_only)
        if local_files_only:
            raise OSError("not in the cache")
        return str(image_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert locate("someone/resnet", KEY) == image_folder
    assert calls == [True, False]  # the cache first, then the network


def test_folders_without_a_model(tmp_path):
    with pytest.raises(UserError, match=r"model\.x\.encoder.*no config\.json"):
        locate(tmp_path, KEY)
    with pytest.raises(UserError, match="not a folder"):
        locate(tmp_path / "none", KEY)


def test_broken_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(UserError, match=r"config\.json.*JSON"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(UserError, match="JSON object"):
        read_json(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_json(tmp_path / "none.json")


def test_configurations_without_weights_or_unknown(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    with pytest.raises(UserError, match=r"model\.x\.encoder: the weights .*safetensors"):
        load_backbone(tmp_path, KEY, "image")
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(UserError, match=r"config\.json.*unheard_of"):
        load_backbone(tmp_path, KEY, "image")


def test_truncated_weights(image_folder):
    weights = image_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model\.x\.encoder.*cannot be loaded"):
        load_backbone(image_folder, KEY, "image")


def test_pickled_weights_are_refused(image_folder):
    (image_folder / "model.safetensors").unlink()
    torch.save({}, image_folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"model\.x\.encoder.*model\.safetensors"):
        load_backbone(image_folder, KEY, "image")


def test_weights_of_another_model(image_folder):
    from transformers import ResNetConfig

    ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32], depths=[1, 1, 1]).save_pretrained(image_folder)
    with pytest.raises(UserError, match=r"model\.x\.encoder"):
        load_backbone(image_folder, KEY, "image")
