"""save_pretrained and from_pretrained: bit-identical features, nothing pickled, atomic, readable by transformers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nuclr.errors import UserError
from nuclr.models import DualEncoder, EncoderSide, build_model

from .conftest import CAPTIONS, check_features, step


def perturbed(model):
    """Change every parameter and buffer, as training does."""
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.add_(0.01 * torch.rand_like(value))
    return model


def check_round_trip(model, x_items, y_items, folder, **modules):
    perturbed(model).save_pretrained(folder)
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {".json", ".safetensors"}
    again = DualEncoder.from_pretrained(folder, **modules)
    assert not again.training
    assert again.width == model.width
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(model.encode_x(x_items), again.encode_x(x_items))
    assert torch.equal(model.encode_y(y_items), again.encode_y(y_items))
    return again


IMAGE = EncoderSide("tiny_resnet", image_size=32)
TEXT = EncoderSide("tiny_text", texts=CAPTIONS)
BAG = EncoderSide("bag_of_words", texts=CAPTIONS)
VECTORS = EncoderSide("vectors", width=5)
SIDES = {  # without a side y, both share one encoder
    "edges and text": (EncoderSide("tiny_edges", frozen=True), TEXT),
    "text and image": (replace(TEXT, max_length=8), EncoderSide("tiny_vit", head="mlp", image_size=40)),
    "image and image": (IMAGE, EncoderSide("tiny_resnet")),
    "vector and vector": (VECTORS, EncoderSide("vectors", width=7, head="mlp")),
    "vector and text": (VECTORS, BAG),
    "images": (IMAGE, None),
    "vectors": (VECTORS, None),
}


@pytest.mark.parametrize(("x", "y"), SIDES.values(), ids=SIDES)
def test_any_modality_on_either_side(x, y, pictures, tmp_path):
    """A gradient for every parameter that is trained, and the same model after saving."""
    model = build_model(x, y, shared=y is None, width=12)

    def items(encoder):
        texts = {"image": pictures, "text": CAPTIONS * 2}
        return texts.get(encoder.modality) or torch.randn(6, encoder.inputs.width)

    x_items, y_items = items(model.x), items(model.y)
    check_features(*step(model, model.prepare_x(x_items), model.prepare_y(y_items)), width=12)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    again = check_round_trip(model, x_items, y_items, tmp_path)
    assert again.shared == model.shared == (y is None)
    for one, two in ((model.x, again.x), (model.y, again.y)):
        assert (one.frozen, one.modality) == (two.frozen, two.modality)
        assert repr(one.inputs) == repr(two.inputs)
    check_round_trip(again, x_items, y_items, tmp_path)  # replaces the saved model


def test_folders(image_folder, text_folder, pictures, tmp_path):
    model = build_model(image_folder, EncoderSide(text_folder, max_length=6))
    again = check_round_trip(model, pictures, CAPTIONS, tmp_path / "model")
    assert again.y.inputs.max_length == 6
    # Each tower can be loaded alone, with its image format and its tokenizer.
    third = build_model(tmp_path / "model" / "x", EncoderSide(tmp_path / "model" / "y", max_length=6))
    assert third.x.inputs == model.x.inputs
    x, y = third.prepare_x(pictures), third.prepare_y(CAPTIONS)
    assert torch.equal(third.eval().x.tower(x), model.eval().x.tower(x))
    assert torch.equal(third.y.tower(y), model.y.tower(y))


def test_clip_and_siglip(joint, pictures, tmp_path):
    folder, original = joint
    model = build_model(y=EncoderSide(frozen=True), pretrained=folder)
    again = check_round_trip(model, pictures, CAPTIONS, tmp_path / "model")
    assert again.x.inputs == model.x.inputs
    assert again.y.frozen
    assert again.joint.logits == model.joint.logits
    # transformers can load it as the original class.
    theirs = type(original).from_pretrained(tmp_path / "model" / "joint").eval()
    x = model.prepare_x(pictures)
    features = theirs.get_image_features(x).pooler_output
    torch.testing.assert_close(model.encode_images(pictures), nn.functional.normalize(features))
    assert torch.equal(theirs.logit_scale, original.logit_scale)
    # build_model can load it, to train it further.
    assert build_model(pretrained=tmp_path / "model").width == model.width
    assert build_model(pretrained=tmp_path / "model" / "joint").x.inputs == model.x.inputs


def test_no_heads(text_folder, pictures, tmp_path):
    model = build_model("tiny_resnet", EncoderSide(text_folder, head="none"), width=24)
    check_round_trip(model, pictures, CAPTIONS, tmp_path / "model")


@pytest.mark.parametrize("encoder", ["tiny_text", "bag_of_words"])
@pytest.mark.parametrize("shared", [False, True])
def test_text_and_text(encoder, shared, tmp_path):
    other = CAPTIONS[::-1]
    x = EncoderSide(encoder, texts=CAPTIONS, pooling="mean", head="mlp")
    model = build_model(x, EncoderSide(encoder, texts=other), shared=shared)
    again = check_round_trip(model, CAPTIONS, other, tmp_path)
    assert again.shared == shared
    assert repr(again) == repr(model)
    assert (tmp_path / "x").is_dir()
    assert (tmp_path / "y").is_dir() != shared
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 4 * parameters < size < 4.2 * parameters + 2**15  # weights are written once
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["shared"], config["x"]["modality"]) == (shared, "text")
    check_round_trip(again, CAPTIONS, other, tmp_path)


def test_own_modules_are_loaded_into(tmp_path):
    def modules():
        return {"x": nn.Linear(5, 4), "y": nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4))}

    model = DualEncoder(**modules())
    check_round_trip(model, torch.randn(9, 5), torch.randn(9, 7), tmp_path, **modules())
    shared = nn.Linear(5, 4)
    check_round_trip(
        DualEncoder(shared, shared), torch.randn(9, 5), torch.randn(9, 5), tmp_path / "s", x=nn.Linear(5, 4)
    )
    with pytest.raises(UserError, match="side x"):
        DualEncoder.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="does not fit"):
        DualEncoder.from_pretrained(tmp_path, x=nn.Linear(6, 4), y=modules()["y"])


def test_failed_save_keeps_the_model_that_was_there(tmp_path, monkeypatch):
    first, second = (build_model(EncoderSide("vectors", width=5), shared=True) for _ in range(2))
    first.save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*")}

    def disk_full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nuclr.models.saving.save_file", disk_full)
    with pytest.raises(UserError, match="No space left"):
        second.save_pretrained(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_interrupted_save_is_not_loaded(tmp_path, monkeypatch):
    """Files of two models must never be mixed: until all are moved, config.json does not say what they are."""
    first, second = (build_model(EncoderSide("vectors", width=5), shared=True) for _ in range(2))
    first.save_pretrained(tmp_path)

    replace = Path.replace

    def killed(path, target):
        if path.name == "dual_encoder.safetensors":
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        second.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not a whole dual encoder"):
        DualEncoder.from_pretrained(tmp_path)
    monkeypatch.undo()
    second.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "dual_encoder.safetensors"]


def test_other_files_in_the_folder_are_kept(tmp_path):
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "notes.txt").write_text("mine")
    build_model(y=EncoderSide(texts=CAPTIONS)).save_pretrained(tmp_path)
    assert (tmp_path / "y" / "notes.txt").read_text() == "mine"


def test_refusals(tmp_path, joint):
    for other in (tmp_path / "nowhere", tmp_path, joint[0]):
        with pytest.raises(UserError, match=str(other)):
            DualEncoder.from_pretrained(other)
    folder = tmp_path / "model"
    build_model(y=EncoderSide(texts=CAPTIONS)).save_pretrained(folder)

    weights = load_file(folder / "dual_encoder.safetensors")
    save_file({"x.head.0.weight": weights["x.head.0.weight"]}, folder / "dual_encoder.safetensors")
    with pytest.raises(UserError, match=r"dual_encoder\.safetensors"):
        DualEncoder.from_pretrained(folder)
    (folder / "dual_encoder.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match="SafetensorError"):
        DualEncoder.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["y"]["inputs"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="inputs"):
        DualEncoder.from_pretrained(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        build_model(y=EncoderSide(texts=CAPTIONS)).save_pretrained(tmp_path / "file")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["x"], None),
        (["x", "head"], 7),
        (["x", "head"], {"kind": "linear", "in_width": 2**19, "width": 2**19}),
        (["x", "head", "kind"], "cubic"),
        (["x", "head", "in_width"], -5),
        (["x", "head", "width"], 2.5),
        (["x", "head", "width"], 10**400),
        (["y", "head", "in_width"], 10**9),
        (["x", "tower"], {}),
        (["x", "tower"], {"kind": "conv"}),
        (["x", "tower"], {"kind": "vectors", "width": 10**9}),
        (["x", "tower"], {"kind": "bag_of_words", "vocabulary": 10**6, "width": 10**5}),
        (["x", "tower"], {"kind": "text", "pooling": "last"}),
        (["x", "tower"], {"kind": "registered", "name": "unheard_of", "options": {}}),
        (["x", "inputs"], [1]),
        (["x", "inputs"], {"kind": "image", "size": "big", "mean": [0, 0, 0], "std": [1, 1, 1]}),
        (["x", "inputs"], {"kind": "text", "max_length": "long", "padding": "longest"}),
        (["x", "inputs"], {"kind": "text", "max_length": 8, "padding": "left"}),
        (["shared"], True),
        (["joint"], True),
    ],
)
def test_a_damaged_config_is_refused(tmp_path, path, value):
    build_model(EncoderSide("vectors", width=5), EncoderSide("vectors", width=7), width=4).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    part = config
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as caught:
        DualEncoder.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value) and str(caught.value).count("\n") <= 1


DAMAGED = [json.dumps({"size": size}) for size in ("big", -3, 0.5, 10**9, True, {"height": "x"}, [["x"]])]
DAMAGED += [json.dumps({"image_mean": mean}) for mean in (3, [1], ["a", "b", "c"], {"r": 1}, [1, 2, None])]
DAMAGED += ['{"image_std": [1, 2, NaN]}', '{"image_processor": 3}', "[" * 100_000, "3", '{"a": ' + "9" * 5_000 + "}"]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_image_processor_is_refused(image_folder, content):
    (image_folder / "preprocessor_config.json").write_text(content)
    with pytest.raises(UserError, match=str(image_folder)):
        build_model(image_folder, EncoderSide(texts=CAPTIONS))
