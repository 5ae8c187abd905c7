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
from nuclr.errors import require
from nuclr.export.trained import Trained, Written
from nuclr.files import write_json
from nuclr.models import Encoder, ImageFormat, Tokenizer
from nuclr.models.encoder import describe_tower
from nuclr.models.towers import BagOfWords, ImageTower, TextTower, VectorTower, token_shares

TOLERANCE = 1e-5
SEED = 0
# The tensors of a text, and where the package tokenizers has them.
FIELDS = {
    "input_ids": "ids",
    "attention_mask": "attention_mask",
    "token_type_ids": "type_ids",
}


def write(trained: Trained, folder: Path) -> Written:
    """Write the encoders of a run as ONNX files.

    Raises:
        UserError: if a side has an encoder of a plugin, or its ONNX file gives other features.

    """
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require(module, purpose="--to onnx")
    lines = []
    for side, encoder in trained.model.sides:
        if not isinstance(encoder.tower, ImageTower | TextTower | BagOfWords | VectorTower):
            raise trained.refuse(f"side {side} has an encoder of a plugin; it cannot be written")
        target = folder / trained.folders[side]
        target.mkdir()
        difference = _write_side(trained, side, encoder, target)
        lines.append(f"{folder.name}/{target.name}/model.onnx: features differ by at most {difference:.1e}")
    scale = (
        f"Divide scores by the temperature of the run, {trained.temperature:.6g}, before a softmax; the files' "
        "metadata and `nuclr.json` hold it as well."
    )
    return Written(
        "onnx",
        "feature-extraction",
        _code(trained, folder.name),
        [scale],
        lines,
    )


class Side(nn.Module):
    """One side as a function of tensors.

    `unit_norm` is not used: it looks at values to rescale rows whose squares overflow, which a fixed graph cannot do.

    Args:
        encoder: the encoder of the side.
        names: the names of its inputs.

    """

    def __init__(self, encoder: Encoder, names: list[str]) -> None:
        super().__init__()
        self.tower = encoder.tower
        self.head = encoder.head
        self.names = names

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return unit-norm features (b, width)."""
        inputs = dict(zip(self.names, tensors, strict=True))
        if isinstance(self.tower, BagOfWords):  # ONNX has no EmbeddingBag with weights
            table = self.tower.embedding.weight
            shares = token_shares(inputs["attention_mask"], table.dtype)
            features = torch.einsum("bld,bl->bd", nn.functional.embedding(inputs["input_ids"], table), shares)
        elif isinstance(self.tower, TextTower):
            features = self.tower(inputs)
        elif isinstance(self.tower, VectorTower):  # without the check of the shape
            features = (tensors[0] - self.tower.mean) / self.tower.std
        else:
            features = self.tower(tensors[0])
        return normalize(self.head(features), dim=1)


def _write_side(
    trained: Trained,
    side: str,
    encoder: Encoder,
    target: Path,
) -> float:
    """Write one side and return the largest difference of a feature from the model's."""
    inputs = example_inputs(encoder, 2)
    module = Side(encoder, list(inputs)).eval()
    metadata = _metadata(trained, encoder)
    with _silence():
        program = torch.onnx.export(
            module,
            tuple(inputs.values()),
            dynamo=True,
            input_names=list(inputs),
            output_names=["features"],
            dynamic_shapes=(tuple(_dynamic_axes(encoder) for _ in inputs),),
            verbose=False,
        )
        assert program is not None  # with dynamo=True
        program.model.metadata_props.update(metadata)
        program.save(str(target / "model.onnx"))
    write_json(target / "nuclr.json", metadata)
    trained.write_inputs(encoder, target)
    if isinstance(encoder.inputs, Tokenizer):
        _complete_tokenizer(encoder.inputs, target)
    difference = _largest_difference(encoder, target / "model.onnx")
    if not difference <= TOLERANCE:
        raise trained.refuse(f"the file of side {side} gives features that differ by {difference:.1e}; not written")
    return difference


def example_inputs(
    encoder: Encoder,
    count: int,
    length: int | None = None,
) -> dict[str, Tensor]:
    """Return random inputs of a side, by name.

    Args:
        encoder: the encoder of the side.
        count: number of items.
        length: number of tokens per text; by default as many as the model takes, at most 8.

    """
    generator = torch.Generator().manual_seed(SEED)
    inputs = encoder.inputs
    if isinstance(inputs, ImageFormat):
        return {
            "pixel_values": torch.randn(
                count,
                3,
                inputs.size,
                inputs.size,
                generator=generator,
            )
        }
    if not isinstance(inputs, Tokenizer):
        return {"vectors": torch.randn(count, inputs.width, generator=generator)}  # type: ignore[union-attr]
    if inputs.padding == "max_length":
        length = inputs.max_length
    length = length or min(8, inputs.max_length)
    tokens = {}
    for name, tensor in inputs.prepare("a").items():
        tokens[name] = tensor[:, :1].repeat(count, length)
    last = inputs.prepare("a")["input_ids"][0, -1]  # the token at which a CLIP pools
    tokens["input_ids"] = torch.randint(len(inputs), (count, length), generator=generator)
    tokens["input_ids"][:, -1] = last
    return tokens


def _dynamic_axes(encoder: Encoder) -> dict[int, Any]:
    axes: dict[int, Any] = {0: torch.export.Dim("batch")}
    if isinstance(encoder.inputs, Tokenizer) and encoder.inputs.padding == "longest":
        axes[1] = torch.export.Dim("length", max=encoder.inputs.max_length)
    return axes


def _metadata(trained: Trained, encoder: Encoder) -> dict[str, str]:
    """Return what a program needs to use a file without nuclr; ONNX metadata are texts."""
    facts: dict[str, Any] = {
        "producer": f"nuclr {nuclr.__version__}",
        "run": trained.run.settings.name,
        "modality": encoder.modality,
        "encoder": describe_tower(encoder.tower),
        "temperature": trained.temperature,
        "width": trained.model.width,
    }
    if isinstance(encoder.inputs, ImageFormat):
        facts |= {
            "image_size": encoder.inputs.size,
            "image_mean": encoder.inputs.mean,
            "image_std": encoder.inputs.std,
            "image_fit": "squash" if trained.squash else "crop",
        }
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
    tokenizer.enable_padding(
        pad_id=inputs.tokenizer.pad_token_id,
        pad_token=str(inputs.tokenizer.pad_token),
        length=inputs.max_length if inputs.padding == "max_length" else None,
        direction=inputs.tokenizer.padding_side,
    )
    tokenizer.save(str(path))


@torch.inference_mode()
def _largest_difference(encoder: Encoder, path: Path) -> float:
    """Compare the features of a file with the model's, at several batch sizes and lengths."""
    session = require("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    differences = []
    for count, length in ((1, 2), (3, 5), (7, None)):
        inputs = example_inputs(encoder, count, length)
        features = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
        expected = encoder.features(inputs if "input_ids" in inputs else next(iter(inputs.values())))
        differences.append(np.abs(features - expected.numpy()).max())
    return float(np.max(differences))


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


def _code(trained: Trained, name: str) -> str:
    """Return lines that load the files and encode two items per side."""
    lines = ["import numpy as np", "import onnxruntime"]
    if "image" in trained.modalities:
        lines.append("from PIL import Image, ImageOps")
    if "text" in trained.modalities:
        lines.append("from tokenizers import Tokenizer")
    lines += ["", f"folder = {json.dumps(name)}"]
    for side, encoder in trained.model.sides:
        where = trained.folders[side]
        lines += ["", f'session = onnxruntime.InferenceSession(f"{{folder}}/{where}/model.onnx")']
        if isinstance(encoder.inputs, ImageFormat):
            lines += _image_lines(encoder.inputs, trained.squash)
            inputs = '{"pixel_values": pixels}'
        elif isinstance(encoder.inputs, Tokenizer):
            lines += [
                f'tokenizer = Tokenizer.from_file(f"{{folder}}/{where}/tokenizer.json")',
                'encoded = tokenizer.encode_batch(["a red circle", "two green squares"])',
            ]
            names = encoder.inputs.prepare("a")
            parts = [f'"{key}": np.array([item.{FIELDS[key]} for item in encoded])' for key in names]
            inputs = f"{{{', '.join(parts)}}}"
        else:
            width = encoder.inputs.width  # type: ignore[union-attr]
            inputs = f'{{"vectors": np.ones((2, {width}), np.float32)}}'
        lines.append(f"({side},) = session.run(None, {inputs})")
    if len(trained.model.sides) == 2:
        lines.append("scores = x @ y.T")
    return "\n".join(lines)


def _image_lines(inputs: ImageFormat, squash: bool) -> list[str]:
    size = (inputs.size, inputs.size)
    square = f"image.resize({size}, Image.BICUBIC)" if squash else f"ImageOps.fit(image, {size}, Image.BICUBIC)"
    return [
        'images = [Image.new("RGB", (64, 64), color) for color in ("red", "green")]  # or Image.open(path)',
        'images = [ImageOps.exif_transpose(image).convert("RGB") for image in images]',
        f"pixels = np.stack([{square} for image in images]).astype(np.float32) / 255",
        f"pixels = (pixels - {list(inputs.mean)}) / {list(inputs.std)}",
        "pixels = pixels.astype(np.float32).transpose(0, 3, 1, 2)",
    ]
