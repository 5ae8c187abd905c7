"""Export to sentence-transformers: a folder that `SentenceTransformer(folder)` loads.

One text encoder gives Transformer, Pooling, Dense and Normalize. Two encoders are put behind a Router, which chooses by
modality (image or text) or, if both sides take texts, by task: `encode_query` uses side x and `encode_document` side y.
A CLIP or SigLIP is one Transformer for both modalities. Sides that sentence-transformers cannot hold (vectors, image
encoders that are not part of transformers) are left out, and the command says so.
"""

import json
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nuclr.errors import require
from nuclr.export.hf import at_own_size, write_joint_model
from nuclr.export.trained import Trained, Written
from nuclr.models import Encoder, Tokenizer
from nuclr.models.backbones import quiet
from nuclr.models.towers import OWN_TEXT_POOLING, BagOfWords, ImageTower, TextTower

MODULES = "sentence_transformers.base.modules"
POOLED = "sentence_embedding"
TOKENS = "token_embeddings"


def write(trained: Trained, folder: Path) -> Written:
    """Write a run as a SentenceTransformer.

    Raises:
        UserError: if the run's model has no text side, or its text encoder cannot be written.

    """
    if "text" not in trained.modalities:
        raise trained.refuse(f"has no text side (its model takes {' and '.join(trained.modalities)}); use --to onnx")
    library = require("sentence_transformers", purpose=f"--to {trained.target}")
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, quiet():
        if trained.model.joint is not None:
            modules = _joint_modules(trained, Path(scratch))
            routes = ["image", "text"]
        else:
            chains, left_out = _chains(trained, Path(scratch))
            routes = list(chains)
            modules = _route(chains)
        model = library.SentenceTransformer(
            modules=modules,
            device="cpu",
            similarity_fn_name="cosine",
        )
        model.save_pretrained(str(folder), create_model_card=False)
    return _describe(trained, folder.name, routes, left_out)


def _chains(trained: Trained, scratch: Path) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the modules of every side that can be written, by route, and why others cannot."""
    both_texts = trained.modalities == ["text", "text"]
    chains: dict[str, list[Any]] = {}
    left_out = []
    for side, encoder in trained.model.sides:
        # AutoModel finds a class that is part of transformers, also where nuclr is not installed.
        origin = type(getattr(encoder.tower, "backbone", None)).__module__
        if encoder.modality == "text":
            route = {"x": "query", "y": "document"}[side] if both_texts else "text"
            chains[route] = _text_modules(trained, encoder, scratch / side)
        elif isinstance(encoder.tower, ImageTower) and origin.startswith("transformers."):
            chains["image"] = _image_modules(trained, encoder, scratch / side)
        else:
            kind = "is not part of transformers" if encoder.modality == "image" else "has no counterpart there"
            left_out.append(f"side {side} ({encoder.modality}s), whose encoder {kind}; use --to onnx for it")
    return chains, left_out


def _route(chains: dict[str, list[Any]]) -> list[Any]:
    if len(chains) == 1:
        return next(iter(chains.values()))
    mappings: Any = None  # by task; without one, `encode` must not choose an encoder silently
    if "image" in chains:
        mappings = {(None, route): route for route in chains}
    router = require(MODULES).Router
    return [
        router(
            chains,
            default_route=None,
            allow_empty_key=False,
            route_mappings=mappings,
        )
    ]


def _joint_modules(trained: Trained, scratch: Path) -> list[Any]:
    write_joint_model(trained, scratch)
    config = {
        "text": {"method": "get_text_features", "method_output_name": "pooler_output"},
        "image": {"method": "get_image_features", "method_output_name": "pooler_output"},
    }
    return [_transformer(scratch, config, POOLED, trained.image_and_text[1]), require(MODULES).Normalize()]


def _text_modules(
    trained: Trained,
    encoder: Encoder,
    scratch: Path,
) -> list[Any]:
    tower = encoder.tower
    inputs = encoder.inputs
    if not isinstance(inputs, Tokenizer) or not isinstance(tower, TextTower | BagOfWords):
        raise trained.refuse("its text encoder is a plugin's; it cannot be written")
    if inputs.tokenizer.padding_side != "right":
        raise trained.refuse("its tokenizer pads on the left; it cannot be written")
    backbone = _without_layers(tower, inputs) if isinstance(tower, BagOfWords) else tower.backbone
    backbone.save_pretrained(scratch)
    trained.write_inputs(encoder, scratch)
    own_pooling = backbone.config.model_type in OWN_TEXT_POOLING
    output = "pooler_output" if own_pooling else "last_hidden_state"
    config = {"text": {"method": "forward", "method_output_name": output}}
    modules = [_transformer(scratch, config, POOLED if own_pooling else TOKENS, encoder)]
    if not own_pooling:
        pooling = "cls" if isinstance(tower, TextTower) and tower.pooling == "first" else "mean"
        modules.append(_pooling(modules[0].get_embedding_dimension(), pooling))
    return [*modules, *_dense(encoder.head), require(MODULES).Normalize()]


def _without_layers(tower: BagOfWords, inputs: Tokenizer) -> Any:
    """Return a bag of words as a transformer without layers: its output are the token embeddings.

    The module StaticEmbedding of sentence-transformers cannot be used: it leaves out the special tokens.
    """
    from transformers import OPTConfig, OPTModel

    vocabulary, width = tower.embedding.weight.shape
    config = OPTConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        word_embed_proj_dim=width,
        num_hidden_layers=0,
        num_attention_heads=1,
        ffn_dim=1,
        max_position_embeddings=inputs.max_length,
        do_layer_norm_before=False,  # with True there is a final layer norm
        dropout=0.0,
        pad_token_id=inputs.tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = OPTModel(config)
    with torch.no_grad():
        model.decoder.embed_tokens.weight.copy_(tower.embedding.weight)
        model.decoder.embed_positions.weight.zero_()
    return model.eval()


def _image_modules(
    trained: Trained,
    encoder: Encoder,
    scratch: Path,
) -> list[Any]:
    tower: ImageTower = encoder.tower  # type: ignore[assignment]
    backbone: Any = at_own_size(tower, trained)
    backbone.save_pretrained(scratch)
    trained.write_inputs(encoder, scratch)
    # The output of the backbone's own pooling, (1, d) or (1, d, 1, 1); None if it has none.
    pooled = backbone(pixel_values=torch.zeros(1, 3, tower.size, tower.size)).get("pooler_output")
    is_vector = pooled is not None and pooled.ndim == 2
    output = "last_hidden_state" if pooled is None else "pooler_output"
    config = {"image": {"method": "forward", "method_output_name": output}}
    modules = [_transformer(scratch, config, POOLED if is_vector else TOKENS)]
    if not is_vector:  # features at several positions, or (b, d, 1, 1), which Transformer flattens
        modules.append(_pooling(modules[0].get_embedding_dimension(), "mean"))
    return [*modules, *_dense(encoder.head), require(MODULES).Normalize()]


def _transformer(
    path: Path,
    config: Any,
    output: str,
    texts: Encoder | None = None,
) -> Any:
    options: Any = {}
    if texts is not None and isinstance(texts.inputs, Tokenizer):
        options = {"text": {"max_length": texts.inputs.max_length}}
        if texts.inputs.padding == "max_length":
            options["text"] |= {"padding": "max_length", "return_attention_mask": False}
    module = require(MODULES).Transformer
    return module(
        str(path),
        modality_config=config,
        module_output_name=output,
        processing_kwargs=options,
    ).eval()


def _pooling(width: int, mode: str) -> Any:
    return require("sentence_transformers.sentence_transformer.modules").Pooling(width, mode)


def _dense(head: nn.Module) -> list[Any]:
    layers = list(head) if isinstance(head, nn.Sequential) else [head] if isinstance(head, nn.Linear) else []
    modules = []
    for layer, after in zip_longest(layers, layers[1:]):
        if isinstance(layer, nn.Linear):
            activation = nn.GELU() if isinstance(after, nn.GELU) else nn.Identity()
            dense = require(MODULES).Dense(
                layer.in_features,
                layer.out_features,
                layer.bias is not None,
                activation,
            )
            dense.linear.load_state_dict(layer.state_dict())
            modules.append(dense)
    return modules


def _describe(
    trained: Trained,
    name: str,
    routes: list[str],
    left_out: list[str],
) -> Written:
    texts = '["a red circle", "two green squares"]'
    imports = "from sentence_transformers import SentenceTransformer"
    notes = [f"Divide scores by the temperature of the run, {trained.temperature:.6g}, before a softmax."]
    task = "sentence-similarity"
    if "image" in routes:
        task = "feature-extraction"
        code = f"""
from PIL import Image
{imports}

model = SentenceTransformer({json.dumps(name)}, processor_kwargs={{"backend": "pil"}})
x = model.encode([Image.new("RGB", (64, 64), color) for color in ("red", "green")])
y = model.encode({texts})
scores = model.similarity(x, y)
"""
        notes.append(
            '`processor_kwargs={"backend": "pil"}` resizes images with Pillow, as the run did. Without it transformers '
            "uses torchvision if that is installed, which gives slightly different features."
        )
    elif "query" in routes:
        code = f"""
{imports}

model = SentenceTransformer({json.dumps(name)})
x = model.encode_query({texts})
y = model.encode_document({texts})
scores = model.similarity(x, y)
"""
        x, y = trained.run.sides
        notes.append(f"`encode_query` is for {x}, `encode_document` for {y}; `encode` needs one of these tasks.")
    else:
        code = f"""
{imports}

model = SentenceTransformer({json.dumps(name)})
y = model.encode({texts})
"""
    return Written(
        library="sentence-transformers",
        task=task,
        code=code,
        notes=notes + [f"Not part of this export: {reason}." for reason in left_out],
        lines=[
            f"{name}: SentenceTransformer for {' and '.join(routes)}, with model card",
            *(f"left out: {reason}" for reason in left_out),
        ],
    )
