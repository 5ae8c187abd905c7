"""The encoders' inputs in training: batches with random crops, augmentation, preparation for the towers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import tee
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr import distributed
from nuclr.data import Batch, Loader, ViewGroups, batches
from nuclr.data.epochs import shared_items
from nuclr.data.loader import SideCrops
from nuclr.data.modalities.augment import Augment, random_crops
from nuclr.data.pairs import SIDES, Pairs, SideName
from nuclr.models import DualEncoder, ImageFormat
from nuclr.runs.components import to_device
from nuclr.runs.settings import Augmentation


class TrainingInputs:
    """Load batches and make the inputs of both encoders, with everything random drawn from (seed, epoch, step).

    A side with m views has the inputs of a pair next to each other: (b * m, ...). Views of an image are random
    augmentations of it; views on other sides are items of several pairs that belong together.

    Args:
        augment: the settings of augmentation.
        views: number of views per side.
        pairs: the training pairs.
        model: the dual encoder.
        seed: seed of the run.
        groups: the groups of pairs that views come from; None if every visit is of one pair.

    """

    def __init__(
        self,
        augment: Augmentation,
        views: Mapping[SideName, int],
        pairs: Pairs,
        model: DualEncoder,
        seed: int,
        groups: ViewGroups | None = None,
    ) -> None:
        self._settings = augment
        self._seed = seed
        self._pairs = pairs
        self._model = model
        self._groups = groups
        self._rank = distributed.rank()
        self._world = distributed.world_size()
        self._modalities = {side: pairs.sides[side].modality for side in SIDES}
        # If both sides hold images, their random numbers differ by the number of the view.
        self._views: dict[SideName, range] = {"x": range(views["x"]), "y": range(views["x"], views["x"] + views["y"])}
        self._augment = Augment(
            seed,
            augment.flip,
            augment.operations,
            augment.magnitude,
            augment.fill,
        )

    def load(
        self,
        loader: Loader,
        order: np.ndarray,
        batch_size: int,
        epoch: int,
        step: int,
    ) -> Iterator[Batch]:
        """Yield the batches of this process from step number `step` of an epoch.

        Args:
            loader: of the training pairs.
            order: the pairs that the epoch visits, from `epoch_order`.
            batch_size: pairs per batch, over all processes.
            epoch: number of the epoch.
            step: number of the first step.

        """
        numbers = batches(
            order,
            batch_size,
            self._rank,
            self._world,
            step,
        )
        b = batch_size // self._world
        crops = self._crops(b, epoch, step)
        if self._groups is None:
            yield from loader.load(numbers, crops=crops)
            return
        drawn = self._groups.draw(self._seed, epoch)
        own = slice(self._rank * b, (self._rank + 1) * b)
        # Each process knows the views of the whole batch, and so which of its visits share an item with others.
        read_ahead, whole = tee(
            {side: drawn[side](visits) if side in drawn else visits[:, None] for side in SIDES}
            for visits in batches(order, batch_size, start=step)
        )
        views = ({side: visits[side][own] for side in drawn} for visits in read_ahead)
        for batch, visits in zip(
            loader.load(
                numbers,
                crops=crops,
                views=views,
            ),
            whole,
            strict=True,
        ):
            shared = shared_items(self._pairs.sides["x"].ids[visits["x"]], self._pairs.sides["y"].ids[visits["y"]])[own]
            row = self._groups.row[batch.numbers.numpy()]
            yield replace(
                batch,
                row=torch.from_numpy(row),
                shared=torch.from_numpy(shared),
            )

    def _crops(
        self,
        b: int,
        epoch: int,
        step: int,
    ) -> Iterator[SideCrops]:
        smallest = self._settings.smallest_crop
        sides = [side for side in SIDES if self._modalities[side].has_crops and smallest is not None]
        area = (smallest or 1.0, 1.0)
        while True:
            crops: dict[SideName, Any] = {}
            for side in sides:
                crops[side] = [
                    random_crops(b, area, self._seed, epoch, step, view, self._rank, self._world)
                    for view in self._views[side]
                ]
            yield crops
            step += 1

    def prepare(
        self,
        batch: Batch,
        epoch: int,
        step: int,
        device: torch.device,
    ) -> tuple[Any, Any]:
        """Return the inputs of both encoders for a loaded batch."""
        x = self._prepare(
            "x",
            to_device(batch.x, device),
            epoch,
            step,
            device,
        )
        y = self._prepare(
            "y",
            to_device(batch.y, device),
            epoch,
            step,
            device,
        )
        return x, y

    def _prepare(
        self,
        side: SideName,
        items: Any,
        epoch: int,
        step: int,
        device: torch.device,
    ) -> Any:
        inputs = getattr(self._model, side).inputs
        modality = self._modalities[side]
        if isinstance(inputs, ImageFormat):
            if self._settings.enabled:
                items = self._augment_images(
                    side,
                    items,
                    epoch,
                    step,
                )
            return inputs.normalize(items)
        if modality.has_crops and len(self._views[side]) > 1:
            items = self._spread(side, items).flatten(0, 1)  # for an encoder of a plugin, which takes pixels
        if self._settings.enabled:
            items = modality.augment(
                items,
                self._seed,
                epoch,
                step,
                self._rank,
                self._world,
            )
        return items if inputs is None else to_device(inputs.prepare(items), device)

    def _augment_images(
        self,
        side: SideName,
        images: Tensor,
        epoch: int,
        step: int,
    ) -> Tensor:
        """Return (b * views, 3, size, size) of images (b, 3, size, size) or of crops (b, views, 3, size, size)."""
        images = self._spread(side, images)
        views = [
            self._augment(images[:, k], epoch, step, view, self._rank, self._world)
            for k, view in enumerate(self._views[side])
        ]
        return views[0] if len(views) == 1 else torch.stack(views, dim=1).flatten(0, 1)

    def _spread(self, side: SideName, images: Tensor) -> Tensor:
        """Return (b, views, 3, size, size); without random crops all views start from the same square."""
        return images if images.ndim == 5 else images[:, None].expand(-1, len(self._views[side]), -1, -1, -1)
