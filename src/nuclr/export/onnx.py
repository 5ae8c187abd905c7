"""Export to ONNX: one file per side, from prepared inputs to unit-norm features, for any batch size.

    image/    model.onnx, preprocessor_config.json    pixel_values (batch, 3, size, size), float32
    text/     model.onnx, tokenizer.json, ...         input_ids, attention_mask (batch, length), int64
    vector/   model.onnx                              vectors (batch, d), float32

The output is `features` (batch, width). Two sides of one modality are in x/ and y/. nuclr.json holds the metadata.
tokenizer.json truncates and pads by itself, so that the package tokenizers is enough. The files are read back with ONNX
Runtime before they are kept.
"""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import nuclr
from nuclr.errors import UserError, require
from nuclr.export import card
from nuclr.export.trained import Trained, describe_encoder, open_trained, write_inputs
from nuclr.files import write_json
from nuclr.models import Encoder, ImageFormat, Tokenizer
from nuclr.models.towers import BagOfWords, ImageTower, TextTower, VectorTower

TARGET = "onnx"
TOLERANCE = 1e-5
SEED = 0


def write(source: Path, folder: Path, best: bool = False) -> list[str]:
    """Write the encoders of a run as ONNX files.

    Args:
        source: a finished run.
        folder: an empty folder.
        best: use the weights of the best checkpoint.

    Returns:
        Lines that say what was written.

    Raises:
        UserError: if a side has an encoder of a plugin, or its ONNX file gives other features.

    """
    trained = open_trained(source, best)
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require(module, purpose=f"--to {TARGET}")
    for side, encoder in trained.sides:
        if not isinstance(encoder.tower, ImageTower | TextTower | BagOfWords | VectorTower):
            raise UserError(f"--to {TARGET}: side {side} of {source} has an encoder of a plugin; it cannot be written")
    lines = []
    for side, encoder in trained.sides:
        target = folder / trained.folders[side]
        target.mkdir()
        difference = _write_side(trained, side, encoder, target)
        lines.append(f"{folder.name}/{target.name}/model.onnx: features differ by at most {difference:.1e}")
    card.write(trained, folder, _usage(trained, folder.name))
    return lines


class Side(nn.Module):
    """One side as a function of tensors.

    `unit_norm` is not used: it looks at values to rescale rows whose squares overflow, which a fixed graph cannot do.

    Args:
        encoder: the encoder of the side.
        names: the names of its inputs.

    """

    def __init__(self, encoder: Encoder, names: list[str]) -> None:
        super().__init__()
        self.tower, self.head, self.names = encoder.tower, encoder.head, names

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return unit-norm features (b, width)."""
        if isinstance(self.tower, BagOfWords):
            inputs = dict(zip(self.names, tensors, strict=True))
            mask = inputs["attention_mask"].to(self.tower.embedding.weight.dtype)
            embedded = nn.functional.embedding(inputs["input_ids"], self.tower.embedding.weight)
            features = torch.einsum("bld,bl->bd", embedded, mask / mask.sum(1, keepdim=True).clamp_min(1))
        elif isinstance(self.tower, TextTower):
            features = self.tower(dict(zip(self.names, tensors, strict=True)))
        elif isinstance(self.tower, VectorTower):
            features = (tensors[0] - self.tower.mean) / self.tower.std
        else:
            features = self.tower(tensors[0])
        return normalize(self.head(features), dim=1)


def _write_side(trained: Trained, side: str, encoder: Encoder, target: Path) -> float:
    """Write one side and return the largest difference of a feature from the model's."""
    inputs = example_inputs(encoder, 2)
    module = Side(encoder, list(inputs)).eval()
    with _silence():
        program = torch.onnx.export(
            module,
            tuple(inputs.values()),
            dynamo=True,
            input_names=list(inputs),
            output_names=["features"],
            dynamic_shapes=(tuple(_dynamic_axes(encoder, name) for name in inputs),),
            verbose=False,
        )
        if program is None:
            raise UserError(f"--to {TARGET}: torch.onnx could not export side {side}")
        program.model.metadata_props.update(_metadata(trained, encoder))
        program.save(str(target / "model.onnx"))
    write_inputs(trained, encoder, target)
    if isinstance(encoder.inputs, Tokenizer):
        _complete_tokenizer(encoder.inputs, target)
    write_json(target / "nuclr.json", _metadata(trained, encoder))
    return _largest_difference(encoder, target / "model.onnx", side)


def example_inputs(encoder: Encoder, count: int, length: int | None = None) -> dict[str, Tensor]:
    """Return random inputs of a side, by name.

    Args:
        encoder: the encoder of the side.
        count: number of items.
        length: number of tokens per text; by default as many as the model takes, at most 8.

    """
    generator = torch.Generator().manual_seed(SEED)
    if isinstance(encoder.inputs, ImageFormat):
        size = encoder.inputs.size
        return {"pixel_values": torch.randn(count, 3, size, size, generator=generator)}
    if isinstance(encoder.inputs, Tokenizer):
        fixed = encoder.inputs.padding == "max_length"
        length = encoder.inputs.max_length if fixed else length or min(8, encoder.inputs.max_length)
        tokens = encoder.inputs.prepare(["a"] * count)
        ids = torch.randint(len(encoder.inputs), (count, length), generator=generator)
        last = encoder.inputs.prepare("a")["input_ids"][0, -1]
        ids[:, -1] = last  # the token at which a CLIP pools
        ones = {name: torch.full((count, length), int(tensor[0, 0])) for name, tensor in tokens.items()}
        return {name: ids if name == "input_ids" else tensor for name, tensor in ones.items()}
    if isinstance(encoder.tower, VectorTower):
        return {"vectors": torch.randn(count, len(encoder.tower.mean), generator=generator)}
    raise UserError(f"--to {TARGET}: inputs of modality {encoder.modality!r} cannot be written")


def _dynamic_axes(encoder: Encoder, name: str) -> dict[int, Any]:
    axes: dict[int, Any] = {0: torch.export.Dim("batch")}
    inputs = encoder.inputs
    if isinstance(inputs, Tokenizer) and inputs.padding == "longest" and name != "pixel_values":
        axes[1] = torch.export.Dim("length", max=inputs.max_length)
    return axes


def _metadata(trained: Trained, encoder: Encoder) -> dict[str, str]:
    """Return what a program needs to use a file without nuclr; ONNX metadata are texts."""
    facts: dict[str, Any] = {
        "producer": f"nuclr {nuclr.__version__}",
        "run": trained.run.settings.name,
        "modality": encoder.modality,
        "encoder": describe_encoder(encoder),
        "temperature": trained.temperature,
        "width": trained.model.width,
    }
    if isinstance(encoder.inputs, ImageFormat):
        facts |= {"image_size": encoder.inputs.size, "image_mean": encoder.inputs.mean}
        facts |= {"image_std": encoder.inputs.std, "image_fit": "squash" if trained.squash else "crop"}
    if isinstance(encoder.inputs, Tokenizer):
        facts |= {"max_length": encoder.inputs.max_length, "padding": encoder.inputs.padding}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}


def _complete_tokenizer(inputs: Tokenizer, target: Path) -> None:
    """Store truncation and padding in tokenizer.json, for programs that use the package tokenizers alone."""
    import tokenizers

    path = target / "tokenizer.json"
    if not path.is_file():
        return
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(inputs.max_length)
    length = inputs.max_length if inputs.padding == "max_length" else None
    pad, pad_id = inputs.tokenizer.pad_token, inputs.tokenizer.pad_token_id
    tokenizer.enable_padding(pad_id=pad_id, pad_token=str(pad), length=length, direction=inputs.tokenizer.padding_side)
    tokenizer.save(str(path))


@torch.inference_mode()
def _largest_difference(encoder: Encoder, path: Path, side: str) -> float:
    """Compare a file with the model at several batch sizes and lengths; refuse one that differs."""
    session = require("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest = 0.0
    for count, length in ((1, 2), (3, 5), (7, None)):
        inputs = example_inputs(encoder, count, length)
        features = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
        expected = encoder.features(inputs if "input_ids" in inputs else next(iter(inputs.values())))
        largest = max(largest, float(np.abs(features - expected.numpy()).max()))
    if not largest <= TOLERANCE:
        raise UserError(
            f"--to {TARGET}: the file of side {side} gives features that differ by {largest:.1e}; not written"
        )
    return largest


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hide the warnings of torch's exporter about itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _usage(trained: Trained, name: str) -> card.Usage:
    by_modality = {encoder.modality: (side, encoder) for side, encoder in trained.sides}
    imports, lines = ["import numpy as np", "import onnxruntime"], [f"folder = {json.dumps(name)}"]
    if "image" in by_modality:
        imports += ["from PIL import Image, ImageOps"]
    if "text" in by_modality:
        imports += ["from tokenizers import Tokenizer"]
    for side, encoder in trained.sides:
        lines += ["", *_lines(trained, side, encoder)]
    if len(trained.sides) == 2:
        lines += ["scores = x @ y.T"]
    scale = f"Divide scores by the temperature of the run, {trained.temperature:.6g}, before a softmax; the files' "
    scale += "metadata and `nuclr.json` hold it as well."
    return card.Usage("onnx", "feature-extraction", "\n".join([*imports, "", *lines]), [scale])


def _lines(trained: Trained, side: str, encoder: Encoder) -> list[str]:
    where = trained.folders[side]
    lines = [f'session = onnxruntime.InferenceSession(f"{{folder}}/{where}/model.onnx")']
    if isinstance(encoder.inputs, ImageFormat):
        size, mean, std = encoder.inputs.size, list(encoder.inputs.mean), list(encoder.inputs.std)
        square = f"image.resize(({size}, {size}), Image.BICUBIC)"
        if not trained.squash:
            square = f"ImageOps.fit(image, ({size}, {size}), Image.BICUBIC)"
        lines += ['images = [Image.new("RGB", (64, 64), color) for color in ("red", "green")]  # or Image.open(path)']
        lines += ['images = [ImageOps.exif_transpose(image).convert("RGB") for image in images]']
        lines += [f"pixels = np.stack([{square} for image in images]).astype(np.float32) / 255"]
        lines += [f"pixels = ((pixels - {mean}) / {std}).astype(np.float32).transpose(0, 3, 1, 2)"]
        lines += [f'({side},) = session.run(None, {{"pixel_values": pixels}})']
    elif isinstance(encoder.inputs, Tokenizer):
        names = list(encoder.inputs.prepare("a"))
        fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        lines += [f'tokenizer = Tokenizer.from_file(f"{{folder}}/{where}/tokenizer.json")']
        lines += ['encoded = tokenizer.encode_batch(["a red circle", "two green squares"])']
        given = ", ".join(f'"{name}": np.array([item.{fields[name]} for item in encoded])' for name in names)
        lines += [f"({side},) = session.run(None, {{{given}}})"]
    else:
        width = len(encoder.tower.mean)  # type: ignore[arg-type]
        lines += [f'({side},) = session.run(None, {{"vectors": np.ones((2, {width}), np.float32)}})']
    return lines
