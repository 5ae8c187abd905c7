"""Images: open files that may be broken, decode them, crop and resize to a fixed size.

A JPEG is decoded at the smallest of libjpeg's scales (1, 1/2, 1/4, 1/8) that still covers the requested size. This is
several times faster for photographs, and gives the same pixels on every machine with the same libjpeg. Evaluation
takes the central square or the whole image (`fit_image`), training takes random crops of the decoded image
(`decode_for_crops`, `resize_crop`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate

from nuclr.data.modalities.augment import Box, covering_side
from nuclr.data.modalities.base import Folder, Modality
from nuclr.errors import BadSample
from nuclr.image_files import BROKEN, open_image, to_rgb

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".ppm", ".tif", ".tiff")
MOSTLY = 0.9  # the share of names with such a suffix by which a column of images is recognized
Fit = Literal["crop", "squash"]

_ORIENTATION = 0x0112  # EXIF tag


@dataclass(frozen=True)
class ImageOptions:
    """How images of a side become pixels.

    Attributes:
        size: height and width.
        fit: "crop" or "squash" (setting `data.fit`); see `fit_image`.
        smallest_crop: smallest share of an image's area that a random crop keeps in training (setting `augment.crop`).
            None: no random crops.

    """

    size: int = 224
    fit: Fit = "crop"
    smallest_crop: float | None = None


class ImageModality(Modality):
    """Images: cells are names of files, or encoded images; batches are pixels (b, 3, size, size), uint8."""

    name = "image"
    in_files = True
    has_crops = True

    def read(self, cell: Any, folder: Folder) -> Image.Image:
        """Return the image, opened but not decoded yet."""
        return open_image(folder.read(cell) if isinstance(cell, str) else cell)

    def check(self, item: Image.Image) -> None:
        """Decode the image at the smallest scale.

        Raises:
            BadSample: if it cannot be decoded.

        """
        _decode_at_least(item, 1)

    def collate(self, items: Sequence[Any] | np.ndarray, options: ImageOptions | None = None) -> Tensor:
        """Decode the images and return their pixels."""
        options = options or ImageOptions()
        return torch.from_numpy(np.stack([fit_image(item, options.size, options.fit) for item in items]))

    def decode(self, item: Image.Image) -> Image.Image:
        """Return the image at its full size, as upright RGB.

        Raises:
            BadSample: if it cannot be decoded.

        """
        return _decode_at_least(item, max(item.size))


def fit_image(
    image: Image.Image,
    size: int,
    fit: Fit = "crop",
) -> np.ndarray:
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


def decode_for_crops(
    image: Image.Image,
    size: int,
    smallest_crop: float,
) -> np.ndarray:
    """Decode an image to the pixels that random crops are taken from.

    Args:
        image: an opened image.
        size: height and width of the resized crops.
        smallest_crop: smallest share of the image's area that a crop keeps.

    Returns:
        Pixels (height, width, 3), uint8, with the proportions of the image. A JPEG is decoded at the smallest scale at
        which all crops still have at least `size` pixels in both directions.

    Raises:
        BadSample: if it cannot be decoded.

    """
    return np.array(_decode_at_least(image, covering_side(size, smallest_crop)))


def resize_crop(
    pixels: np.ndarray,
    box: Box,
    size: int,
) -> np.ndarray:
    """Return a part of an image, resized to a square.

    Args:
        pixels: (height, width, 3), uint8.
        box: left, top, right and bottom of the part.
        size: height and width of the result.

    Returns:
        Pixels (3, size, size), uint8: bicubic with antialiasing, as Pillow and torchvision resize.

    Example:
        >>> resize_crop(np.zeros((40, 60, 3), np.uint8), (5, 0, 45, 40), size=16).shape
        (3, 16, 16)

    """
    left, top, right, bottom = box
    part = np.ascontiguousarray(pixels[top:bottom, left:right])
    # torch's kernel for uint8 with channels last is several times faster than Pillow's.
    resized = interpolate(
        torch.from_numpy(part).permute(2, 0, 1)[None],
        size=(size, size),
        mode="bicubic",
        antialias=True,
    )
    return np.asarray(resized[0])


def _decode_at_least(image: Image.Image, size: int) -> Image.Image:
    """Return upright RGB whose shorter side has at least `size` pixels, unless the file is smaller."""
    try:
        image.draft("RGB", (size, size))
        image.load()
        upright = image.getexif().get(_ORIENTATION, 1) == 1
        image = to_rgb(image)
        return image if upright else ImageOps.exif_transpose(image)
    except BROKEN as error:
        raise BadSample(f"broken image ({error})") from None
