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
from torch.nn.functional import interpolate

from nuclr.errors import UserError
from nuclr.files import write_json
from nuclr.image_files import ImageError, open_image_file, read_image_file, to_rgb
from nuclr.models.backbones import first_line, read_json
from nuclr.models.inputs import Inputs
from nuclr.transfer import to_device

LARGEST_SIZE = 8192  # pixels
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
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

    def batch(self, items: Any) -> "Sequence[ImageLike] | np.ndarray | Tensor":
        """Return one image or several as something that has a length and can be sliced, see `image_batch`."""
        return image_batch(items)

    def prepare(self, items: ImageLike | Iterable[ImageLike]) -> Tensor:
        """Return the normalized central squares of images, without augmentation.

        Args:
            items: one image or several, see `image_batch`.

        Returns:
            Pixels (n, 3, size, size), float32. A single image gives n = 1.

        Raises:
            UserError: if an image cannot be read, or has a type or shape that is not allowed.

        """
        batch = image_batch(items)
        if isinstance(batch, Tensor):
            return self.normalize(_central_squares(batch, self.size))
        if len(batch) == 0:
            raise UserError("images: an empty list; needs at least one image")
        return torch.cat([self.normalize(_pixels(image, self.size)) for image in batch])


def image_batch(images: ImageLike | Iterable[ImageLike]) -> Sequence[ImageLike] | np.ndarray | Tensor:
    """Return one image or several as something that has a length and can be sliced.

    Args:
        images: a PIL image, a path, a numpy array (height, width, 3), a tensor (3, height, width), a list of any of
            these, an array (n, height, width, 3), or a tensor (n, 3, height, width). Arrays and tensors are uint8.

    Returns:
        A list, an array or a tensor. A single image becomes a batch of one.

    Raises:
        UserError: if `images` has another type or shape. Files are not opened yet.

    """
    if isinstance(images, str | os.PathLike | Image.Image):
        return [images]
    if isinstance(images, np.ndarray) and images.dtype.kind in "OU":  # paths or PIL images
        return list(images.ravel())
    if isinstance(images, np.ndarray | Tensor):
        channel = -1 if isinstance(images, np.ndarray) else -3
        if (
            str(images.dtype).removeprefix("torch.") != "uint8"
            or images.ndim not in (3, 4)
            or images.shape[channel] != 3
        ):
            raise UserError(_wrong_array(images))
        return images[None] if images.ndim == 3 else images
    if isinstance(images, Iterable) and not isinstance(images, bytes | dict):
        return list(images)
    raise UserError(f"images: got {type(images).__name__}; needs {ALLOWED}, or a list of these")


def _wrong_array(image: np.ndarray | Tensor) -> str:
    kind = "numpy array" if isinstance(image, np.ndarray) else "tensor"
    shape = "(height, width, 3)" if isinstance(image, np.ndarray) else "(3, height, width)"
    dtype = str(image.dtype).removeprefix("torch.")
    return f"images: {kind} of {dtype} {tuple(image.shape)}; needs uint8 {shape}, or (n, ...) for several images"


def _pixels(image: Any, size: int) -> Tensor:
    """Return the central square of one image, (1, 3, size, size), uint8 or floats in [0, 1]."""
    if isinstance(image, Tensor | np.ndarray):
        if image.ndim != 3:
            raise UserError(_wrong_array(image))
        (image,) = image_batch(image)
        if isinstance(image, Tensor):
            return _central_squares(image[None], size)
        image = Image.fromarray(np.ascontiguousarray(image))
    if isinstance(image, Image.Image):
        name = getattr(image, "filename", "") or "a PIL image"
        square = _decode(image, size, f"images: {name}")
    elif isinstance(image, str | os.PathLike):
        square = _read_square(Path(image).expanduser(), size)
    else:
        raise UserError(f"images: got an item of type {type(image).__name__}; needs {ALLOWED}")
    return torch.from_numpy(square.transpose(2, 0, 1).copy())[None]


def _read_square(path: Path, size: int) -> np.ndarray:
    if not os.path.lexists(path):
        raise UserError(f"images: {str(path)!r}: no such file")
    try:
        image = open_image_file(read_image_file(path))
    except ImageError as error:
        raise UserError(f"images: {path}: {error}") from None
    # Decode a JPEG at the smallest scale that covers `size`, as in training. Not for images that the caller has opened:
    # this would shrink them.
    image.draft("RGB", (size, size))
    return _decode(image, size, f"images: {path}")


def _decode(image: Image.Image, size: int, name: str) -> np.ndarray:
    try:
        return central_square(image, size)
    except Exception as error:  # Pillow raises many types on damaged files
        raise UserError(f"{name} cannot be decoded ({first_line(error)})") from None


def central_square(image: Image.Image, size: int) -> np.ndarray:
    """Return the central square of an image, turned upright by its EXIF tag, as uint8 pixels (size, size, 3)."""
    image = ImageOps.exif_transpose(to_rgb(image))
    width, height = image.size
    if (width, height) != (size, size):
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return np.asarray(image)


def _central_squares(images: Tensor, size: int) -> Tensor:
    """Return the central squares of uint8 images (b, 3, h, w), as uint8 or, if resized, as floats in [0, 1]."""
    height, width = images.shape[2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = images[:, :, top : top + side, left : left + side]
    if side == size:
        return square
    resized = interpolate(square.float(), size=size, mode="bicubic", antialias=True)
    return resized.clamp(0, 255) / 255


def read_image_format(folder: Path, default: int = 224) -> ImageFormat:
    """Return the image format of the model in a folder, from its processor's file if it has one.

    The file is read as JSON because the image processors of transformers need torchvision.

    Args:
        folder: a folder with a config.json.
        default: size in pixels if the folder does not say it.

    """
    processor: dict[str, Any] = {}
    for path in (folder / "processor_config.json", folder / "preprocessor_config.json"):
        if path.is_file():
            content = read_json(path)
            options = content.get("image_processor", content)
            if not isinstance(options, dict):
                raise UserError(f"{path}: image_processor is not a JSON object")
            processor |= options
    config = read_json(folder / "config.json")
    inner = config.get("vision_config", config)
    config = inner if isinstance(inner, dict) else config
    sizes = (processor.get("crop_size"), processor.get("size"), config.get("image_size"), default)
    size = next(number for size in sizes if (number := _side(size)))
    mean, std = processor.get("image_mean") or IMAGENET_MEAN, processor.get("image_std") or IMAGENET_STD
    image_format = ImageFormat(
        size, *(tuple(numbers) if isinstance(numbers, list) else numbers for numbers in (mean, std))
    )
    check_image_format(image_format, folder)
    return image_format


def check_image_format(image_format: ImageFormat, path: Path) -> None:
    """Refuse a format, read from a file at `path`, that no image can be prepared with.

    Raises:
        UserError: if the size is not a whole number up to `LARGEST_SIZE`, or mean and std are not three numbers each.

    """
    size = image_format.size
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST_SIZE:
        raise UserError(f"{path}: image size is {str(size)[:80]}; needs a whole number from 1 to {LARGEST_SIZE}")
    for key, numbers in (("image_mean", image_format.mean), ("image_std", image_format.std)):
        if (
            not isinstance(numbers, tuple)
            or len(numbers) != 3
            or not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        ):
            raise UserError(f"{path}: {key} is {str(numbers)[:80]}; needs three finite numbers")


def write_image_format(image_format: ImageFormat, folder: Path, squash: bool = False) -> None:
    """Write preprocessor_config.json, which `read_image_format` and the image processors of transformers read.

    The processor of CLIP does what `central_square` does, whatever the model: it resizes the shorter edge with bicubic
    interpolation and takes the central square. Everything is written out, because the defaults depend on the class.

    Args:
        image_format: how images are prepared.
        folder: the folder of the model.
        squash: resize the whole image to a square instead (setting `data.fit=squash`).

    """
    square = {"height": image_format.size, "width": image_format.size}
    content: dict[str, Any] = {"image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True}
    content |= {"do_resize": True, "size": square if squash else {"shortest_edge": image_format.size}}
    content |= {"resample": int(Image.Resampling.BICUBIC), "do_center_crop": not squash, "crop_size": square}
    content |= {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    content |= {"image_mean": image_format.mean, "image_std": image_format.std}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "preprocessor_config.json", content)


def _side(size: Any) -> int | None:
    """Return one number from 224, [224, 224], {"height": 224, "width": 224} or {"shortest_edge": 224}."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height")
    return size[0] if isinstance(size, list) and size else size
