"""Using a dual encoder: encode_images and encode_texts with every kind of input, repr."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import normalize

from nuclr.errors import UserError
from nuclr.models import DualEncoder, EncoderSide, build_model

from .conftest import CAPTIONS, check_features


@pytest.fixture
def model():
    return build_model(y=EncoderSide(texts=CAPTIONS))


@pytest.fixture
def vector_model():
    return build_model(EncoderSide("vectors", width=5), EncoderSide("vectors", width=7), width=12)


def test_any_two_modules():
    x, y = nn.Linear(5, 12), nn.Sequential(nn.Linear(7, 12), nn.ReLU())
    inputs = torch.randn(6, 5), torch.randn(6, 7)
    model = DualEncoder(x, y)
    check_features(*model(*inputs), width=12)
    assert torch.equal(model(*inputs)[0], normalize(x(inputs[0])))
    heads = build_model(EncoderSide(x, width=12), EncoderSide(y, width=12), width=4)
    check_features(*heads(*inputs), width=4)


def test_encoding_does_not_change_the_model(model, pictures):
    features = model.encode_images(pictures)
    assert not features.requires_grad
    (features * torch.ones(1, requires_grad=True)).sum().backward()  # autograd can use the features
    assert model.training
    assert model.x.training
    model.eval()
    model.encode_texts(CAPTIONS)
    assert not model.y.training


def test_encoding_uses_eval_mode(image_folder, pictures):
    model = build_model(image_folder, EncoderSide(texts=CAPTIONS))  # with batch norm
    torch.testing.assert_close(model.encode_images(pictures)[:1], model.encode_images(pictures[:1]))


def test_batch_size_does_not_matter(model, pictures):
    torch.testing.assert_close(model.encode_images(pictures, batch_size=4), model.encode_images(pictures))
    torch.testing.assert_close(model.encode_texts(CAPTIONS, batch_size=1), model.encode_texts(CAPTIONS))


class TestImages:
    def test_all_kinds_agree(self, model, tmp_path):
        raw = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)
        images = [Image.fromarray(image) for image in raw]
        paths = [tmp_path / f"{number}.png" for number in range(5)]
        for image, path in zip(images, paths, strict=True):
            image.save(path)
        tensor = torch.from_numpy(raw).permute(0, 3, 1, 2)
        expected = model.encode_images(images)
        mixed = [images[0], raw[1], tensor[2], paths[3], str(paths[4])]
        kinds = [paths, [str(path) for path in paths], tuple(images), iter(images), raw, list(raw), tensor]
        kinds += [list(tensor), mixed, np.array([str(path) for path in paths])]
        for kind in kinds:
            assert torch.equal(model.encode_images(kind), expected)
        # Training and evaluation use the same pixels.
        x = model.x.inputs.normalize(tensor / 255)
        torch.testing.assert_close(model.eval().x(x).detach(), expected)

    def test_single_images(self, model, pictures, tmp_path):
        pictures[0].save(tmp_path / "one.png")
        raw = np.asarray(pictures[0])
        expected = model.encode_images(pictures[:1])
        assert expected.shape == (1, 256)
        for image in (pictures[0], tmp_path / "one.png", str(tmp_path / "one.png"), raw):
            assert torch.equal(model.encode_images(image), expected)
        tensor = torch.from_numpy(raw.copy()).permute(2, 0, 1)
        assert torch.equal(model.encode_images(tensor), model.encode_images(tensor[None]))

    def test_images_of_the_caller_do_not_change(self, model, pictures, tmp_path):
        """Decoding a JPEG at a smaller scale would shrink an image that the caller has opened."""
        pictures[0].resize((400, 300)).save(tmp_path / "large.jpg")
        with Image.open(tmp_path / "large.jpg") as image:
            model.encode_images(image)
            assert image.size == (400, 300)

    @pytest.mark.parametrize(
        ("images", "named"),
        [
            (["no/such.png"], r"no/such\.png"),
            ("a dog", "a dog"),
            (__file__, "not an image"),
            (Path(__file__).parent, "models"),
            ([], "empty"),
            (7, "int"),
            ([7], "int"),
            (b"bytes", "bytes"),
            (torch.zeros(2, 3, 8, 8), r"float32 \(2, 3, 8, 8\)"),
            (np.zeros((2, 3, 8, 8), dtype=np.uint8), r"uint8 \(2, 3, 8, 8\)"),
            ([np.zeros((8, 8), dtype=np.uint8)], r"uint8 \(8, 8\)"),
            ([torch.zeros(1, 3, 8, 8, dtype=torch.uint8)], "Tensor"),
        ],
    )
    def test_refusals(self, model, images, named):
        with pytest.raises(UserError, match=f"images: .*{named}"):
            model.encode_images(images)

    def test_truncated_files_are_named(self, model, pictures, tmp_path):
        pictures[0].save(tmp_path / "whole.jpg")
        (tmp_path / "half.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:-500])
        with pytest.raises(UserError, match=r"half\.jpg"):
            model.encode_images([tmp_path / "whole.jpg", tmp_path / "half.jpg"])


class TestTexts:
    def test_all_kinds_agree(self, model):
        assert torch.equal(model.encode_texts("a dog"), model.encode_texts(["a dog"]))
        expected = model.encode_texts(CAPTIONS)
        for texts in (tuple(CAPTIONS), iter(CAPTIONS), np.array(CAPTIONS)):
            assert torch.equal(model.encode_texts(texts), expected)

    @pytest.mark.parametrize(("texts", "named"), [([], "empty"), (7, "int"), (["a", 7], "item 1"), (b"b", "bytes")])
    def test_refusals(self, model, texts, named):
        with pytest.raises(UserError, match=f"texts: .*{named}"):
            model.encode_texts(texts)


class TestVectors:
    def test_all_kinds_agree(self, vector_model):
        x = torch.randn(9, 5)
        expected = vector_model.encode_x(x)
        assert expected.shape == (9, 12)
        for vectors in (x.numpy(), list(x), list(x.numpy()), x.tolist()):
            assert torch.equal(vector_model.encode_x(vectors), expected)
        for vector in (x[0], x[0].numpy(), x[0].tolist()):
            torch.testing.assert_close(vector_model.encode_x(vector), expected[:1])
        y = torch.randn(9, 7).numpy()
        torch.testing.assert_close(vector_model.encode_y(y, batch_size=4), vector_model.encode_y(y))

    @pytest.mark.parametrize("texts", ["a dog", ["a dog"], None, 7, [[1.0, 2.0], [1.0]]])
    def test_refusals(self, vector_model, texts):
        with pytest.raises(UserError, match="vectors: "):
            vector_model.encode_y(texts)


def test_wrong_inputs_are_named():
    model = build_model(EncoderSide("vectors", width=5), nn.Linear(7, 12), width=4)
    with pytest.raises(UserError, match=r"\(6, 9\).*\(n, 5\)"):
        model(torch.randn(6, 9), torch.randn(6, 7))
    with pytest.raises(UserError, match="x has 4 features and y 12"):
        model(torch.randn(6, 5), torch.randn(6, 7))
    with pytest.raises(UserError, match="images"):
        model.encode_images([])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(model, pictures, dtype):
    expected = model.encode_images(pictures)
    features = model.to(dtype).encode_images(pictures)
    assert features.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(features.float(), expected, atol=1e-6 if dtype == torch.float64 else 0.03, rtol=0)


def test_repr_is_one_line(model, vector_model):
    total = f"{sum(parameter.numel() for parameter in model.parameters()):,}"
    tower = "x=ImageTower('nuclr_group_norm_resnet', 64 px), y=TextTower('distilbert')"
    assert repr(model) == f"DualEncoder({tower}, width=256, {total} parameters)"
    assert repr(vector_model) == "DualEncoder(x=VectorTower(5), y=VectorTower(7), width=12, 168 parameters)"
    vector_model.x.freeze()
    vector_model.y.requires_grad_(False)
    assert "x=VectorTower(5) frozen" in repr(vector_model)
    assert "168 parameters, 72 trainable" in repr(vector_model)
    assert "x=Sequential, y=Linear(" in repr(DualEncoder(nn.Sequential(nn.Linear(5, 4)), nn.Linear(7, 4)))
