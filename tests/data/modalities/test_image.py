"""Images: proportions, color modes, orientation, and broken files."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from nuclr.data.modalities.image import ImageModality, fit_image
from nuclr.data.pairs import BadSample
from nuclr.image_files import open_image
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


def test_a_jpeg_decoded_at_a_smaller_scale_is_close_to_the_full_decode():
    data = make.picture(1, (640, 480))
    full = np.asarray(Image.open(io.BytesIO(data)).crop((80, 0, 560, 480)).resize((64, 64), Image.Resampling.BICUBIC))
    assert np.abs(fit_image(open_image(data), 64).transpose(1, 2, 0).astype(int) - full).mean() < 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"])
def test_truncated_files_are_found_by_the_check(kind):
    data = encoded(Image.fromarray(np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)), kind)
    ImageModality().check(open_image(data))
    for share in (0.02, 0.3, 0.9):
        with pytest.raises(BadSample, match=r"broken image|not an image"):
            ImageModality().check(open_image(data[: int(share * len(data))]))


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


def test_decoding_keeps_the_full_size_and_turns_the_image_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    decoded = ImageModality().decode(open_image(encoded(halves(640, 480).convert("L"), "JPEG", exif=exif)))
    assert decoded.mode == "RGB" and decoded.size == (480, 640)
    with pytest.raises(BadSample, match=r"broken image|not an image"):
        ImageModality().decode(open_image(make.picture(1)[:300]))


@pytest.mark.parametrize("kind", ["EPS", "PDF", "PCX", "TGA", "ICO", "SGI", "JPEG2000", "AVIF"])
def test_other_formats_are_not_opened(kind):
    with pytest.raises(BadSample, match="not an image"):
        open_image(encoded(halves(), kind))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_images_are_scaled_to_8_bits(kind):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)
    data = encoded(Image.fromarray(np.tile(ramp, (64, 1))), kind)
    expected = np.broadcast_to(ramp >> 8, (3, 64, 64))
    assert np.array_equal(fit_image(open_image(data), 64), expected)
    assert np.array_equal(np.asarray(ImageModality().decode(open_image(data))), expected.transpose(1, 2, 0))


def test_16_bit_images_with_a_transparent_value_another_orientation_or_byte_order_are_scaled():
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    ramp = np.tile(np.linspace(0, 65535, 16).astype(np.uint16), (16, 1))
    for data in (
        encoded(Image.fromarray(ramp), "PNG", transparency=0),
        encoded(Image.fromarray(ramp[::-1, ::-1]), "PNG", exif=exif),
        encoded(Image.frombytes("I;16B", (16, 16), ramp.astype(">u2").tobytes()), "TIFF"),
    ):
        assert np.array_equal(fit_image(open_image(data), 16)[0], ramp >> 8)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_images_with_float_or_32_bit_pixels_are_bad_samples(mode):
    with pytest.raises(BadSample, match=r"(float|32-bit) pixels"):
        open_image(encoded(halves().convert(mode), "TIFF"))


def with_header_size(kind: str, width: int, height: int) -> bytes:
    """Return a small image whose header claims another size."""
    data = bytearray(encoded(halves(16, 16), kind))
    if kind == "PNG":
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif kind == "JPEG":
        start = data.index(b"\xff\xc0") + 5
        data[start : start + 4] = struct.pack(">HH", height, width)
    else:
        start = data.index(b"\x9d\x01\x2a") + 3
        data[start : start + 4] = struct.pack("<HH", width, height)
    return bytes(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_number_of_pixels_is_limited_by_the_header_before_decoding(kind):
    with pytest.raises(BadSample, match="9000 x 9000"):
        open_image(with_header_size(kind, 9000, 9000))
    assert open_image(with_header_size(kind, 8000, 8000)).size == (8000, 8000)
