"""Export to transformers: a CLIPModel or SiglipModel, or a VisionTextDualEncoderModel, with its processor.

A run that started from a CLIP or SigLIP (`model.pretrained`) is written as the model it came from. A run with an
encoder per side fits VisionTextDualEncoderModel only if both encoders pool by themselves (`pooler_output`) and no head
has a bias or a hidden layer, because that class has one linear projection without bias per side.
"""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nuclr.errors import UserError
from nuclr.export import card
from nuclr.export.positions import at_own_size
from nuclr.export.trained import Trained, open_trained, write_inputs
from nuclr.files import write_json
from nuclr.models import Encoder, Tokenizer
from nuclr.models.backbones import quiet, read_json
from nuclr.models.encoder import Head
from nuclr.models.pretrained import write_joint
from nuclr.models.towers import OWN_TEXT_POOLING, ImageTower, TextTower

TARGET = "hf"
CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel"}


def write(source: Path, folder: Path, best: bool = False) -> list[str]:
    """Write a run as a model of transformers.

    Args:
        source: a finished run.
        folder: an empty folder.
        best: use the weights of the best checkpoint.

    Returns:
        Lines that say what was written.

    Raises:
        UserError: if the run's model is not one that transformers has a class for.

    """
    trained = open_trained(source, best)
    if trained.model.joint is not None:
        images, texts = write_joint_model(trained, folder, TARGET)
        name = CLASSES[trained.model.joint.config.model_type]
    else:
        images, texts = _image_and_text(trained)
        with quiet():
            _dual_encoder(trained, images, texts).save_pretrained(folder)
        write_inputs(trained, images, folder)
        write_inputs(trained, texts, folder)
        name = "VisionTextDualEncoderModel"
    _write_processor(folder, "VisionTextDualEncoderProcessor" if trained.model.joint is None else None)
    card.write(trained, folder, _card(trained, folder.name, name, texts))
    return [f"{folder.name}: {name} with processor, tokenizer and model card"]


def write_joint_model(trained: Trained, folder: Path, target: str) -> tuple[Encoder, Encoder]:
    """Write the CLIPModel or SiglipModel of a run, with tokenizer and image processor, at the run's temperature.

    Args:
        trained: a run whose model has `joint` parts.
        folder: the folder to write to.
        target: the value of `--to`, to name in messages.

    Returns:
        The encoders of images and of texts.

    """
    model = trained.model
    if model.joint is None:
        raise UserError(f"--to {target}: {trained.run.folder} did not start from a CLIP or SigLIP (model.pretrained)")
    images, texts = sorted((model.x, model.y), key=lambda side: isinstance(side.tower, TextTower))
    backbone = at_own_size(images.tower, target)  # type: ignore[arg-type]
    config = copy.deepcopy(model.joint.config)
    config.vision_config = backbone.config
    joint = replace(model.joint.with_temperature(trained.temperature, trained.bias), config=config)
    stored = Encoder(ImageTower(backbone, images.inputs.size), images.head, inputs=images.inputs)  # type: ignore[union-attr]
    write_joint(joint, folder, stored, texts)
    write_inputs(trained, images, folder)
    write_inputs(trained, texts, folder)
    return images, texts


def _image_and_text(trained: Trained) -> tuple[Encoder, Encoder]:
    """Return the encoders of images and texts; refuse a model that VisionTextDualEncoderModel cannot hold."""
    by_modality = {encoder.modality: encoder for _, encoder in trained.sides}
    refusal = f"--to {TARGET}: {trained.run.folder} cannot be a model of transformers: "
    advice = "; use --to onnx" + (" or --to sentence-transformers" if "text" in by_modality else "")
    if set(by_modality) != {"image", "text"}:
        kinds = " and ".join(f"{encoder.modality or 'tensor'}s" for _, encoder in trained.sides)
        raise UserError(f"{refusal}it takes {kinds}, not images and texts{advice}")
    images, texts = by_modality["image"], by_modality["text"]
    if not isinstance(images.tower, ImageTower) or not is_of_transformers(images.tower.backbone):
        raise UserError(f"{refusal}its image encoder is not part of transformers{advice}")
    if not isinstance(texts.tower, TextTower) or texts.tower.backbone.config.model_type not in OWN_TEXT_POOLING:
        raise UserError(f"{refusal}VisionTextDualEncoderModel does not pool texts as its text encoder does{advice}")
    if not _pools_by_itself(images.tower):
        raise UserError(f"{refusal}VisionTextDualEncoderModel does not pool images as its image encoder does{advice}")
    if not all(_projection(encoder) is not None for encoder in (images, texts)):
        raise UserError(f"{refusal}VisionTextDualEncoderModel has projections without bias, its heads have one{advice}")
    return images, texts


def is_of_transformers(backbone: nn.Module) -> bool:
    """Return whether the class of a backbone is part of transformers, so that AutoModel finds it without nuclr."""
    return type(backbone).__module__.startswith("transformers.")


def _pools_by_itself(tower: ImageTower) -> bool:
    pixels = torch.zeros(1, 3, tower.size, tower.size)
    options: dict[str, Any] = {"interpolate_pos_encoding": True} if tower.interpolates else {}
    pooled = tower.backbone(pixel_values=pixels, **options).get("pooler_output")
    return pooled is not None and pooled.ndim == 2


def _projection(encoder: Encoder) -> Tensor | None:
    """Return the weight of a head that is one linear map without bias; None for other heads."""
    head = encoder.head
    if isinstance(head, Head) and head.kind == "none":
        return torch.eye(head.width)
    if isinstance(head, nn.Linear) and head.bias is None:
        return head.weight
    return None


def _dual_encoder(trained: Trained, images: Encoder, texts: Encoder) -> Any:
    from transformers import VisionTextDualEncoderConfig, VisionTextDualEncoderModel

    image_model: Any = at_own_size(images.tower, TARGET)  # type: ignore[arg-type]
    text_model: Any = texts.tower.backbone
    config = VisionTextDualEncoderConfig.from_vision_text_configs(
        image_model.config, text_model.config, projection_dim=trained.model.width
    )
    model = VisionTextDualEncoderModel(config, image_model, text_model)
    model.visual_projection.weight = nn.Parameter(_projection(images))  # type: ignore[arg-type]
    model.text_projection.weight = nn.Parameter(_projection(texts))  # type: ignore[arg-type]
    model.logit_scale = nn.Parameter(torch.tensor(-math.log(trained.temperature)))
    return model


def _write_processor(folder: Path, processor_class: str | None) -> None:
    """Name the processor class, which AutoProcessor cannot derive from the configuration of every model."""
    if processor_class is not None:
        path = folder / "preprocessor_config.json"
        write_json(path, read_json(path) | {"processor_class": processor_class})


def _card(trained: Trained, name: str, class_name: str, texts: Encoder) -> card.Usage:
    inputs, path = texts.inputs, json.dumps(name)
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
    return card.Usage("transformers", "zero-shot-image-classification", code, [scale])
