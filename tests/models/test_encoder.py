"""Encoders: frozen towers, heads, unit norm in at least float32."""

import copy

import torch

from nuclr.models import EncoderSide, build_model
from nuclr.models.encoder import unit_norm

from .conftest import CAPTIONS, batch, check_features, step


def test_frozen_towers_do_not_change(image_folder, text_folder, pictures):
    model = build_model(EncoderSide(image_folder, frozen=True), EncoderSide(text_folder, frozen=True))
    before = copy.deepcopy(model.state_dict())
    model.train()
    x, y = batch(model, pictures)
    for side in (model.x, model.y):
        assert side.training
        assert not any(module.training for module in side.tower.modules())
        assert not any(parameter.requires_grad for parameter in side.tower.parameters())
    assert all(parameter.requires_grad for side in (model.x, model.y) for parameter in side.head.parameters())
    step(model, x, y)
    for key, value in model.state_dict().items():  # this includes the running statistics of batch norm
        assert torch.equal(value, before[key]) == (".tower." in key), key
    with torch.no_grad():
        assert all(not features.requires_grad for features in model(x, y))


def test_autocast_features_are_unit_norm_in_float32(pictures):
    model = build_model(y=EncoderSide(texts=CAPTIONS))
    with torch.autocast("cpu", torch.bfloat16):
        fx, fy = model(*batch(model, pictures))
    check_features(fx, fy, width=256)


def test_features_that_overflow_when_squared_are_normalized():
    features = torch.randn(5, 8)
    torch.testing.assert_close(unit_norm(features * 1e25), unit_norm(features))
    assert torch.equal(unit_norm(features), torch.nn.functional.normalize(features, dim=1))
    half = (features * 2e4).half()
    torch.testing.assert_close(unit_norm(half), unit_norm(features), rtol=2e-3, atol=1e-4)
