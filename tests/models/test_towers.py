"""Towers: pooling, independence of the samples of a batch, standardized vectors."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from nuclr.errors import UserError
from nuclr.models import EncoderSide, build_model
from nuclr.models.towers import VectorTower

from .conftest import CAPTIONS, batch, check_features


@pytest.mark.parametrize("encoder", ["tiny_edges", "tiny_resnet", "tiny_vit"])
def test_samples_of_a_batch_are_independent(encoder, pictures):
    """Two processes with half a batch each compute the same features, in train mode."""
    model = build_model(encoder, EncoderSide("tiny_text", texts=CAPTIONS))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    x, y = batch(model, pictures)
    whole = model(x, y)
    halves = [model(x[part], {k: v[part] for k, v in y.items()}) for part in (slice(0, 3), slice(3, 6))]
    for features, (first, second) in zip(whole, zip(*halves, strict=True), strict=True):
        torch.testing.assert_close(features, torch.cat([first, second]), atol=1e-6, rtol=0)


def test_texts_are_pooled_at_the_first_token(text_folder):
    model = build_model(y=EncoderSide(text_folder, head="none"), width=24).eval()
    y = model.prepare_y(CAPTIONS)
    assert (y["input_ids"][:, 0] == model.y.inputs.tokenizer.cls_token_id).all()
    hidden = model.y.tower.backbone(**y).last_hidden_state
    assert torch.equal(model.y(y), normalize(hidden[:, 0]))


def test_images_are_pooled_globally(image_folder, pictures):
    model = build_model(EncoderSide(image_folder, head="none"), EncoderSide(texts=CAPTIONS), width=16).eval()
    x = model.prepare_x(pictures)
    hidden = model.x.tower.backbone(pixel_values=x.contiguous(memory_format=torch.channels_last)).last_hidden_state
    torch.testing.assert_close(model.x(x), normalize(hidden.mean((2, 3))))


def test_vit_at_another_size(tmp_path, pictures):
    small = build_model("tiny_vit", EncoderSide(texts=CAPTIONS))
    small.x.tower.backbone.save_pretrained(tmp_path / "vit")
    model = build_model(EncoderSide(tmp_path / "vit", image_size=48), EncoderSide(texts=CAPTIONS))
    check_features(*model(*batch(model, pictures)), width=256)


class TestVectors:
    def test_fitted_vectors_have_zero_mean_and_unit_variance(self):
        tower = VectorTower(5)
        scales = torch.tensor([1e-3, 1.0, 7.0, 0.0, 2.0])
        x = torch.randn(1000, 5) * scales + torch.tensor([1.0, 0, -3, 2, 1e4])
        before = x.clone()
        tower.fit(x)
        standardized = tower(x)
        torch.testing.assert_close(standardized.mean(0), torch.zeros(5), atol=1e-3, rtol=0)
        torch.testing.assert_close(standardized.square().mean(), torch.tensor(1.0), atol=1e-3, rtol=0)
        ratios = standardized.std(0) / standardized.std(0)[1]  # relative scales are kept
        torch.testing.assert_close(ratios, x.std(0) / x.std(0)[1], atol=1e-3, rtol=1e-3)
        assert torch.equal(x, before)

    def test_batches_and_arrays_give_the_same(self):
        whole, batches, arrays = VectorTower(5), VectorTower(5), VectorTower(5)
        x = torch.randn(1000, 5) + 3
        whole.fit(x)
        batches.fit(part for part in x.split(77))
        arrays.fit(x.numpy())
        torch.testing.assert_close(whole.mean, batches.mean)
        torch.testing.assert_close(whole.std, batches.std)
        torch.testing.assert_close(whole.std, x.var(0, correction=0).mean().sqrt())
        assert torch.equal(whole.mean, arrays.mean)
        assert torch.equal(whole.std, arrays.std)

    def test_refusals(self):
        tower = VectorTower(5)
        for vectors in (torch.randn(1, 5), torch.randn(0, 5), []):
            with pytest.raises(UserError, match="vectors"):
                tower.fit(vectors)
        with pytest.raises(UserError, match="vectors"):
            tower.fit(np.ones((4, 5)))
        with pytest.raises(UserError, match=r"\(4, 6\).*\(n, 5\)"):
            tower.fit(torch.randn(4, 6))
        with pytest.raises(UserError, match=r"\(4, 6\).*\(n, 5\)"):
            tower(torch.randn(4, 6))
