"""Images: open files that may be broken, decode them, crop and resize to a fixed size.

A JPEG is decoded at the smallest of libjpeg's scales (1, 1/2, 1/4, 1/8) that still covers the requested size. This is
several times faster for photographs, and gives the same pixels on every machine with the same libjpeg.
"""

import os
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from nuclr import image_files
from nuclr.data.pairs import BadSample

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".ppm", ".tif", ".tiff")
Fit = Literal["crop", "squash"]

_ORIENTATION = 0x0112  # EXIF tag


def read_file(path: Path, inside: Path | None = None) -> bytes:
    """Return the bytes of an image file.

    Args:
        path: the file.
        inside: the folder that the file must be in after all symbolic links are followed, itself without links (see
            `boundary`). None allows all folders.

    Raises:
        BadSample: if the file is missing, empty, too large, not a regular file, outside of `inside`, or cannot be read.

    """
    try:
        if inside is not None:
            path = Path(os.path.realpath(path))
            if not path.is_relative_to(inside):
                raise BadSample("outside data.root; data.allow_outside=true allows this")
        return image_files.read_image_file(path)
    except (OSError, ValueError) as error:
        reason = str(error) if isinstance(error, image_files.ImageError) else f"cannot be read ({error})"
        raise BadSample(reason) from None


def boundary(folder: Path, allow_outside: bool) -> Path | None:
    """Return the argument `inside` of `read_file` for images in `folder` (setting `data.allow_outside`)."""
    return None if allow_outside else Path(os.path.realpath(folder))


def open_image(data: bytes) -> Image.Image:
    """Open the image in `data` without decoding its pixels.

    Raises:
        BadSample: if `data` is not an image in one of `nuclr.image_files.FORMATS`, or has too many pixels.

    """
    try:
        return image_files.open_image_file(data)
    except image_files.ImageError as error:
        raise BadSample(str(error)) from None


def check_image(image: Image.Image) -> None:
    """Decode the whole file at the smallest scale, to see whether it can be decoded.

    Raises:
        BadSample: if it cannot be decoded.

    """
    _decode_at_least(image, 1)


def decode_image(image: Image.Image) -> Image.Image:
    """Return the image at its full size, as upright RGB.

    Raises:
        BadSample: if it cannot be decoded.

    """
    return _decode_at_least(image, max(image.size))


def fit_image(image: Image.Image, size: int, fit: Fit = "crop") -> np.ndarray:
    """Decode an image and resize it to a square.

    Args:
        image: an opened image.
        size: height and width of the result.
        fit: "crop" keeps the proportions and the middle of the image; "squash" keeps the whole image.

    Returns:
        Pixels (3, size, size), uint8.

    Raises:
        BadSample: if it cannot be decoded.

    Example:
        >>> fit_image(Image.new("RGB", (40, 20), "red"), size=8).shape
        (3, 8, 8)

    """
    image = _decode_at_least(image, size)
    box = None
    if fit == "crop":
        width, height = image.size
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def _decode_at_least(image: Image.Image, size: int) -> Image.Image:
    """Return upright RGB whose shorter side has at least `size` pixels, unless the file is smaller."""
    try:
        image.draft("RGB", (size, size))
        image.load()
        upright = image.getexif().get(_ORIENTATION, 1) == 1
        image = image_files.to_rgb(image)
        return image if upright else ImageOps.exif_transpose(image)
    except image_files.BROKEN as error:
        raise BadSample(f"broken image ({error})") from None
