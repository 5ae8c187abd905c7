"""Backbones: where a name leads, and weights that cannot be used."""

import itertools
import json
import shutil
import subprocess
import sys

import pytest
import torch

from nuclr.errors import UserError
from nuclr.models import DualEncoder, EncoderSide, build_model
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
    with pytest.raises(UserError, match=r"model\.x\.encoder"):
        locate(tmp_path, KEY)
    with pytest.raises(UserError, match="none"):
        locate(tmp_path / "none", KEY)


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_broken_json(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        read_json(path)


def damage(folder, kind):
    weights = folder / "model.safetensors"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif kind == "pickled":
        weights.unlink()
        torch.save({}, folder / "pytorch_model.bin")
    elif kind == "missing":
        weights.unlink()
    elif kind == "of another model":
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 32], "depths": [1, 1, 1]}
        (folder / "config.json").write_text(json.dumps({"model_type": "resnet"} | sizes))
    elif kind == "unknown":
        (folder / "config.json").write_text('{"model_type": "unheard_of"}')


@pytest.mark.parametrize("kind", ["truncated", "pickled", "missing", "of another model", "unknown"])
def test_damaged_weights_are_refused(image_folder, kind):
    damage(image_folder, kind)
    with pytest.raises(UserError, match=rf"model\.x\.encoder: .*{image_folder}"):
        load_backbone(image_folder, KEY, "image")


EVIL = """
from pathlib import Path
Path({marker!r}).write_text("the code of the folder has run")
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "evil"
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
LOAD = """
import sys
from pathlib import Path
from nuclr.errors import UserError
from nuclr.models.backbones import load_backbone
from nuclr.models.pretrained import read_joint
from nuclr.models.tokenizer import load_tokenizer
for argument in sys.argv[1:]:
    folder = Path(argument)
    load = {
        "config": lambda: load_backbone(folder, "KEY", "text"),
        "joint": lambda: read_joint(folder, "KEY", {}),
        "tokenizer": lambda: load_tokenizer(folder, "KEY"),
    }[folder.name.partition("-")[0]]
    try:
        load()
        print("loaded")
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_code_in_a_model_folder_is_never_run_or_asked_about(text_folder, tmp_path):
    """In one process for all folders, because importing takes most of the time."""
    folders = []
    for part, model_type in itertools.product(("config", "joint", "tokenizer"), ("evil", "bert")):
        folder = tmp_path / f"{part}-{model_type}"
        shutil.copytree(text_folder, folder)
        (folder / "evil.py").write_text(EVIL.format(marker=str(folder / "marker")))
        path = folder / ("tokenizer_config.json" if part == "tokenizer" else "config.json")
        content = json.loads(path.read_text())
        content["auto_map"] = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
        if model_type == "evil":
            content |= {"model_type": "evil", "tokenizer_class": "Tokenizer"}
        path.write_text(json.dumps(content))
        folders.append(folder)
    command = [sys.executable, "-c", LOAD, *map(str, folders)]
    # The answer "y" would allow the code if transformers asked.
    process = subprocess.run(command, input="y\n" * 100, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert not list(tmp_path.glob("*/marker"))
    refused = [
        line.startswith(f"KEY: {folder}") for line, folder in zip(process.stdout.splitlines(), folders, strict=True)
    ]
    assert refused[:3] == [True, False, True], "only code knows this type of model"


@pytest.mark.parametrize(
    ("preset", "key", "value"), [("tiny_vit", "num_hidden_layers", 2**64), ("tiny_resnet", "depths", [10**9])]
)
def test_absurd_numbers_of_layers_are_refused_at_once(tmp_path, preset, key, value):
    build_model(EncoderSide(preset, image_size=16), EncoderSide("tiny_text", texts=["a red square"])).save_pretrained(
        tmp_path / "model"
    )
    path = tmp_path / "model" / "x" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=key):
        DualEncoder.from_pretrained(tmp_path / "model")
