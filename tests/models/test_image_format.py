"""Preparing images: the central square, upright, normalized; the same for PIL images and tensors."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from nuclr.errors import UserError
from nuclr.models import ImageFormat
from nuclr.models.image_format import read_image_format

FORMAT = ImageFormat(8, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def pixels(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_normalize_floats_and_bytes():
    raw = torch.from_numpy(pixels(8, 8)).permute(2, 0, 1)[None]
    expected = (raw[0, 1] / 255 - 0.2) / 0.5
    torch.testing.assert_close(FORMAT.normalize(raw)[0, 1], expected)
    torch.testing.assert_close(FORMAT.normalize(raw / 255)[0, 1], expected)
    assert FORMAT.normalize((raw / 255).double()).dtype == torch.float64


def test_images_of_the_right_size_are_not_resized():
    raw = pixels(8, 8)
    tensor = torch.from_numpy(raw).permute(2, 0, 1)[None]
    assert torch.equal(FORMAT.prepare([Image.fromarray(raw)]), FORMAT.normalize(tensor))
    assert torch.equal(FORMAT.prepare(tensor), FORMAT.normalize(tensor))


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_central_square(shape):
    raw = pixels(*shape)
    square = raw[:, 6:14] if shape[0] == 8 else raw[6:14]
    assert torch.equal(FORMAT.prepare([Image.fromarray(raw)]), FORMAT.prepare([Image.fromarray(square.copy())]))
    tensor = torch.from_numpy(raw).permute(2, 0, 1)[None]
    assert torch.equal(FORMAT.prepare(tensor), FORMAT.prepare([Image.fromarray(raw)]))


def test_modes_and_orientation():
    raw = Image.fromarray(pixels(8, 8))
    for mode in ("L", "RGBA", "P", "CMYK"):
        assert FORMAT.prepare([raw.convert(mode)]).shape == (1, 3, 8, 8)
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    raw.save(turned, "png", exif=exif)
    assert torch.equal(FORMAT.prepare([Image.open(turned)]), FORMAT.prepare([raw.rotate(180)]))


def test_files_are_limited_to_known_formats_and_16_bits_are_scaled(tmp_path):
    ramp = np.tile(np.linspace(0, 65535, 8).astype(np.uint16), (8, 1))
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    expected = FORMAT.prepare(np.repeat((ramp >> 8).astype(np.uint8)[:, :, None], 3, 2))
    assert torch.equal(FORMAT.prepare(tmp_path / "ramp.png"), expected)
    with (tmp_path / "eps.jpg").open("wb") as file:
        Image.new("RGB", (8, 8)).save(file, "EPS")
    with pytest.raises(UserError, match=r"eps\.jpg.*JPEG"):
        FORMAT.prepare(tmp_path / "eps.jpg")
    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")
    with pytest.raises(UserError, match="9000 x 9000"):
        FORMAT.prepare(tmp_path / "large.png")


def test_written_formats_are_read_back(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for squash in (False, True):
        FORMAT.save(tmp_path, squash)
        assert read_image_format(tmp_path) == FORMAT


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ('"size": 40', 40),
        ('"size": {"shortest_edge": 48}', 48),
        ('"size": {"height": 56, "width": 56}', 56),
        ('"size": {"shortest_edge": 256}, "crop_size": {"height": 64, "width": 64}', 64),
        ('"do_resize": true', 72),
    ],
)
def test_sizes_in_processor_files(tmp_path, size, expected):
    (tmp_path / "config.json").write_text('{"vision_config": {"image_size": 72}}')
    (tmp_path / "preprocessor_config.json").write_text(f"{{{size}}}")
    assert read_image_format(tmp_path).size == expected
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(f'{{"image_processor": {{{size}, "image_mean": [0.5, 0.5, 0.5]}}}}')
    assert read_image_format(tmp_path).size == expected
    assert read_image_format(tmp_path).mean == (0.5, 0.5, 0.5)
