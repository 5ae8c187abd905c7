"""Exports to transformers are read back by transformers itself and give the features of the run."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from nuclr.models import DualEncoder
from tests.export.runs import card_code, images, largest_difference, oblong_images, texts

CLASSES = {
    "clip": "CLIPModel",
    "clip_at_another_size": "CLIPModel",
    "siglip": "SiglipModel",
    "towers_of_clip": "VisionTextDualEncoderModel",
}


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    from nuclr.export import export

    folder = tmp_path_factory.mktemp("hf")

    def write(name):
        if not (folder / name).exists():
            export(runs(name), "hf", folder / name)
        return folder / name

    return write


def encode(folder, name, pictures, captions):
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer

    model, report = getattr(transformers, CLASSES[name]).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    processor, tokenizer = AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    fixed = {"padding": "max_length", "return_attention_mask": False}
    tokens = tokenizer(
        captions, truncation=True, return_tensors="pt", **(fixed if name == "siglip" else {"padding": True})
    )
    with torch.inference_mode():
        x = model.eval().get_image_features(**processor(pictures, return_tensors="pt")).pooler_output
        y = model.get_text_features(**tokens).pooler_output
    return normalize(x), normalize(y)


@pytest.mark.parametrize("name", CLASSES)
def test_features_equal_those_of_the_run(runs, exported, name):
    model = runs.model(name)
    size = model.x.inputs.size
    x, y = encode(exported(name), name, images(size), texts())
    assert largest_difference(x, model.encode_images(images(size))) < 1e-6
    assert largest_difference(y, model.encode_texts(texts())) < 1e-6


def test_pictures_are_resized_as_in_the_run(runs, exported):
    model = runs.model("clip")
    x, _ = encode(exported("clip"), "clip", images(80), texts())
    assert largest_difference(x, model.encode_images(images(80))) < 1e-6


def test_pictures_that_are_not_square_need_the_line_of_the_card(runs, exported):
    from PIL import Image, ImageOps

    model, folder = runs.model("clip"), exported("clip")
    line = next(part for part in (folder / "README.md").read_text().split("`") if part.startswith("ImageOps.fit"))
    squares = [eval(line, {"ImageOps": ImageOps, "Image": Image, "image": image}) for image in oblong_images()]
    x, _ = encode(folder, "clip", squares, texts())
    assert largest_difference(x, model.encode_images(oblong_images())) < 1e-6


@pytest.mark.parametrize("name", CLASSES)
def test_the_lines_of_the_card_run(exported, monkeypatch, name):
    folder = exported(name)
    monkeypatch.chdir(folder.parent)
    variables = {}
    exec(card_code(folder), variables)
    assert variables["scores"].shape == (2, 2)
    torch.testing.assert_close(variables["x"].norm(dim=1), torch.ones(2))


@pytest.mark.parametrize("name", ["clip", "clip_at_another_size", "towers_of_clip"])
def test_the_temperature_is_in_logit_scale(runs, exported, name):
    import transformers

    from nuclr.runs.run import Run

    model = getattr(transformers, CLASSES[name]).from_pretrained(exported(name))
    temperature = Run.open(runs(name)).temperature
    assert math.exp(-model.logit_scale.item()) == pytest.approx(temperature, rel=1e-6)


def test_scale_and_bias_of_siglip_are_the_learnt_ones(runs, exported):
    from transformers import SiglipModel

    from nuclr.runs.run import Run

    model, objective = SiglipModel.from_pretrained(exported("siglip")), Run.open(runs("siglip")).objective
    assert model.logit_scale.item() == pytest.approx(objective.log_scale.item(), rel=1e-6)
    assert model.logit_bias.item() == objective.bias.item() != -10
    processor = pytest.importorskip("transformers").AutoProcessor.from_pretrained(exported("siglip"))
    assert processor.tokenizer.model_max_length == 16


def test_the_processor_is_found(exported):
    from transformers import AutoProcessor

    for name, expected in (("clip", "CLIPProcessor"), ("towers_of_clip", "VisionTextDualEncoderProcessor")):
        processor = AutoProcessor.from_pretrained(exported(name))
        assert type(processor).__name__ == expected
        assert set(
            processor(images=images()[:2], text=texts()[:2], padding=True, truncation=True, return_tensors="pt")
        ) >= {
            "input_ids",
            "pixel_values",
        }


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("separate", "its image encoder is not part of transformers; use --to onnx or --to sentence-transformers"),
        ("other_encoders", "VisionTextDualEncoderModel does not pool texts as its text encoder does"),
        ("vectors", "it takes vectors and vectors, not images and texts; use --to onnx"),
        ("shared_texts", "it takes texts, not images and texts"),
    ],
)
def test_other_models_are_refused(nuclr, runs, tmp_path, name, reason):
    status, _, err = nuclr("export", runs(name), "--to", "hf", "--out", tmp_path / "out")
    assert status == 2 and reason in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


# The folder RUN/model


@pytest.mark.parametrize("name", ["separate", "clip"])
def test_the_model_of_a_run_is_not_mistaken_for_a_model_of_transformers(runs, name):
    from transformers import AutoModel, CLIPModel

    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        CLIPModel.from_pretrained(runs(name) / "model")
    with pytest.raises(ValueError, match="nuclr_dual_encoder"):
        AutoModel.from_pretrained(runs(name) / "model")


def test_the_parts_of_a_run_s_model_are_models_of_transformers(runs):
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    model, folder = runs.model("other_encoders"), runs("other_encoders") / "model"
    processor = AutoImageProcessor.from_pretrained(folder / "x")
    for pictures in (images(), images(80)):
        pixels = processor(pictures, return_tensors="pt")["pixel_values"]
        assert largest_difference(pixels, model.prepare_images(pictures)) < 1e-6
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(folder / "x")(pixels).last_hidden_state.mean(1)
    assert largest_difference(normalize(hidden), model.encode_x(images(80), head=False)) < 1e-6
    separate = runs.model("separate")
    tokens = AutoTokenizer.from_pretrained(runs("separate") / "model" / "y")(
        texts(), padding=True, truncation=True, return_tensors="pt"
    )
    assert torch.equal(tokens["input_ids"], separate.prepare_texts(texts())["input_ids"])
    hidden = AutoModel.from_pretrained(runs("separate") / "model" / "y")(**tokens).last_hidden_state[:, 0]
    assert largest_difference(normalize(hidden).detach(), separate.encode_y(texts(), head=False)) < 1e-6


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_the_joint_part_of_a_run_s_model_has_its_temperature(runs, name):
    import transformers

    model = getattr(transformers, CLASSES[name]).from_pretrained(runs(name) / "model" / "joint")
    saved = DualEncoder.from_pretrained(runs(name) / "model")
    from nuclr.runs.run import Run

    assert saved.joint.temperature == pytest.approx(Run.open(runs(name)).temperature, rel=1e-6)
    assert math.exp(-model.logit_scale.item()) == pytest.approx(saved.joint.temperature)
