"""Images: proportions, color modes, orientation, and broken files."""

import io

import numpy as np
import pytest
from PIL import Image

from nuclr.data.modalities.image import check_image, decode_image, fit_image, open_image, read_file
from nuclr.data.pairs import BadSample
from tests.data import make


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def halves(width: int = 60, height: int = 20) -> Image.Image:
    """Return an image whose left half is black and right half is white."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, width // 2 :] = 255
    return Image.fromarray(pixels)


@pytest.mark.parametrize("size", [16, 20, 33])
def test_crop_keeps_the_middle_and_squash_keeps_the_whole_image(size):
    image = Image.fromarray(np.tile(np.repeat([0, 90, 255], 20).astype(np.uint8), (20, 1)))
    crop, squash = (fit_image(image, size, fit) for fit in ("crop", "squash"))
    assert crop.shape == squash.shape == (3, size, size) and crop.dtype == np.uint8
    assert abs(crop.mean() - 90) < 3
    assert squash[0, 0, 0] == 0 and squash[0, 0, -1] == 255


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_all_color_modes_become_rgb(mode):
    image = Image.fromarray(np.full((9, 9), 3, np.uint16)) if mode == "I;16" else halves(9, 9).convert(mode)
    pixels = fit_image(open_image(encoded(image, "TIFF" if mode in ("CMYK", "I;16") else "PNG")), 8)
    assert pixels.shape == (3, 8, 8)


def test_images_are_rotated_upright():
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down: upright, the black half is on the right
    pixels = fit_image(open_image(encoded(halves(20, 20), "JPEG", exif=exif)), 20)
    assert pixels[0, 10, 2] > 200 and pixels[0, 10, 17] < 50


def test_a_jpeg_decoded_at_a_smaller_scale_is_close_to_the_full_decode():
    data = make.picture(1, (640, 480))
    full = np.asarray(Image.open(io.BytesIO(data)).crop((80, 0, 560, 480)).resize((64, 64), Image.Resampling.BICUBIC))
    assert np.abs(fit_image(open_image(data), 64).transpose(1, 2, 0).astype(int) - full).mean() < 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"])
def test_truncated_files_are_found_by_the_check(kind):
    data = encoded(Image.fromarray(np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)), kind)
    check_image(open_image(data))
    for share in (0.02, 0.3, 0.9):
        with pytest.raises(BadSample, match=r"broken image|not an image"):
            check_image(open_image(data[: int(share * len(data))]))


def test_damaged_bytes_raise_only_bad_sample():
    rng = np.random.default_rng(0)
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "TIFF"):
        data = np.frombuffer(encoded(halves(), kind), np.uint8)
        for _ in range(60):
            noisy = data.copy()
            positions = rng.integers(len(data), size=5)
            noisy[positions] = rng.integers(256, size=5)
            try:
                fit_image(open_image(noisy.tobytes()), 16)
            except BadSample:
                continue


def test_missing_empty_and_unreadable_files_are_bad_samples(tmp_path):
    (tmp_path / "empty").touch()
    for name, reason in (
        ("gone", "missing file"),
        ("empty", "empty file"),
        (".", "cannot be read"),
        ("a\0b", "cannot be read"),
    ):
        with pytest.raises(BadSample, match=reason):
            read_file(tmp_path / name)


def test_decode_image_keeps_the_full_size_and_turns_the_image_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    decoded = decode_image(open_image(encoded(halves(640, 480).convert("L"), "JPEG", exif=exif)))
    assert decoded.mode == "RGB" and decoded.size == (480, 640)
    with pytest.raises(BadSample, match=r"broken image|not an image"):
        decode_image(open_image(make.picture(1)[:300]))
