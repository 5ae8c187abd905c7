"""Exports to transformers are read back by transformers itself and give the features of the run."""

import math

import pytest
import torch
import transformers
from PIL import Image, ImageOps
from torch.nn.functional import normalize

from nuclr.models import DualEncoder
from nuclr.runs.run import Run
from tests.export.runs import images, largest_difference, oblong_images, run_card, texts

CLASSES = {"clip": "CLIPModel", "clip_at_another_size": "CLIPModel", "siglip": "SiglipModel"}


@pytest.fixture
def exported(runs):
    return lambda name: runs.export(name, "hf")


def encode(folder, name, pictures, captions):
    model, report = getattr(transformers, CLASSES[name]).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    padding = {"padding": "max_length", "return_attention_mask": False} if name == "siglip" else {"padding": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(captions, truncation=True, return_tensors="pt", **padding)
    with torch.inference_mode():
        x = model.eval().get_image_features(**processor(pictures, return_tensors="pt")).pooler_output
        y = model.get_text_features(**tokens).pooler_output
    return normalize(x), normalize(y)


@pytest.mark.parametrize("name", CLASSES)
def test_features_and_temperature_equal_those_of_the_run(runs, exported, name):
    model = runs.model(name)
    for size in {model.x.inputs.size, 80} if name == "clip" else {model.x.inputs.size}:
        x, y = encode(exported(name), name, images(size), texts())
        assert largest_difference(x, model.encode_images(images(size))) < 1e-6
        assert largest_difference(y, model.encode_texts(texts())) < 1e-6
    loaded = getattr(transformers, CLASSES[name]).from_pretrained(exported(name))
    assert math.exp(-loaded.logit_scale.item()) == pytest.approx(Run.open(runs(name)).temperature, rel=1e-6)


def test_pictures_that_are_not_square_need_the_line_of_the_card(runs, exported):
    model, folder = runs.model("clip"), exported("clip")
    line = next(part for part in (folder / "README.md").read_text().split("`") if part.startswith("ImageOps.fit"))
    squares = [eval(line, {"ImageOps": ImageOps, "Image": Image, "image": image}) for image in oblong_images()]
    x, _ = encode(folder, "clip", squares, texts())
    assert largest_difference(x, model.encode_images(oblong_images())) < 1e-6


@pytest.mark.parametrize("name", CLASSES)
def test_the_lines_of_the_card_run(exported, name):
    variables = run_card(exported(name))
    assert variables["scores"].shape == (2, 2)
    torch.testing.assert_close(variables["x"].norm(dim=1), torch.ones(2))


def test_scale_and_bias_of_siglip_are_the_learnt_ones(runs, exported):
    model = transformers.SiglipModel.from_pretrained(exported("siglip"))
    state = Run.open(runs("siglip")).objective_state
    assert model.logit_scale.item() == pytest.approx(state["log_scale"].item(), rel=1e-6)
    assert model.logit_bias.item() == state["bias"].item() != -10
    processor = transformers.AutoProcessor.from_pretrained(exported("siglip"))
    assert processor.tokenizer.model_max_length == 16


def test_the_processor_is_found(exported):
    processor = transformers.AutoProcessor.from_pretrained(exported("clip"))
    assert type(processor).__name__ == "CLIPProcessor"
    inputs = processor(images=images()[:2], text=texts()[:2], padding=True, truncation=True, return_tensors="pt")
    assert {"input_ids", "pixel_values"} <= set(inputs)


# The folder RUN/model


@pytest.mark.parametrize("name", ["separate", "clip"])
def test_the_model_of_a_run_is_not_mistaken_for_a_model_of_transformers(runs, name):
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.CLIPModel.from_pretrained(runs(name) / "model")
    with pytest.raises(ValueError, match="nuclr_dual_encoder"):
        transformers.AutoModel.from_pretrained(runs(name) / "model")


def test_the_parts_of_a_run_s_model_are_models_of_transformers(runs):
    model, folder = runs.model("other_encoders"), runs("other_encoders") / "model"
    processor = transformers.AutoImageProcessor.from_pretrained(folder / "x")
    for pictures in (images(), images(80)):
        pixels = processor(pictures, return_tensors="pt")["pixel_values"]
        assert largest_difference(pixels, model.prepare_x(pictures)) < 1e-6
    with torch.inference_mode():
        hidden = transformers.AutoModel.from_pretrained(folder / "x")(pixels).last_hidden_state.mean(1)
    assert largest_difference(normalize(hidden), model.encode_x(images(80), head=False)) < 1e-6
    separate = runs.model("separate")
    tokens = transformers.AutoTokenizer.from_pretrained(runs("separate") / "model" / "y")(
        texts(), padding=True, truncation=True, return_tensors="pt"
    )
    assert torch.equal(tokens["input_ids"], separate.prepare_y(texts())["input_ids"])
    hidden = transformers.AutoModel.from_pretrained(runs("separate") / "model" / "y")(**tokens).last_hidden_state[:, 0]
    assert largest_difference(normalize(hidden).detach(), separate.encode_y(texts(), head=False)) < 1e-6


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_the_joint_part_of_a_run_s_model_has_its_temperature(runs, name):
    model = getattr(transformers, CLASSES[name]).from_pretrained(runs(name) / "model" / "joint")
    saved = DualEncoder.from_pretrained(runs(name) / "model")
    assert math.exp(-model.logit_scale.item()) == pytest.approx(Run.open(runs(name)).temperature, rel=1e-6)
    assert torch.equal(saved.joint.logits["logit_scale"], model.logit_scale)
