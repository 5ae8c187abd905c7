"""What one step is made of: a seed, the encoders' inputs, the objective, the gradient's norm."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.data.loader import Batch
from nuclr.data.modalities.augment import Augment
from nuclr.models import DualEncoder
from nuclr.objectives import Objective
from nuclr.runs import components as parts
from nuclr.training.guards import not_finite


def seed_step(seed: int, total: int, rank: int, device: torch.device) -> None:
    """Seed what torch draws in this step (dropout), with another number on each process."""
    number = int(np.random.SeedSequence([seed, total, rank]).generate_state(1, np.uint64)[0] >> 1)
    if device.type == "cpu":
        # torch.manual_seed also notes the seed for accelerators that are not there, each with a stack trace.
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def inputs(
    model: DualEncoder, augment: Augment | None, batch: Batch, epoch: int, step: int, device: torch.device
) -> tuple[Any, Any]:
    """What the two encoders take, from a batch as it was loaded."""
    x = batch.x.to(device, non_blocking=True)
    if model.images is not None:
        if augment is not None:
            x = augment(x, epoch, step, distributed.rank(), distributed.world_size())
        x = model.images.normalize(x)
    y = batch.y if isinstance(batch.y, Tensor) else model.prepare_texts(batch.y)
    return x, parts.to_device(y, device)


def contrast(objective: Objective, fx: Tensor, fy: Tensor, batch: Batch, mask: bool, run: Path) -> Any:
    """The objective on this batch; features that are not finite end the run with the samples' numbers."""
    ids = {"x_id": batch.x_id, "y_id": batch.y_id} if mask else {}
    try:
        return objective(fx, fy, batch.numbers, **ids)
    except ValueError:
        bad = ~(fx.isfinite().all(dim=1) & fy.isfinite().all(dim=1))
        flags = distributed.all_gather(bad.to(torch.int64))
        if not flags.any():
            raise
        raise not_finite("features are", batch.numbers, flags.cpu().bool(), run) from None


def clip(parameters: list[nn.Parameter], largest: float) -> Tensor:
    """Norm of the whole gradient, which is scaled down to `largest`; 0: no limit, and the gradient is left alone."""
    if largest > 0:
        return nn.utils.clip_grad_norm_(parameters, largest)
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def collapsed_loss(objective: Objective, b: int, device: torch.device) -> float:
    """The loss of a model that tells no pair from another: the chance level beside which the loss is shown."""
    if b * distributed.world_size() < 2:
        return math.nan
    same = torch.zeros(b, 2, device=device)
    same[:, 0] = 1
    objective.eval()
    with torch.no_grad():
        return float(objective(same, same).loss)
