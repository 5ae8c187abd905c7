"""Export to open_clip: a CLIP with a vision transformer, as `open_clip_config.json` and `open_clip_model.safetensors`.

open_clip has the same architecture as CLIPModel under other names, so the weights are renamed: the three projections
of an attention become one, and the last projections are transposed. `local-dir:` of open_clip loads the folder.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nuclr.errors import UserError
from nuclr.export import card
from nuclr.export.positions import at_own_size
from nuclr.export.trained import Trained, open_trained, write_inputs
from nuclr.files import write_json
from nuclr.models import Encoder, ImageFormat, Tokenizer
from nuclr.models.towers import TextTower

TARGET = "open-clip"
CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
QUICK_GELU = {"quick_gelu": True, "gelu": False}
DEFAULT_EPS = 1e-5
LEGACY_EOS = 2  # CLIPTextModel then pools at the largest token, as open_clip does by default

LAYER = {
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
"""Modules of a layer in transformers and in open_clip."""


def write(source: Path, folder: Path, best: bool = False) -> list[str]:
    """Write a run as a model of open_clip.

    Args:
        source: a finished run.
        folder: an empty folder.
        best: use the weights of the best checkpoint.

    Returns:
        Lines that say what was written.

    Raises:
        UserError: if the run's model is not a CLIP that open_clip can hold.

    """
    trained = open_trained(source, best)
    images, texts = _clip_sides(trained)
    backbone = at_own_size(images.tower, TARGET)  # type: ignore[arg-type]
    write_json(folder / CONFIG, _config(trained, backbone.config, texts, images))
    text_model: Any = texts.tower.backbone
    image_head: Any = images.head
    text_head: Any = texts.head
    state = {
        **_image_weights(backbone.state_dict(), backbone.config),
        **_text_weights(text_model.state_dict(), texts),
        "visual.proj": image_head.weight.T,
        "text_projection": text_head.weight.T,
        "logit_scale": torch.tensor(-math.log(trained.temperature)),
    }
    save_file({name: tensor.detach().float().contiguous().clone() for name, tensor in state.items()}, folder / WEIGHTS)
    write_inputs(trained, texts, folder)
    card.write(trained, folder, _usage(trained, folder.name))
    return [f"{folder.name}: CLIP of open_clip with tokenizer, preprocessing and model card"]


def _clip_sides(trained: Trained) -> tuple[Encoder, Encoder]:
    """Return the encoders of images and of texts; refuse a model that open_clip does not have."""
    where, joint = trained.run.folder, trained.model.joint
    if joint is None:
        raise UserError(
            f"--to {TARGET}: open_clip takes CLIP models, and {where} did not start from one (model.pretrained); "
            "use --to onnx or --to sentence-transformers"
        )
    if joint.config.model_type != "clip":
        raise UserError(f"--to {TARGET}: {where} holds a SigLIP, which open_clip builds from timm; use --to hf")
    images, texts = sorted((trained.model.x, trained.model.y), key=lambda side: isinstance(side.tower, TextTower))
    parts = (joint.config.vision_config, joint.config.text_config)
    activations = {part.hidden_act for part in parts}
    if len(activations) != 1 or not activations <= QUICK_GELU.keys():
        found = " and ".join(sorted(activations))
        raise UserError(f"--to {TARGET}: {where} has the activation {found}; open_clip has gelu or quick_gelu")
    if not isinstance(texts.inputs, Tokenizer) or texts.inputs.tokenizer.padding_side != "right":
        raise UserError(f"--to {TARGET}: the tokenizer of {where} pads on the left; open_clip pads on the right")
    return images, texts


def _config(trained: Trained, vision: Any, texts: Encoder, images: Encoder) -> dict[str, Any]:
    joint, inputs, image_format = trained.model.joint, texts.inputs, images.inputs
    assert joint is not None and isinstance(inputs, Tokenizer) and isinstance(image_format, ImageFormat)
    text = joint.config.text_config
    vision_cfg = {
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "layers": vision.num_hidden_layers,
        "width": vision.hidden_size,
        "head_width": vision.hidden_size // vision.num_attention_heads,
        "mlp_ratio": vision.intermediate_size / vision.hidden_size,
    }
    text_cfg = {
        "context_length": inputs.max_length,
        "vocab_size": text.vocab_size,
        "layers": text.num_hidden_layers,
        "width": text.hidden_size,
        "heads": text.num_attention_heads,
        "mlp_ratio": text.intermediate_size / text.hidden_size,
        "pad_id": inputs.tokenizer.pad_token_id,
        # With `local-dir:` the tokenizer in the folder is used, whatever the name.
        "hf_tokenizer_name": "tokenizer.json",
    }
    if text.eos_token_id != LEGACY_EOS:
        text_cfg |= {"pool_type": "eos", "eos_id": text.eos_token_id}
    for part, config in ((vision, vision_cfg), (text, text_cfg)):
        if part.layer_norm_eps != DEFAULT_EPS:
            config["norm_kwargs"] = {"eps": part.layer_norm_eps}
    model = {"embed_dim": joint.width, "quick_gelu": QUICK_GELU[text.hidden_act]}
    preprocess = {
        "size": [image_format.size, image_format.size],
        "mode": "RGB",
        "mean": image_format.mean,
        "std": image_format.std,
        "interpolation": "bicubic",
        "resize_mode": "squash" if trained.squash else "shortest",
    }
    model_cfg = model | {"vision_cfg": vision_cfg, "text_cfg": text_cfg}
    return {"model_cfg": model_cfg, "preprocess_cfg": preprocess}


def _image_weights(state: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    names = {
        "embeddings.class_embedding": "class_embedding",
        "embeddings.patch_embedding.weight": "conv1.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
    }
    for old, new in (("pre_layrnorm", "ln_pre"), ("post_layernorm", "ln_post")):
        names |= {f"{old}.{kind}": f"{new}.{kind}" for kind in ("weight", "bias")}
    renamed = {new: state[old] for old, new in names.items()}
    renamed |= _layers(state, config.num_hidden_layers)
    return {f"visual.{name}": tensor for name, tensor in renamed.items()}


def _text_weights(state: dict[str, Tensor], texts: Encoder) -> dict[str, Tensor]:
    inputs, tower = texts.inputs, texts.tower
    assert isinstance(inputs, Tokenizer) and isinstance(tower, TextTower)
    renamed = {
        "token_embedding.weight": state["embeddings.token_embedding.weight"],
        # Texts are always padded to the context length, which may be less than the model has positions.
        "positional_embedding": state["embeddings.position_embedding.weight"][: inputs.max_length],
        "ln_final.weight": state["final_layer_norm.weight"],
        "ln_final.bias": state["final_layer_norm.bias"],
    }
    return renamed | _layers(state, tower.backbone.config.num_hidden_layers)


def _layers(state: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the weights of the transformer's layers under open_clip's names."""
    renamed = {}
    for number in range(count):
        old, new = f"encoder.layers.{number}", f"transformer.resblocks.{number}"
        for kind in ("weight", "bias"):
            parts = [state[f"{old}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            renamed[f"{new}.attn.in_proj_{kind}"] = torch.cat(parts)
            renamed |= {f"{new}.{theirs}.{kind}": state[f"{old}.{ours}.{kind}"] for ours, theirs in LAYER.items()}
    return renamed


def _usage(trained: Trained, name: str) -> card.Usage:
    path = json.dumps(f"local-dir:{name}")
    code = f"""
import open_clip
import torch
from PIL import Image

model, preprocess = open_clip.create_model_from_pretrained({path})
tokenizer = open_clip.get_tokenizer({path})
model.eval()

texts = ["a red circle", "two green squares"]
images = [Image.new("RGB", (64, 64), color) for color in ("red", "green")]  # or Image.open(path)
with torch.inference_mode():
    x = model.encode_image(torch.stack([preprocess(image) for image in images]), normalize=True)
    y = model.encode_text(tokenizer(texts), normalize=True)
scores = x @ y.T
"""
    notes = [
        f"`logit_scale` is log(1 / {trained.temperature:.6g}), the temperature of the run.",
        "open_clip cleans texts before it tokenizes them: repeated spaces, HTML entities and broken Unicode are "
        "repaired, which nuclr does not do.",
        "After uploading it to a hub, set `hf_tokenizer_name` in open_clip_config.json to the name of the repository.",
    ]
    return card.Usage("open_clip", "zero-shot-image-classification", code, notes)
