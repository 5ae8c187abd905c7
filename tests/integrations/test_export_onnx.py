"""ONNX files are read by ONNX Runtime, at any batch size, and give the features of the run."""

import json

import numpy as np
import pytest

from tests.export.runs import images, largest_difference, run_card, texts

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

BATCHES = (1, 7, 92)


@pytest.fixture
def exported(runs):
    return lambda name: runs.export(name, "onnx")


def run(path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Encode in batches of different sizes."""
    session = onnxruntime.InferenceSession(str(path / "model.onnx"), providers=["CPUExecutionProvider"])
    parts, begin = [], 0
    for size in BATCHES:
        part = {name: array[begin : begin + size] for name, array in inputs.items()}
        parts += session.run(["features"], part)
        begin += size
    assert begin == 100
    return np.concatenate(parts)


def tokens(path) -> dict[str, np.ndarray]:
    """Tokenize with the package tokenizers alone: truncation and padding are part of tokenizer.json."""
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_file(str(path / "tokenizer.json")).encode_batch(texts())
    return {
        "input_ids": np.array([item.ids for item in encoded]),
        "attention_mask": np.array([item.attention_mask for item in encoded]),
    }


@pytest.mark.parametrize("name", ["separate", "other_encoders", "siglip"])
def test_features_equal_those_of_the_run(runs, exported, name):
    from transformers import AutoImageProcessor

    model, folder = runs.model(name), exported(name)
    given = tokens(folder / "text")
    given = {"input_ids": given["input_ids"]} if name == "siglip" else given
    assert largest_difference(run(folder / "text", given), model.encode_texts(texts())) < 1e-5
    processor = AutoImageProcessor.from_pretrained(folder / "image")
    pixels = processor(images(80), return_tensors="np")["pixel_values"].astype(np.float32)
    assert largest_difference(run(folder / "image", {"pixel_values": pixels}), model.encode_images(images(80))) < 1e-5

    variables = run_card(folder)
    assert largest_difference(variables["x"], model.encode_images(variables["images"])) < 1e-5
    assert largest_difference(variables["y"], model.encode_texts(["a red circle", "two green squares"])) < 1e-5


def test_two_sides_of_one_modality_are_x_and_y(runs, exported):
    model, folder = runs.model("vectors"), exported("vectors")
    random = np.random.default_rng(0)
    for side, width, encode in (("x", 12, model.encode_x), ("y", 8, model.encode_y)):
        vectors = random.normal(size=(100, width)).astype(np.float32)
        assert largest_difference(run(folder / side, {"vectors": vectors}), encode(vectors)) < 1e-5
    assert run_card(folder)["scores"].shape == (2, 2)


def test_metadata(runs, exported):
    folder = exported("other_encoders")
    model = onnx.load(folder / "image" / "model.onnx")
    onnx.checker.check_model(model)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert metadata["modality"] == "image" and metadata["width"] == "8" and float(metadata["temperature"]) == 0.03
    assert json.loads(metadata["image_mean"]) == [0.485, 0.456, 0.406] and metadata["image_fit"] == "crop"
    assert json.loads((folder / "image" / "nuclr.json").read_text()).items() <= metadata.items()
    axes = {
        entry.name: [axis.dim_param or axis.dim_value for axis in entry.type.tensor_type.shape.dim]
        for entry in model.graph.input
    }
    assert isinstance(axes["pixel_values"][0], str) and axes["pixel_values"][1:] == [3, 32, 32]


def test_encoders_of_plugins_are_refused(nuclr, runs, tmp_path, monkeypatch):
    from nuclr.export import onnx as target

    monkeypatch.setattr(target, "VectorTower", type("Other", (), {}))
    status, _, err = nuclr("export", runs("vectors"), "--to", "onnx", "--out", tmp_path / "out")
    assert status == 2 and "side x" in err
