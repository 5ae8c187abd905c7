"""CLIP and SigLIP as dual encoders: their own features, trained further, or one of their towers."""

import torch
from torch.nn.functional import normalize

from nuclr.models import EncoderSide, build_model

from .conftest import batch, step


def test_features_equal_those_of_transformers(joint, pictures):
    folder, original = joint
    model = build_model(pretrained=folder).eval()
    assert (model.x.inputs.size, model.x.inputs.mean, model.x.inputs.std) == (32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert model.y.inputs.max_length == 16
    assert model.y.inputs.padding == ("max_length" if folder.name == "siglip" else "longest")
    assert model.width == (32 if folder.name == "siglip" else 24)
    assert torch.equal(model.joint.logits["logit_scale"], original.logit_scale)
    x, y = batch(model, pictures)
    fx, fy = model(x, y)
    torch.testing.assert_close(fx, normalize(original.get_image_features(x).pooler_output))
    torch.testing.assert_close(fy, normalize(original.get_text_features(**y).pooler_output))


def test_training_with_a_frozen_side(joint, pictures):
    folder, _ = joint
    model = build_model(y=EncoderSide(frozen=True), pretrained=folder)
    step(model, *batch(model, pictures))
    assert all(parameter.grad is not None for parameter in model.x.parameters())
    assert all(parameter.grad is None for parameter in model.y.tower.parameters())


def test_other_image_size_and_text_length(joint, pictures):
    model = build_model(EncoderSide(image_size=48), EncoderSide(max_length=12), pretrained=joint[0])
    assert (model.x.inputs.size, model.y.inputs.max_length) == (48, 12)
    step(model, *batch(model, pictures))
