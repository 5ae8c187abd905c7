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

from nuclr.export.hf import at_own_size, require_joint
from nuclr.export.trained import Trained, Written
from nuclr.files import write_json

CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"
QUICK_GELU = {"quick_gelu": True, "gelu": False}
DEFAULT_EPS = 1e-5
LEGACY_EOS = 2  # CLIPTextModel then pools at the largest token, as open_clip does by default

# Modules of a layer in transformers and in open_clip.
LAYER = {
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


def write(trained: Trained, folder: Path) -> Written:
    """Write a run as a model of open_clip.

    Raises:
        UserError: if the run's model is not a CLIP that open_clip can hold.

    """
    _check(trained)
    images, texts = trained.image_and_text
    backbone = at_own_size(images.tower, trained)  # type: ignore[arg-type]
    write_json(folder / CONFIG, _config(trained, backbone.config))
    text_model: Any = texts.tower.backbone
    image_head: Any = images.head
    text_head: Any = texts.head
    length = texts.inputs.max_length  # type: ignore[union-attr]
    state = {
        **_image_weights(backbone.state_dict(), backbone.config.num_hidden_layers),
        **_text_weights(text_model.state_dict(), text_model.config.num_hidden_layers, length),
        "visual.proj": image_head.weight.T,
        "text_projection": text_head.weight.T,
        "logit_scale": torch.tensor(-math.log(trained.temperature)),
    }
    save_file({name: tensor.detach().float().contiguous().clone() for name, tensor in state.items()}, folder / WEIGHTS)
    trained.write_inputs(texts, folder)
    return _describe(trained, folder.name)


def _check(trained: Trained) -> None:
    """Refuse a model that open_clip does not have."""
    joint = require_joint(trained)
    if joint.config.model_type != "clip":
        raise trained.refuse("is a SigLIP, which open_clip builds from timm; use --to hf")
    activations = {joint.config.vision_config.hidden_act, joint.config.text_config.hidden_act}
    if len(activations) != 1 or not activations <= QUICK_GELU.keys():
        names = " and ".join(sorted(activations))
        raise trained.refuse(f"has the activation {names}; open_clip has gelu or quick_gelu")


def _config(trained: Trained, vision: Any) -> dict[str, Any]:
    joint = require_joint(trained)
    images, texts = trained.image_and_text
    image_format: Any = images.inputs
    inputs: Any = texts.inputs
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
    model = {
        "embed_dim": joint.width,
        "quick_gelu": QUICK_GELU[text.hidden_act],
        "vision_cfg": vision_cfg,
        "text_cfg": text_cfg,
    }
    preprocess = {
        "size": [image_format.size, image_format.size],
        "mode": "RGB",
        "mean": image_format.mean,
        "std": image_format.std,
        "interpolation": "bicubic",
        "resize_mode": "squash" if trained.squash else "shortest",
    }
    return {"model_cfg": model, "preprocess_cfg": preprocess}


def _image_weights(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    renamed = {
        "class_embedding": state["embeddings.class_embedding"],
        "conv1.weight": state["embeddings.patch_embedding.weight"],
        "positional_embedding": state["embeddings.position_embedding.weight"],
        "ln_pre.weight": state["pre_layrnorm.weight"],
        "ln_pre.bias": state["pre_layrnorm.bias"],
        "ln_post.weight": state["post_layernorm.weight"],
        "ln_post.bias": state["post_layernorm.bias"],
        **_layers(state, layers),
    }
    return {f"visual.{name}": tensor for name, tensor in renamed.items()}


def _text_weights(
    state: dict[str, Tensor],
    layers: int,
    length: int,
) -> dict[str, Tensor]:
    return {
        "token_embedding.weight": state["embeddings.token_embedding.weight"],
        # Texts are always padded to the context length, which may be less than the model has positions.
        "positional_embedding": state["embeddings.position_embedding.weight"][:length],
        "ln_final.weight": state["final_layer_norm.weight"],
        "ln_final.bias": state["final_layer_norm.bias"],
        **_layers(state, layers),
    }


def _layers(state: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the weights of the transformer's layers under open_clip's names."""
    renamed = {}
    for number in range(count):
        old = f"encoder.layers.{number}"
        new = f"transformer.resblocks.{number}"
        for kind in ("weight", "bias"):
            parts = [state[f"{old}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            renamed[f"{new}.attn.in_proj_{kind}"] = torch.cat(parts)
            for ours, theirs in LAYER.items():
                renamed[f"{new}.{theirs}.{kind}"] = state[f"{old}.{ours}.{kind}"]
    return renamed


def _describe(trained: Trained, name: str) -> Written:
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
    return Written(
        library="open_clip",
        task="zero-shot-image-classification",
        code=code,
        notes=notes,
        lines=[f"{name}: CLIP of open_clip with tokenizer, preprocessing and model card"],
    )
