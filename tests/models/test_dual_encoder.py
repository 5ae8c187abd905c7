"""Using a dual encoder: encode_images, encode_texts, standardized vectors."""

import numpy as np
import pytest
import torch
from PIL import Image

from nuclr.errors import UserError
from nuclr.models import build_model

from .conftest import CAPTIONS


@pytest.fixture
def model():
    return build_model(texts=CAPTIONS)


def test_encoding_leaves_the_model_as_it_was(model, pictures):
    features = model.encode_images(pictures)
    assert not features.requires_grad
    (features * torch.ones(1, requires_grad=True)).sum().backward()  # an ordinary tensor, to go on computing with
    assert model.training
    assert model.x.training
    model.eval()
    model.encode_texts(CAPTIONS)
    assert not model.y.training


def test_encoding_uses_eval_mode(image_folder, pictures):
    model = build_model(image_folder, texts=CAPTIONS)  # with batch norm
    torch.testing.assert_close(model.encode_images(pictures), model.encode_images(pictures[:2] + pictures[2:]))
    torch.testing.assert_close(model.encode_images(pictures)[:1], model.encode_images(pictures[:1]))


def test_batches_do_not_matter(model, pictures):
    torch.testing.assert_close(model.encode_images(pictures, batch_size=4), model.encode_images(pictures))
    torch.testing.assert_close(model.encode_texts(CAPTIONS, batch_size=1), model.encode_texts(CAPTIONS))


def test_pictures_and_tensors_agree(model):
    raw = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    tensor = torch.from_numpy(raw).permute(0, 3, 1, 2)
    assert torch.equal(model.encode_images(tensor), model.encode_images([Image.fromarray(image) for image in raw]))
    # Training and evaluation see the same pixels.
    x = model.images.normalize(tensor / 255)
    torch.testing.assert_close(model.eval().x(x).detach(), model.encode_images(tensor))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers(model, pictures, dtype):
    expected = model.encode_images(pictures)
    features = model.to(dtype).encode_images(pictures)
    assert features.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(features.float(), expected, atol=1e-6 if dtype == torch.float64 else 0.03, rtol=0)


def test_nothing_to_encode(model):
    with pytest.raises(UserError, match="empty"):
        model.encode_texts([])


class TestVectors:
    def test_fitted_inputs_have_zero_mean_and_unit_variance(self):
        model = build_model("vectors", "vectors", x_width=5, y_width=7)
        scales = torch.tensor([1e-3, 1.0, 7.0, 0.0, 2.0])
        x = torch.randn(1000, 5) * scales + torch.tensor([1.0, 0, -3, 2, 1e4])
        before = x.clone()
        model.fit_vectors(x=x)
        seen = model.x.tower(x)
        torch.testing.assert_close(seen.mean(0), torch.zeros(5), atol=1e-3, rtol=0)
        torch.testing.assert_close(seen.square().mean(), torch.tensor(1.0), atol=1e-3, rtol=0)
        ratios = seen.std(0) / seen.std(0)[1]  # the coordinates keep their proportions
        torch.testing.assert_close(ratios, x.std(0) / x.std(0)[1], atol=1e-3, rtol=1e-3)
        assert torch.equal(x, before)
        assert model.y.tower.std == 1

    def test_batches_or_whole(self):
        model = build_model("vectors", "vectors", x_width=5, y_width=5)
        x = torch.randn(1000, 5) + 3
        model.fit_vectors(x, (part for part in x.split(77)))
        torch.testing.assert_close(model.x.tower.mean, model.y.tower.mean)
        torch.testing.assert_close(model.x.tower.std, model.y.tower.std)
        torch.testing.assert_close(model.x.tower.std, x.var(0, correction=0).mean().sqrt())

    def test_only_vectors_are_fitted(self, model):
        with pytest.raises(UserError, match="takes no vectors"):
            model.fit_vectors(x=torch.randn(4, 5))
        vectors = build_model("vectors", texts=CAPTIONS, x_width=5)
        with pytest.raises(UserError, match="two vectors"):
            vectors.fit_vectors(x=torch.randn(1, 5))
        with pytest.raises(UserError, match="all are the same"):
            vectors.fit_vectors(x=torch.ones(4, 5))
        with pytest.raises(UserError, match=r"\(4, 6\)"):
            vectors.fit_vectors(x=torch.randn(4, 6))
