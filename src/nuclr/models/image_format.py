"""Prepare images for an image tower: open them, take the central square, resize it, normalize its pixels.

A model is saved with its `ImageFormat`, so images are always prepared in the same way.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from nuclr.arrays import to_device
from nuclr.errors import UserError, first_line
from nuclr.files import write_json
from nuclr.image_files import open_image, read_file, to_rgb
from nuclr.models.backbones import read_json
from nuclr.models.encoder import Inputs

LARGEST_SIZE = 8192  # pixels
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
NORMALIZATIONS = {  # mean and standard deviation of each channel
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "imagenet": (IMAGENET_MEAN, IMAGENET_STD),
}
ALLOWED = "PIL images, paths, numpy arrays (height, width, 3) uint8 or tensors (3, height, width) uint8"
ImageLike = Image.Image | str | os.PathLike[str] | np.ndarray | Tensor


@dataclass(frozen=True)
class ImageFormat(Inputs):
    """How images are prepared.

    Args:
        size: height and width in pixels.
        mean: mean of each channel, for pixels in [0, 1].
        std: standard deviation of each channel.

    Example:
        >>> image_format = ImageFormat(size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        >>> image_format.prepare(np.zeros((48, 64, 3), dtype=np.uint8)).shape
        torch.Size([1, 3, 32, 32])

    """

    modality: ClassVar[str] = "image"

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        """Refuse values, read from a file, that no image can be prepared with."""
        if type(self.size) is not int or not 1 <= self.size <= LARGEST_SIZE:
            raise ValueError(f"image size is {str(self.size)[:80]}; needs a whole number from 1 to {LARGEST_SIZE}")
        for name in ("mean", "std"):
            channels = tuple(map(float, getattr(self, name)))
            if len(channels) != 3 or not all(map(math.isfinite, channels)):
                raise ValueError(f"image {name} is {str(channels)[:80]}; needs three finite numbers")
            object.__setattr__(self, name, channels)  # JSON has lists

    def normalize(self, pixels: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation of each channel. Augmentation comes before this.

        Args:
            pixels: (b, 3, h, w), uint8, or floats in [0, 1].

        Returns:
            Floats (b, 3, h, w).

        """
        pixels = pixels if pixels.is_floating_point() else pixels.float() / 255
        mean, std = (
            to_device(torch.tensor(channels, dtype=pixels.dtype)[:, None, None], pixels.device)
            for channels in (self.mean, self.std)
        )
        return (pixels - mean) / std

    def example(self) -> Tensor:
        """Return the pixels of one black image, to try a tower with."""
        return torch.zeros(1, 3, self.size, self.size)

    def batch(self, items: Any) -> "Sequence[ImageLike] | np.ndarray":
        """Return one image or several as something that has a length and can be sliced. No file is opened.

        Args:
            items: a PIL image, a path, a numpy array (height, width, 3), a tensor (3, height, width), a list of any of
                these, an array (n, height, width, 3), or a tensor (n, 3, height, width). Arrays and tensors are uint8.

        Returns:
            A list or an array. A single image becomes a batch of one.

        Raises:
            UserError: if `items` has another type or shape.

        """
        if isinstance(items, str | os.PathLike | Image.Image):
            return [items]
        if isinstance(items, np.ndarray) and items.dtype.kind in "OU":  # paths or PIL images
            return list(items.ravel())
        if isinstance(items, np.ndarray | Tensor):
            pixels = _to_array(items)
            return pixels[None] if pixels.ndim == 3 else pixels
        if isinstance(items, Iterable) and not isinstance(items, bytes | dict):
            return list(items)
        raise UserError(f"images: got {type(items).__name__}; needs {ALLOWED}, or a list of these")

    def prepare(self, items: ImageLike | Iterable[ImageLike]) -> Tensor:
        """Return the normalized central squares of images, without augmentation.

        Args:
            items: one image or several, see `batch`.

        Returns:
            Pixels (n, 3, size, size), float32. A single image gives n = 1.

        Raises:
            UserError: if an image cannot be read, or has a type or shape that is not allowed.

        """
        return torch.cat([self.normalize(_pixels(image, self.size)) for image in self.batch(items)])

    def save(self, folder: Path, squash: bool = False) -> None:
        """Write preprocessor_config.json, which `read_image_format` and the image processors of transformers read.

        The processor of CLIP does what `central_square` does, whatever the model: it resizes the shorter edge with
        bicubic interpolation and takes the central square. Everything is written out, because the defaults depend on
        the class.

        Args:
            folder: the folder of the model.
            squash: resize the whole image to a square instead (setting `data.fit=squash`).

        """
        square = {"height": self.size, "width": self.size}
        content = {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": square if squash else {"shortest_edge": self.size},
            "resample": int(Image.Resampling.BICUBIC),
            "do_center_crop": not squash,
            "crop_size": square,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self.mean,
            "image_std": self.std,
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "preprocessor_config.json", content)


def _to_array(pixels: np.ndarray | Tensor) -> np.ndarray:
    """Return uint8 pixels, which tensors hold as (..., 3, height, width), as an array (..., height, width, 3)."""
    is_image = isinstance(pixels, Tensor) and pixels.ndim >= 3
    array = pixels.movedim(-3, -1).cpu().numpy() if is_image else np.asarray(pixels)  # type: ignore[union-attr]
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or array.shape[-1] != 3:
        raise UserError(f"images: {array.dtype} {tuple(pixels.shape)}; needs {ALLOWED}")
    return array


def _pixels(image: Any, size: int) -> Tensor:
    """Return the central square of one image, (1, 3, size, size), uint8."""
    name = str(getattr(image, "filename", "") or type(image).__name__)
    try:
        if isinstance(image, Tensor | np.ndarray):
            image = Image.fromarray(np.ascontiguousarray(_to_array(image)))
        elif isinstance(image, str | os.PathLike):
            name = str(image)
            image = open_image(read_file(Path(image).expanduser()))
            # Decode a JPEG at the smallest scale that covers `size`, as in training. Not for images that the caller
            # has opened: this would shrink them.
            image.draft("RGB", (size, size))
        elif not isinstance(image, Image.Image):
            raise UserError(f"images: got an item of type {name}; needs {ALLOWED}")
        square = central_square(image, size)
    except UserError:
        raise
    except Exception as error:  # Pillow raises many types on damaged files
        raise UserError(f"images: {name}: cannot be read ({first_line(error)})") from None
    return torch.from_numpy(square.transpose(2, 0, 1).copy())[None]


def central_square(image: Image.Image, size: int) -> np.ndarray:
    """Return the central square of an image, turned upright by its EXIF tag, as uint8 pixels (size, size, 3)."""
    upright = ImageOps.exif_transpose(to_rgb(image))
    return np.asarray(ImageOps.fit(upright, (size, size), Image.Resampling.BICUBIC))


def read_image_format(folder: Path, default: int = 224) -> ImageFormat:
    """Return the image format of the model in a folder, from its processor's file if it has one.

    The file is read as JSON because the image processors of transformers need torchvision.

    Args:
        folder: a folder with a config.json.
        default: size in pixels if the folder does not say it.

    """
    processor: dict[str, Any] = {}
    config = read_json(folder / "config.json")
    config = config.get("vision_config", config)
    try:
        for path in (folder / "processor_config.json", folder / "preprocessor_config.json"):
            if path.is_file():
                content = read_json(path)
                processor |= content.get("image_processor", content)
        size = _side(processor.get("crop_size")) or _side(processor.get("size")) or _side(config.get("image_size"))
        mean = processor.get("image_mean") or IMAGENET_MEAN
        return ImageFormat(size or default, mean, processor.get("image_std") or IMAGENET_STD)
    except (AttributeError, TypeError, ValueError) as error:  # values of the wrong type
        raise UserError(f"{folder}: its image processor cannot be interpreted ({first_line(error)})") from None


def _side(size: Any) -> Any:
    """Return one number from 224, [224, 224], {"height": 224, "width": 224} or {"shortest_edge": 224}."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height")
    return size[0] if isinstance(size, list) and size else size
