"""Pictures -> what an image tower reads: square, float, normalized. The facts are stored with the model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate

from nuclr.errors import UserError
from nuclr.models.locate import read_json

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImageFormat:
    """Height and width in pixels, and the mean and standard deviation of each channel of pixels in [0, 1]."""

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def normalize(self, pixels: Tensor) -> Tensor:
        """Floats in [0, 1] or uint8, (b, 3, h, w), to zero mean and unit variance; augmentation comes before it."""
        pixels = pixels if pixels.is_floating_point() else pixels.float() / 255
        mean, std = (pixels.new_tensor(fact)[:, None, None] for fact in (self.mean, self.std))
        return (pixels - mean) / std

    def prepare(self, images: Sequence[Image.Image] | Tensor) -> Tensor:
        """The central squares of PIL images, or of a uint8 tensor (b, 3, h, w) -> (b, 3, size, size), normalized."""
        if isinstance(images, Tensor):
            return self.normalize(self._fit(images))
        squares = np.stack([central_square(image, self.size) for image in images])
        return self.normalize(torch.from_numpy(squares).permute(0, 3, 1, 2).contiguous())

    def _fit(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            got = f"{str(images.dtype).removeprefix('torch.')} {tuple(images.shape)}"
            raise UserError(f"images: {got}; needs a list of PIL images or a uint8 tensor (b, 3, height, width)")
        height, width = images.shape[2:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = images[:, :, top : top + side, left : left + side]
        if side == self.size:
            return square
        resized = interpolate(square.float(), size=self.size, mode="bicubic", antialias=True)
        return resized.clamp(0, 255) / 255


def central_square(image: Image.Image, size: int) -> np.ndarray:
    """The middle of an image, upright, as pixels (size, size, 3), uint8."""
    image.draft("RGB", (size, size))  # a JPEG that is still a file: decoded no larger than needed
    if "transparency" in image.info:
        image = image.convert("RGBA")
    image = ImageOps.exif_transpose(image.convert("RGB"))
    width, height = image.size
    if (width, height) != (size, size):
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return np.asarray(image)


def read_image_format(folder: Path, default: int = 224) -> ImageFormat:
    """The images that the model in a folder was trained on, from its processor's file where there is one.

    Read as JSON: transformers' own image processors want torchvision.
    """
    facts: dict[str, Any] = {}
    for path in (folder / "processor_config.json", folder / "preprocessor_config.json"):
        if path.is_file():
            content = read_json(path)
            facts |= content.get("image_processor", content)
    config = read_json(folder / "config.json")
    config = config.get("vision_config", config)
    sizes = (facts.get("crop_size"), facts.get("size"), config.get("image_size"), default)
    size = next(number for size in sizes if (number := _pixels(size)))
    mean, std = facts.get("image_mean") or IMAGENET_MEAN, facts.get("image_std") or IMAGENET_STD
    return ImageFormat(size, tuple(mean), tuple(std))


def write_image_format(images: ImageFormat, folder: Path, processor: str | None = None) -> None:
    """Write what `read_image_format` reads; with the name of a `processor`, for transformers as well."""
    side = {"height": images.size, "width": images.size}
    size = side if processor == "SiglipImageProcessor" else {"shortest_edge": images.size}
    facts: dict[str, Any] = {"size": size, "crop_size": side, "image_mean": images.mean, "image_std": images.std}
    facts |= {"do_resize": True, "do_center_crop": True, "do_rescale": True, "do_normalize": True}
    if processor:
        facts["image_processor_type"] = processor
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _pixels(size: Any) -> int | None:
    """One number out of 224, [224, 224], {"height": 224, "width": 224}, {"shortest_edge": 224}."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height")
    return size[0] if isinstance(size, list) else size
