"""Export to transformers: the CLIPModel or SiglipModel that a run started from, with its processor.

An image tower of nuclr interpolates the position embeddings of a transformer that was made for images of another size.
Other tools do this only on request. All exports store the interpolated embeddings (`at_own_size`), which give the same
features.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nuclr.export.trained import Trained, Written
from nuclr.models import Encoder, Tokenizer
from nuclr.models.backbones import without_pooler
from nuclr.models.pretrained import Joint, write_joint
from nuclr.models.towers import ImageTower

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel"}
TOLERANCE = 1e-5  # relative to the largest feature
NAMES = ("embeddings.position_embedding.weight", "embeddings.position_embeddings")


def write(trained: Trained, folder: Path) -> Written:
    """Write a run as a model of transformers.

    Raises:
        UserError: if the run did not start from a CLIP or SigLIP.

    """
    joint = require_joint(trained)
    write_joint_model(trained, folder)
    return _describe(trained, folder.name, CLASSES[joint.config.model_type])


def require_joint(trained: Trained) -> Joint:
    """Return the parts of a CLIP or SigLIP that belong to neither side; refuse other models."""
    if trained.model.joint is None:
        other = " or --to sentence-transformers" if "text" in trained.modalities else ""
        raise trained.refuse(f"did not start from a CLIP or SigLIP (model.pretrained); use --to onnx{other}")
    return trained.model.joint


def write_joint_model(trained: Trained, folder: Path) -> None:
    """Write the CLIPModel or SiglipModel of a run, with tokenizer and image processor, at the run's temperature.

    Args:
        trained: a run whose model has `joint` parts.
        folder: the folder to write to.

    """
    images, texts = trained.image_and_text
    tower: Any = images.tower
    backbone = at_own_size(tower, trained)
    joint = require_joint(trained).with_temperature(trained.temperature, trained.bias)
    config = copy.deepcopy(joint.config)
    config.vision_config = backbone.config
    joint = replace(joint, config=config)
    resized = Encoder(ImageTower(backbone, tower.size), images.head, inputs=images.inputs)
    write_joint(joint, folder, resized, texts)
    trained.write_inputs(images, folder)
    trained.write_inputs(texts, folder)


def at_own_size(tower: ImageTower, trained: Trained) -> "PreTrainedModel":
    """Return the backbone of an image tower so that it takes images of the tower's size without further options.

    Args:
        tower: the image tower.
        trained: its run, to name in messages.

    Returns:
        The backbone itself, or a copy with interpolated position embeddings.

    Raises:
        UserError: if the position embeddings of this architecture cannot be stored at another size.

    """
    backbone = tower.backbone
    size = tower.size
    if not tower.interpolates:
        return backbone
    refusal = trained.refuse(
        f"the image encoder ({backbone.config.model_type}) was made for images of {backbone.config.image_size} pixels, "
        f"and cannot be stored for {size} pixels; use --to onnx"
    )
    state = backbone.state_dict()
    name = next((name for name in NAMES if name in state), None)
    if name is None:
        raise refusal
    config = copy.deepcopy(backbone.config)
    config.image_size = size
    resized = type(backbone)(config, **without_pooler(type(backbone))).eval()
    shape = resized.state_dict()[name].shape
    width = state[name].shape[-1]
    positions = torch.empty(1, shape.numel() // width, width)  # only its shape is used
    embeddings: Any = backbone.embeddings
    state[name] = embeddings.interpolate_pos_encoding(positions, size, size).reshape(shape)
    resized.load_state_dict(state)
    resized.requires_grad_(False)
    pixels = torch.randn(
        2,
        3,
        size,
        size,
        generator=torch.Generator().manual_seed(0),
    )
    before, after = (ImageTower(model, size)(pixels) for model in (backbone, resized))
    if (before - after).abs().max() > TOLERANCE * before.abs().max():
        raise refusal
    return resized


def _describe(
    trained: Trained,
    name: str,
    class_name: str,
) -> Written:
    path = json.dumps(name)
    inputs = trained.image_and_text[1].inputs
    fixed = isinstance(inputs, Tokenizer) and inputs.padding == "max_length"
    padding = 'padding="max_length", return_attention_mask=False' if fixed else "padding=True"
    code = f"""
import torch
from PIL import Image
from transformers import {class_name}, AutoImageProcessor, AutoTokenizer

model = {class_name}.from_pretrained({path}).eval()
tokenizer = AutoTokenizer.from_pretrained({path})
processor = AutoImageProcessor.from_pretrained({path}, backend="pil")

texts = ["a red circle", "two green squares"]
images = [Image.new("RGB", (64, 64), color) for color in ("red", "green")]  # or Image.open(path)
tokens = tokenizer(texts, {padding}, truncation=True, return_tensors="pt")
with torch.inference_mode():
    y = torch.nn.functional.normalize(model.get_text_features(**tokens).pooler_output)
    x = torch.nn.functional.normalize(model.get_image_features(**processor(images, return_tensors="pt")).pooler_output)
scores = x @ y.T
"""
    scale = f"`logit_scale` is log(1 / {trained.temperature:.6g}), the temperature of the run."
    if class_name == "SiglipModel":
        learnt = "learnt by the objective" if trained.bias is not None else "that of the model the run started from"
        scale += f" `logit_bias` is {learnt}."
    return Written(
        library="transformers",
        task="zero-shot-image-classification",
        code=code,
        notes=[scale],
        lines=[f"{name}: {class_name} with processor, tokenizer and model card"],
    )
