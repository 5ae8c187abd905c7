"""Exports to open_clip are read back by it and give the features of the run."""

import math

import pytest
import torch

from nuclr.runs.run import Run
from tests.export.runs import images, largest_difference, oblong_images, run_card, texts

pytestmark = pytest.mark.open_clip
open_clip = pytest.importorskip("open_clip")

NAMES = ["clip", "clip_at_another_size"]


@pytest.fixture
def exported(runs):
    return lambda name: runs.export(name, "open-clip")


@pytest.mark.parametrize("name", NAMES)
def test_features_equal_those_of_the_run(runs, exported, name):
    from PIL import Image, ImageOps

    path = f"local-dir:{exported(name)}"
    loaded, preprocess = open_clip.create_model_from_pretrained(path)
    tokenizer, model = open_clip.get_tokenizer(path), runs.model(name)
    size = model.x.inputs.size
    squares = [ImageOps.fit(image.convert("RGB"), (size, size), Image.BICUBIC) for image in oblong_images()]
    with torch.inference_mode():
        y = loaded.eval().encode_text(tokenizer(texts()), normalize=True)
        assert largest_difference(y, model.encode_texts(texts())) < 1e-6
        for pictures, originals in ((images(80), images(80)), (images(size), images(size)), (squares, oblong_images())):
            x = loaded.encode_image(torch.stack([preprocess(picture) for picture in pictures]), normalize=True)
            assert largest_difference(x, model.encode_images(originals)) < 1e-6
    assert math.exp(-loaded.logit_scale.item()) == pytest.approx(Run.open(runs(name)).temperature, rel=1e-6)
    assert run_card(exported(name))["scores"].shape == (2, 2)
