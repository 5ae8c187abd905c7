"""Small pictures with captions, and a small CLIPModel with its tokenizer and image processor."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

from nuclr.data.builtin import BuiltinPairs


def write_pairs(folder: Path, n: int) -> Path:
    """Write n generated pictures and a list of them as JSON lines and as tab-separated values; return the former."""
    pairs = BuiltinPairs(n=n)
    lines = []
    for number in range(n):
        pairs.item("x", number).save(folder / f"{number}.png")
        lines.append({"image": f"{number}.png", "caption": pairs.item("y", number)})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [f"{folder / line['image']}\t{line['caption']}\n" for line in lines]
    (folder / "pairs.tsv").write_text("filepath\ttitle\n" + "".join(rows))
    return folder / "pairs.jsonl"


def save_clip(folder: Path, captions: list[str], width: int = 16) -> Path:
    """Save a CLIPModel with random weights, a tokenizer of whole words, and an image processor."""
    words = sorted({word for caption in captions for word in caption.lower().split()})
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<unk>", "<start>", "<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("<start>", 2), ("<end>", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=special)
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<start>", "eos_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=24, **names).save_pretrained(folder)
    size = {"height": 32, "width": 32}
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size).save_pretrained(folder)
    tower = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1, "num_attention_heads": 2}
    numbers = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    text = tower | numbers | {"vocab_size": len(vocabulary), "max_position_embeddings": 24}
    vision = tower | {"image_size": 32, "patch_size": 16}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    return folder
