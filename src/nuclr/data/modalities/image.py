"""Image files -> pixels: opening what may be broken, and crop-and-resize while decoding.

JPEGs are decoded at the smallest of libjpeg's scales (1, 1/2, 1/4, 1/8) that still covers the size asked for, which
is several times faster for photographs and the same on every machine with the same libjpeg.
"""

import struct
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from nuclr.data.pairs import BadSample

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".ppm", ".tif", ".tiff")
Fit = Literal["crop", "squash"]

_ORIENTATION = 0x0112  # EXIF
# What Pillow raises on damaged files.
_BROKEN: tuple[type[Exception], ...] = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError)
_BROKEN += (ArithmeticError, struct.error, MemoryError, Image.DecompressionBombError)


def read_file(path: Path) -> bytes:
    """The bytes of an image file; BadSample where there are none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadSample("missing file") from None
    except (OSError, ValueError) as error:
        raise BadSample(f"cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not data:
        raise BadSample("empty file")
    return data


def open_image(data: bytes) -> Image.Image:
    """The image in `data`, its pixels not yet decoded; BadSample where there is none."""
    try:
        return Image.open(BytesIO(data))
    except UnidentifiedImageError:
        raise BadSample("not an image") from None
    except _BROKEN as error:
        raise BadSample(f"broken image ({error})") from None


def check_image(image: Image.Image) -> None:
    """Decode as cheaply as possible, all of the file nevertheless; BadSample if it cannot be."""
    _decode(image, 1)


def fit_image(image: Image.Image, size: int, fit: Fit = "crop") -> np.ndarray:
    """Pixels (3, size, size), uint8: "crop" keeps the proportions and the middle, "squash" keeps all of the image."""
    image = _decode(image, size)
    box = None
    if fit == "crop":
        width, height = image.size
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def _decode(image: Image.Image, size: int) -> Image.Image:
    """RGB, upright, at least `size` on its shorter side unless the file is smaller."""
    try:
        image.draft("RGB", (size, size))
        image.load()
        if "transparency" in image.info:
            image = image.convert("RGBA")
        image = image if image.mode == "RGB" else image.convert("RGB")
        return ImageOps.exif_transpose(image) if image.getexif().get(_ORIENTATION, 1) != 1 else image
    except _BROKEN as error:
        raise BadSample(f"broken image ({error})") from None
