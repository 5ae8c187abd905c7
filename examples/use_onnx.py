"""Run a model that was exported to ONNX with ONNX Runtime, Pillow and tokenizers. nuclr only draws the pictures here.

pip install '.[onnx]'
nuclr export runs/demo --to onnx --out demo-onnx
python examples/use_onnx.py demo-onnx
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps
from tokenizers import Tokenizer

from nuclr.data import open_pairs


def encode_texts(folder: str, texts: list[str]) -> np.ndarray:
    session = onnxruntime.InferenceSession(f"{folder}/text/model.onnx")
    encoded = Tokenizer.from_file(f"{folder}/text/tokenizer.json").encode_batch(texts)
    tokens = {"input_ids": [item.ids for item in encoded], "attention_mask": [item.attention_mask for item in encoded]}
    names = [node.name for node in session.get_inputs()]
    return session.run(None, {name: np.array(tokens[name]) for name in names})[0]


def encode_images(folder: str, images: list[Image.Image]) -> np.ndarray:
    session = onnxruntime.InferenceSession(f"{folder}/image/model.onnx")
    facts = session.get_modelmeta().custom_metadata_map
    size, mean, std = (json.loads(facts[name]) for name in ("image_size", "image_mean", "image_std"))
    squares = [ImageOps.fit(image.convert("RGB"), (size, size), Image.BICUBIC) for image in images]
    pixels = (np.stack(squares) / 255 - mean) / std
    return session.run(None, {"pixel_values": pixels.transpose(0, 3, 1, 2).astype(np.float32)})[0]


def main() -> None:
    folder = sys.argv[1]
    pairs = open_pairs("builtin:n=100,split=val")
    x = encode_images(folder, [pairs.item("x", i) for i in range(100)])
    y = encode_texts(folder, [pairs.item("y", i) for i in range(100)])
    first = (x @ y.T).argmax(axis=1)
    print(f"{len(x)} images and texts of width {x.shape[1]}, recall@1 {np.mean(first == np.arange(100)):.1%}")


if __name__ == "__main__":
    main()
