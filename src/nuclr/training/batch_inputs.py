"""The encoders' inputs in training: batches with random crops, augmentation, preparation for the towers."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr import distributed
from nuclr.data import Batch, Loader, get_modality
from nuclr.data.loader import SideCrops
from nuclr.data.modalities.augment import Augment, random_crops
from nuclr.data.pairs import SIDES, Pairs, Side
from nuclr.models import DualEncoder, ImageFormat
from nuclr.runs.components import to_device
from nuclr.runs.settings import Augmentation


class TrainingInputs:
    """Load batches and make the inputs of both encoders, with everything random drawn from (seed, epoch, step).

    With `views` = m, the first half of the m views of an image (rounded up) belongs to side x and the others to side y.
    A side with several views has the inputs of a pair next to each other: (b * views, ...).

    Args:
        augment: the settings of augmentation.
        views: number of views of each image; 0 if the pairs have two sides of their own.
        pairs: the training pairs.
        model: the dual encoder.
        seed: seed of the run.

    """

    def __init__(self, augment: Augmentation, views: int, pairs: Pairs, model: DualEncoder, seed: int) -> None:
        self._settings, self._seed, self._pairs, self._model = augment, seed, pairs, model
        self._kinds = {"x": pairs.x_kind, "y": pairs.y_kind}
        # If both sides hold images, their random numbers differ by the number of the view.
        on_x = (views + 1) // 2 if views else 1
        self._views: dict[Side, range] = {"x": range(on_x), "y": range(on_x, views or 2)}
        self._augment = Augment(seed, augment.flip, augment.operations, augment.magnitude)

    def load(self, loader: Loader, numbers: Iterable[np.ndarray], b: int, epoch: int, step: int) -> Iterator[Batch]:
        """Yield the batches of this process, of b pairs each, from step number `step` of an epoch."""
        return loader.load(numbers, crops=self._crops(b, epoch, step))

    def _crops(self, b: int, epoch: int, step: int) -> Iterator[SideCrops]:
        smallest = self._settings.smallest_crop
        sides = [side for side in SIDES if self._kinds[side] == "image" and smallest is not None]
        rank, world = distributed.rank(), distributed.world_size()
        while True:
            yield {
                side: [
                    random_crops(b, (smallest or 1.0, 1.0), self._seed, epoch, step, view, rank, world)
                    for view in self._views[side]
                ]
                for side in sides
            }
            step += 1

    def prepare(self, batch: Batch, epoch: int, step: int, device: torch.device) -> tuple[Any, Any]:
        """Return the inputs of both encoders for a loaded batch."""
        x, y = (self._prepare(side, to_device(getattr(batch, side), device), epoch, step, device) for side in SIDES)
        return x, y

    def _prepare(self, side: Side, items: Any, epoch: int, step: int, device: torch.device) -> Any:
        inputs, modality = getattr(self._model, side).inputs, get_modality(self._kinds[side])
        rank, world = distributed.rank(), distributed.world_size()
        if isinstance(inputs, ImageFormat):
            if self._settings.enabled:
                items = self._augment_images(side, items, epoch, step)
            return inputs.normalize(items)
        if self._settings.enabled:
            items = modality.augment(items, self._seed, epoch, step, rank, world)
        return items if inputs is None else to_device(inputs.prepare(items), device)

    def _augment_images(self, side: Side, images: Tensor, epoch: int, step: int) -> Tensor:
        """Return (b * views, 3, size, size) of images (b, 3, size, size) or of crops (b, views, 3, size, size)."""
        rank, world = distributed.rank(), distributed.world_size()
        if images.ndim == 4:  # no random crops: all views start from the same square
            images = images[:, None].expand(-1, len(self._views[side]), -1, -1, -1)
        views = [
            self._augment(images[:, k], epoch, step, view, rank, world) for k, view in enumerate(self._views[side])
        ]
        return views[0] if len(views) == 1 else torch.stack(views, dim=1).flatten(0, 1)
