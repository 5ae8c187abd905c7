"""Tiny finished runs of every kind of model that is exported, trained when a test first asks for them."""

import contextlib
import functools
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from nuclr.data import open_pairs
from nuclr.export import export
from nuclr.models import DualEncoder
from nuclr.runs import config
from nuclr.training.loop import train
from tests.models.conftest import joint_folder
from tests.training import runs as training_runs

WIDTH = 8
PAIRS = open_pairs("builtin:n=100,split=val")
LONG = " and a red circle" * 40  # is truncated by every tokenizer
LIGHT = {"data.train": "builtin:n=32", "data.val": "builtin:n=10,split=val", "schedule.epochs": 1}
LIGHT |= {"augment.enabled": "false"}


@functools.cache
def texts() -> list[str]:
    """One hundred texts, of which one is long."""
    return [PAIRS.item("y", number) for number in range(99)] + [PAIRS.item("y", 99) + LONG]


@functools.cache
def images(size: int | None = None) -> list[Image.Image]:
    """One hundred square pictures, drawn at 32 pixels; enlarged to have another size."""
    pictures = [PAIRS.item("x", number) for number in range(100)]
    return [picture.resize((size, size), Image.Resampling.BICUBIC) if size else picture for picture in pictures]


def oblong_images() -> list[Image.Image]:
    """Pictures that are not square, of a few modes."""
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 256, (40, 53, 3), dtype=np.uint8)) for _ in range(3)]
    return [*pictures, pictures[0].convert("L"), pictures[1].rotate(90, expand=True)]


class Runs:
    """The folders of tiny runs by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[str, Path] = {}

    def __call__(self, name: str) -> Path:
        """Return the folder of a run, and train it if that was not done yet."""
        if name not in self._done:
            torch.manual_seed(0)
            target = self.folder / name
            target.mkdir(parents=True)
            settings = getattr(self, f"_{name}")(target)
            with contextlib.redirect_stderr(io.StringIO()):  # tests read what commands write to stderr
                train(config.load(target / "empty.yaml", settings), target / "run")
            self._done[name] = target / "run"
        return self._done[name]

    def model(self, name: str) -> DualEncoder:
        return DualEncoder.from_pretrained(self(name) / "model")

    def export(self, name: str, target: str) -> Path:
        """Return the folder of an export, and write it if that was not done yet."""
        out = self.folder / target / name
        if not out.exists():
            export(self(name), target, out)
        return out

    # Images and texts with encoders of their own

    def _separate(self, folder: Path) -> list[str]:
        return training_runs.picture_settings(folder, **LIGHT)

    def _other_encoders(self, folder: Path) -> list[str]:
        changes = {"model.x.encoder": "tiny_vit", "model.x.head": "mlp", "model.y.encoder": "bag_of_words"}
        return training_runs.picture_settings(folder, **LIGHT | changes | {"model.y.head": "mlp"})

    def _resnet(self, folder: Path) -> list[str]:
        from transformers import ResNetConfig, ResNetModel

        sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
        ResNetModel(ResNetConfig(**sizes)).save_pretrained(folder / "resnet")
        changes = {"model.x.encoder": folder / "resnet", "model.x.image_size": 40, "data.fit": "squash"}
        return training_runs.picture_settings(folder, **LIGHT | changes)

    def _towers_of_clip(self, folder: Path) -> list[str]:
        """Both towers of a CLIP, without heads."""
        self._clip_folder(folder / "clip")
        changes = {f"model.{side}.encoder": folder / "clip" for side in "xy"}
        changes |= {f"model.{side}.head": "none" for side in "xy"} | {"model.width": 32}
        return training_runs.picture_settings(folder, **LIGHT | changes)

    # CLIP and SigLIP

    def _clip(self, folder: Path) -> list[str]:
        self._clip_folder(folder / "clip")
        return self._joint(folder, "clip", **{"objective.name": "clip"})

    def _clip_at_another_size(self, folder: Path) -> list[str]:
        self._clip_folder(folder / "clip", eos=3, hidden_act="gelu")
        changes = {"model.x.image_size": 48, "model.y.max_length": 12, "objective.temperature": 0.05}
        return self._joint(folder, "clip", **changes)

    def _siglip(self, folder: Path) -> list[str]:
        from transformers import SiglipConfig, SiglipModel

        joint_folder(folder / "siglip", SiglipModel, SiglipConfig, tokenizer(), text={"projection_size": 32})
        return self._joint(folder, "siglip", **{"objective.name": "siglip"})

    def _joint(self, folder: Path, name: str, **changes) -> list[str]:
        settings = training_runs.picture_settings(folder, **LIGHT | {"model.pretrained": folder / name} | changes)
        return [setting for setting in settings if not re.match("model.width|objective.zeta_lr", setting)]

    def _clip_folder(self, folder: Path, eos: int = 2, hidden_act: str = "quick_gelu") -> None:
        """Write a CLIP. With eos 2, transformers pools at the largest token; otherwise at the token `eos`."""
        from transformers import CLIPConfig, CLIPModel

        text = {"hidden_act": hidden_act, "eos_token_id": eos}
        joint_folder(folder, CLIPModel, CLIPConfig, tokenizer(), text=text, projection_dim=24)
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["hidden_act"] = hidden_act
        (folder / "config.json").write_text(json.dumps(config))

    # Other modalities

    def _questions(self, folder: Path) -> list[str]:
        """Two text encoders: a BERT with mean pooling, and a preset."""
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        BertModel(BertConfig(vocab_size=300, max_position_embeddings=16, **sizes)).save_pretrained(folder / "bert")
        tokenizer().save_pretrained(folder / "bert")
        changes = {"model.x.encoder": folder / "bert", "model.x.pooling": "mean", "model.x.max_length": 12}
        changes |= {"model.y.encoder": "tiny_text", "schedule.epochs": 1}
        return training_runs.text_settings(folder, 1, **changes)

    def _shared_texts(self, folder: Path) -> list[str]:
        return training_runs.text_settings(folder, 1, **{"schedule.epochs": 1})

    def _short_texts(self, folder: Path) -> list[str]:
        """Features that can be shortened."""
        return training_runs.text_settings(folder, 1, **{"schedule.epochs": 1, "model.matryoshka": "[4]"})

    def _vectors(self, folder: Path) -> list[str]:
        return training_runs.vector_settings(folder, **{"schedule.epochs": 1})

    def _views(self, folder: Path) -> list[str]:
        return training_runs.view_settings(folder, 16, **{"schedule.epochs": 1, "model.x.encoder": "tiny_vit"})


@functools.cache
def tokenizer():
    from nuclr.models import train_tokenizer

    return train_tokenizer(texts()[:60], 300)


def run_card(folder: Path) -> dict[str, Any]:
    """Run the Python lines of a model card in the folder that holds the export, and return their variables."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    variables: dict[str, Any] = {}
    with contextlib.chdir(folder.parent):
        exec(code, variables)
    return variables


def largest_difference(features, expected) -> float:
    features, expected = (torch.as_tensor(np.asarray(values)) for values in (features, expected))
    assert features.shape == expected.shape
    return float((features - expected).abs().max())
