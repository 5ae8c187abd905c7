"""Random augmentation of images: resized crops of the decoded image, then flips and a policy like RandAugment.

All random numbers are drawn for the whole global batch from (seed, epoch, step, view), and each process takes its
slice. K processes with b images each therefore augment exactly as one process with K b images, and a resumed run
augments exactly as an uninterrupted one.

Crops are chosen as in torchvision's RandomResizedCrop, which published recipes use, and are taken by the loader from
the decoded image, whatever its size and proportions. Flips and the policy then apply to batches of crops. The policy is
that of ALBEF's code, which the paper's code uses: two operations per image, each one of ten (identity, autocontrast,
equalise, brightness, sharpness, shear and shift along x and y, rotation), applied with probability 1/2. An image's
shears, shifts and rotations are combined into one affine map, so it is resampled once.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from nuclr.arrays import to_device

COLOR = ("autocontrast", "equalise", "brightness", "sharpness")
GEOMETRY = ("shear_x", "shear_y", "shift_x", "shift_y", "rotate")
OPERATIONS = ("identity", *COLOR, *GEOMETRY)

_TRIES = 10  # crops of random proportions that are tried before the central one is taken
_NARROWEST, _WIDEST = 3 / 4, 4 / 3  # proportions (width / height) of crops

Box = tuple[int, int, int, int]  # left, top, right, bottom


@dataclass(frozen=True)
class Crops:
    """The random choices of b resized crops, for images whose sizes are not known yet.

    Attributes:
        share: (b, tries), shares of the image's area.
        ratio: (b, tries), proportions, width / height.
        position: (b, 2), in [0, 1): where the crop lies between left and right, and between top and bottom.

    """

    share: np.ndarray
    ratio: np.ndarray
    position: np.ndarray

    def __getitem__(self, rows: slice) -> "Crops":
        return Crops(self.share[rows], self.ratio[rows], self.position[rows])

    def box(
        self,
        row: int,
        width: int,
        height: int,
    ) -> Box:
        """Return crop `row` of an image of this size: the first of its tries that fits, else the largest central crop.

        Example:
            >>> random_crops(1, (0.2, 0.4), seed=0, epoch=0, step=0).box(0, width=100, height=80)
            (7, 19, 69, 69)

        """
        area = width * height
        for share, ratio in zip(self.share[row].tolist(), self.ratio[row].tolist(), strict=True):
            w, h = round(math.sqrt(share * area * ratio)), round(math.sqrt(share * area / ratio))
            if 0 < w <= width and 0 < h <= height:
                across, down = self.position[row].tolist()
                left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
                return left, top, left + w, top + h
        w, h = min(width, round(height * _WIDEST)), min(height, round(width / _NARROWEST))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


def random_crops(
    b: int,
    scale: tuple[float, float],
    seed: int,
    epoch: int,
    step: int,
    view: int = 0,
    rank: int = 0,
    world: int = 1,
) -> Crops:
    """Draw the crops of this process's part of a global batch.

    Args:
        b: number of images of this process, the same on every process.
        scale: smallest and largest share of an image's area that a crop keeps.
        seed: seed of the run.
        epoch: number of the epoch.
        step: number of the step within the epoch.
        view: number of the view, if a batch has several of each image.
        rank: number of this process.
        world: number of processes.

    """
    random = np.random.default_rng([seed, epoch, step, view, 0])
    share = random.uniform(*scale, size=(b * world, _TRIES))
    ratio = np.exp(random.uniform(math.log(_NARROWEST), math.log(_WIDEST), size=share.shape))
    return Crops(share, ratio, random.random((b * world, 2)))[rank * b : (rank + 1) * b]


def covering_side(size: int, smallest_share: float) -> int:
    """Return the shorter side of an image whose crops all have at least `size` pixels in width and height."""
    return math.ceil(size / math.sqrt(smallest_share * _NARROWEST))


@dataclass(frozen=True)
class Draw:
    """The random choices for b images after the crop.

    Attributes:
        flip: (b,), whether an image is mirrored.
        theta: (b, 2, 3), maps positions in the output to positions in the input, both in [-1, 1].
        operations: (b, k), positions in OPERATIONS; 0 is the identity.

    """

    flip: Tensor
    theta: Tensor
    operations: Tensor


@dataclass(frozen=True)
class Augment:
    """Flip images (b, 3, h, w) at random and apply a random policy to them.

    Args:
        seed: seed of the run.
        flip: probability of a horizontal flip.
        operations: number of policy operations per image; 0 switches the policy off.
        magnitude: strength of the operations, from 0 to 10.
        fill: brightness of the pixels from outside an image, from 0 (black) to 1.

    Example:
        >>> augment = Augment(operations=0)
        >>> augment(torch.zeros(4, 3, 20, 20, dtype=torch.uint8), epoch=0, step=0).shape
        torch.Size([4, 3, 20, 20])

    """

    seed: int = 0
    flip: float = 0.5
    operations: int = 2
    magnitude: float = 7.0
    fill: float = 0.0

    def __call__(
        self,
        images: Tensor,
        epoch: int,
        step: int,
        view: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> Tensor:
        """Augment this process's part of a global batch.

        Args:
            images: (b, 3, h, w), uint8, or float in [0, 1], with the same b on every process.
            epoch: number of the epoch.
            step: number of the step within the epoch.
            view: number of the view, if a batch has several of each image.
            rank: number of this process.
            world: number of processes.

        Returns:
            (b, 3, h, w), float32 in [0, 1].

        """
        return self.apply(images, self.draw(len(images), epoch, step, view, rank, world))

    def draw(
        self,
        b: int,
        epoch: int,
        step: int,
        view: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> Draw:
        """Draw the random choices for the global batch, and return those for the b images of this process."""
        random = np.random.default_rng([self.seed, epoch, step, view, 1])
        flip = random.random(b * world) < self.flip
        operations = random.integers(len(OPERATIONS), size=(b * world, self.operations))
        operations *= random.integers(2, size=operations.shape)
        signs = random.choice([-1.0, 1.0], size=operations.shape)
        theta = _affine(b * world, [[1, 0, 0], [0, 1, 0]])
        for operation, sign in zip(operations.T, signs.T, strict=True):
            theta = theta @ self._geometry(operation, sign * self.magnitude / 10)
        own = slice(rank * b, (rank + 1) * b)
        return Draw(
            flip=torch.from_numpy(flip[own]),
            theta=torch.from_numpy(theta[own, :2]).float(),
            operations=torch.from_numpy(operations[own]),
        )

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
        """Apply the drawn choices to the images."""
        flip = to_device(draw.flip, images.device)[:, None, None, None]
        images = torch.where(flip, images.flip(-1), images)
        images = images.float() / 255 if images.dtype == torch.uint8 else images
        # The choices are drawn on the CPU, so that selecting rows needs no device sync.
        moved = (draw.theta != torch.eye(2, 3)).flatten(1).any(dim=1).nonzero().flatten()
        if len(moved):
            rows, theta = to_device(moved, images.device), to_device(draw.theta[moved], images.device)
            grid = _grid(theta, *images.shape[2:])
            above_fill = images[rows] - self.fill  # grid_sample takes zeros from outside an image
            images[rows] = self.fill + grid_sample(
                above_fill,
                grid,
                mode="bilinear",
                padding_mode="zeros",
                align_corners=False,
            )
        for operations in draw.operations.T:
            for name in COLOR:
                rows = (operations == OPERATIONS.index(name)).nonzero().flatten()
                if len(rows):
                    rows = to_device(rows, images.device)
                    images[rows] = _color(name, images[rows], self.magnitude / 10)
        return images


def _grid(
    theta: Tensor,
    height: int,
    width: int,
) -> Tensor:
    """Return the input position of each output pixel, (b, height, width, 2): a faster `affine_grid`."""
    across, down = ((torch.arange(n, device=theta.device) + 0.5) * (2 / n) - 1 for n in (width, height))
    along_x, along_y, shift = theta[:, None, None, :, 0], theta[:, None, None, :, 1], theta[:, None, None, :, 2]
    return across[:, None] * along_x + (down[:, None, None] * along_y + shift)


def _affine(b: int, rows: list[list[Any]]) -> np.ndarray:
    """Return matrices (b, 3, 3) with the given first two rows, whose entries are numbers or arrays (b,)."""
    matrix = np.zeros((b, 3, 3))
    matrix[:, 2, 2] = 1
    for i, row in enumerate(rows):
        for j, entry in enumerate(row):
            matrix[:, i, j] = entry
    return matrix


def _color(
    name: str,
    images: Tensor,
    level: float,
) -> Tensor:
    from kornia import enhance  # takes a second to import, and only training needs it

    if name == "autocontrast":
        return enhance.normalize_min_max(images)
    if name == "equalise":
        return enhance.equalize(images)
    if name == "brightness":
        return (images * (0.1 + 1.8 * level)).clamp(0, 1)
    return enhance.sharpness(images, 0.1 + 1.8 * level)
