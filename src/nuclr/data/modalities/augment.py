"""Batched image augmentation on tensors: random resized crop, flip, and a policy like RandAugment.

All random numbers are drawn for the whole global batch from (seed, epoch, step), and each process takes its slice.
K processes with b images each therefore augment exactly as one process with K b images, and a resumed run augments
exactly as an uninterrupted one.

The crop, the flip and the policy's shears, shifts and rotations are combined into one affine map, so each image is
resampled once. The policy is that of ALBEF's code, which the paper's code uses: two operations per image, each one of
ten (identity, autocontrast, equalise, brightness, sharpness, shear and shift along x and y, rotation), applied with
probability 1/2.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the pixels in CLIP's training set
STD = (0.26862954, 0.26130258, 0.27577711)

COLOR = ("autocontrast", "equalise", "brightness", "sharpness")
GEOMETRY = ("shear_x", "shear_y", "shift_x", "shift_y", "rotate")
OPERATIONS = ("identity", *COLOR, *GEOMETRY)


@dataclass(frozen=True)
class Draw:
    """The random choices for b images.

    Attributes:
        theta: (b, 2, 3), maps positions in the output to positions in the input, both in [-1, 1].
        operations: (b, k), positions in OPERATIONS; 0 is the identity.

    """

    theta: Tensor
    operations: Tensor

    def part(self, rank: int, world: int) -> "Draw":
        """Return the slice of process `rank` of `world`."""
        local = len(self.theta) // world
        return Draw(*(getattr(self, field.name)[rank * local : (rank + 1) * local] for field in fields(self)))


@dataclass(frozen=True)
class Augment:
    """Augment uint8 or float images (b, 3, h, w) to float images (b, 3, size, size) in [0, 1].

    Args:
        size: height and width of the output.
        seed: seed of the run.
        scale: smallest and largest share of the image's area that a crop keeps; (1, 1) does not crop.
        flip: probability of a horizontal flip.
        operations: number of policy operations per image; 0 switches the policy off.
        magnitude: strength of the operations, from 0 to 10.

    Example:
        >>> augment = Augment(size=16, operations=0)
        >>> augment(torch.zeros(4, 3, 20, 20, dtype=torch.uint8), epoch=0, step=0).shape
        torch.Size([4, 3, 16, 16])

    """

    size: int
    seed: int = 0
    scale: tuple[float, float] = (0.5, 1.0)
    flip: float = 0.5
    operations: int = 2
    magnitude: float = 7.0

    def __call__(self, images: Tensor, epoch: int, step: int, rank: int = 0, world: int = 1) -> Tensor:
        """Augment this process's part of a global batch.

        Args:
            images: (b, 3, h, w), with the same b on every process.
            epoch: number of the epoch.
            step: number of the step within the epoch.
            rank: number of this process.
            world: number of processes.

        Returns:
            (b, 3, size, size), float32 in [0, 1].

        """
        return self.apply(images, self.draw(len(images) * world, epoch, step).part(rank, world))

    def draw(self, b: int, epoch: int, step: int) -> Draw:
        """Draw all random choices for a global batch of b images."""
        random = np.random.default_rng([self.seed, epoch, step])
        share = random.uniform(*self.scale, b)
        stretch = np.exp(random.uniform(-1, 1, b) * math.log(4 / 3) / 2)  # square root of the crop's aspect ratio
        stretch = np.where(share < 1, stretch, 1.0)
        width, height = (np.minimum(np.sqrt(share) * factor, 1.0) for factor in (stretch, 1 / stretch))
        left, top = ((1 - side) * random.uniform(-1, 1, b) for side in (width, height))
        mirror = np.where(random.random(b) < self.flip, -1.0, 1.0)
        operations = random.integers(len(OPERATIONS), size=(b, self.operations))
        operations *= random.integers(2, size=operations.shape)
        signs = random.choice([-1.0, 1.0], size=operations.shape)

        theta = _affine(b, [[width * mirror, 0, left], [0, height, top]])
        for operation, sign in zip(operations.T, signs.T, strict=True):
            theta = theta @ self._geometry(operation, sign * self.magnitude / 10)
        return Draw(torch.from_numpy(theta[:, :2]).float(), torch.from_numpy(operations))

    def _geometry(self, operation: np.ndarray, level: np.ndarray) -> np.ndarray:
        """Return the maps (b, 3, 3) of one operation per image: identity unless geometric. `level` is in [-1, 1]."""

        def only(name: str, value: np.ndarray) -> np.ndarray:
            return np.where(operation == OPERATIONS.index(name), value, 0.0)

        angle = only("rotate", level * math.radians(30))
        shear_x, shear_y = only("shear_x", 0.3 * level), only("shear_y", 0.3 * level)
        shift_x, shift_y = only("shift_x", 0.08 * level), only("shift_y", 0.08 * level)
        return _affine(
            len(operation),
            [[np.cos(angle), shear_x - np.sin(angle), shift_x], [shear_y + np.sin(angle), np.cos(angle), shift_y]],
        )

    def apply(self, images: Tensor, draw: Draw) -> Tensor:
        """Apply the drawn choices to the images; pixels from outside an image are black."""
        images = to_float(images)
        grid = _grid(draw.theta.to(images.device, non_blocking=True), self.size)
        images = grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        for operations in draw.operations.T:
            for name in COLOR:
                rows = (operations == OPERATIONS.index(name)).nonzero().flatten()  # on the CPU, without a device sync
                if len(rows):
                    rows = rows.to(images.device)
                    images[rows] = _color(name, images[rows], self.magnitude / 10)
        return images


def to_float(images: Tensor) -> Tensor:
    """Convert uint8 images to floats in [0, 1]; return float images unchanged."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def normalize(images: Tensor, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    """Return (images - mean) / std per channel.

    Args:
        images: (b, 3, h, w), uint8, or float in [0, 1].
        mean: mean of each channel; CLIP's by default.
        std: standard deviation of each channel; CLIP's by default.

    Returns:
        A float tensor of the same shape.

    Example:
        >>> normalize(torch.full((1, 3, 2, 2), 0.5), mean=(0.5,) * 3, std=(0.1,) * 3).abs().max()
        tensor(0.)

    """
    shift, scale = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (mean, std))
    return (to_float(images) - shift) / scale


def _grid(theta: Tensor, size: int) -> Tensor:
    """Return the input position of each output pixel, (b, size, size, 2): a faster `affine_grid`."""
    middle = (torch.arange(size, device=theta.device) + 0.5) * (2 / size) - 1
    along_x, along_y, shift = theta[:, None, None, :, 0], theta[:, None, None, :, 1], theta[:, None, None, :, 2]
    return middle[:, None] * along_x + (middle[:, None, None] * along_y + shift)


def _affine(b: int, rows: list[list[Any]]) -> np.ndarray:
    """Return matrices (b, 3, 3) with the given first two rows, whose entries are numbers or arrays (b,)."""
    matrix = np.zeros((b, 3, 3))
    matrix[:, 2, 2] = 1
    for i, row in enumerate(rows):
        for j, entry in enumerate(row):
            matrix[:, i, j] = entry
    return matrix


def _color(name: str, images: Tensor, level: float) -> Tensor:
    from kornia import enhance  # takes a second to import, and only training needs it

    if name == "autocontrast":
        return enhance.normalize_min_max(images)
    if name == "equalise":
        return enhance.equalize(images)
    if name == "brightness":
        return enhance.adjust_brightness_accumulative(images, 0.1 + 1.8 * level)
    return enhance.sharpness(images, 0.1 + 1.8 * level)
