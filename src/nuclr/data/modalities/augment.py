"""Batched augmentation on tensors: random resized crop, flip, and a policy like RandAugment.

All that is random is drawn for the whole global batch from (seed, epoch, step), and each process takes its slice: K
processes of b augment as one of K b does, and a resumed run as one that never stopped.

The crop, the flip and the policy's shears, shifts and rotations are one affine map, so the image is sampled once. The
policy is that of ALBEF's code, on which the paper's rests: two operations an image, each of ten (identity,
autocontrast, equalise, brightness, sharpness, shear and shift along x and y, rotation) applied with probability 1/2.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the pixels that CLIP was trained on
STD = (0.26862954, 0.26130258, 0.27577711)

COLOR = ("autocontrast", "equalise", "brightness", "sharpness")
GEOMETRY = ("shear_x", "shear_y", "shift_x", "shift_y", "rotate")
OPERATIONS = ("identity", *COLOR, *GEOMETRY)


@dataclass(frozen=True)
class Draw:
    """What was drawn for b images.

    `theta` (b, 2, 3) maps places in the output to places in the input, both in [-1, 1]; `operations` (b, k) are
    numbers of OPERATIONS, 0 where none is applied.
    """

    theta: Tensor
    operations: Tensor

    def part(self, rank: int, world: int) -> "Draw":
        """The slice of one process."""
        local = len(self.theta) // world
        return Draw(*(getattr(self, field.name)[rank * local : (rank + 1) * local] for field in fields(self)))


@dataclass(frozen=True)
class Augment:
    """uint8 or float images (b, 3, h, w) -> float images (b, 3, size, size) in [0, 1], augmented.

    Args:
        size: height and width of the output.
        seed: of the run.
        scale: smallest and largest share of the image's area that a crop keeps; (1, 1) crops nothing.
        flip: probability of a mirror image.
        operations: of the policy, an image; 0 switches it off.
        magnitude: of the operations, from 0 to 10.

    """

    size: int
    seed: int = 0
    scale: tuple[float, float] = (0.5, 1.0)
    flip: float = 0.5
    operations: int = 2
    magnitude: float = 7.0

    def __call__(self, images: Tensor, epoch: int, step: int, rank: int = 0, world: int = 1) -> Tensor:
        """Augment this process's part of the global batch of `step`, which has the same size on every process."""
        return self.apply(images, self.draw(len(images) * world, epoch, step).part(rank, world))

    def draw(self, b: int, epoch: int, step: int) -> Draw:
        """Everything random, for a global batch of b."""
        random = np.random.default_rng([self.seed, epoch, step])
        share = random.uniform(*self.scale, b)
        stretch = np.exp(random.uniform(-1, 1, b) * math.log(4 / 3) / 2)  # square root of the crop's proportions
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
        """(b, 3, 3) of one geometric operation an image; the identity for the others. `level` is in [-1, 1]."""

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
        """The images after what was drawn; what comes from outside the image is black."""
        images = to_float(images)
        grid = _grid(draw.theta.to(images.device, non_blocking=True), self.size)
        images = grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        for operations in draw.operations.T:
            for name in COLOR:
                rows = (operations == OPERATIONS.index(name)).nonzero().flatten()  # on the host: no synchronisation
                if len(rows):
                    rows = rows.to(images.device)
                    images[rows] = _color(name, images[rows], self.magnitude / 10)
        return images


def to_float(images: Tensor) -> Tensor:
    """Pixels in [0, 1]."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def normalize(images: Tensor, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    """(images - mean) / std by channel, of images in uint8 or in [0, 1]."""
    shift, scale = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (mean, std))
    return (to_float(images) - shift) / scale


def _grid(theta: Tensor, size: int) -> Tensor:
    """Where each pixel of the output comes from, (b, size, size, 2): torch's `affine_grid`, but faster."""
    middle = (torch.arange(size, device=theta.device) + 0.5) * (2 / size) - 1
    along_x, along_y, shift = theta[:, None, None, :, 0], theta[:, None, None, :, 1], theta[:, None, None, :, 2]
    return middle[:, None] * along_x + (middle[:, None, None] * along_y + shift)


def _affine(b: int, rows: list[list[Any]]) -> np.ndarray:
    """(b, 3, 3) from the first two rows, whose entries are numbers or (b,)."""
    matrix = np.zeros((b, 3, 3))
    matrix[:, 2, 2] = 1
    for i, row in enumerate(rows):
        for j, entry in enumerate(row):
            matrix[:, i, j] = entry
    return matrix


def _color(name: str, images: Tensor, level: float) -> Tensor:
    from kornia import enhance  # a second to import, and only training needs it

    if name == "autocontrast":
        return enhance.normalize_min_max(images)
    if name == "equalise":
        return enhance.equalize(images)
    if name == "brightness":
        return enhance.adjust_brightness_accumulative(images, 0.1 + 1.8 * level)
    return enhance.sharpness(images, 0.1 + 1.8 * level)
