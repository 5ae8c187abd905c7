"""One training step: its random numbers, the encoders' inputs, the objective, the gradient norm, and zeta's refresh."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.data import Batch, Loader, Modality, get_modality
from nuclr.data.modalities.augment import Augment
from nuclr.data.pairs import Pairs
from nuclr.models import DualEncoder, ImageFormat
from nuclr.objectives import Objective, ObjectiveOutput
from nuclr.popularity import solve
from nuclr.runs.components import SIDES, Source, to_device
from nuclr.runs.features import Encoding, encode_pairs
from nuclr.runs.settings import Augmentation
from nuclr.training.guards import not_finite

REFRESH_TOLERANCE = 1e-3  # of the residual when zeta is solved for during training


def seed_step(seed: int, total: int, rank: int, device: torch.device) -> None:
    """Seed torch's random numbers of this step (dropout), differently on each process."""
    number = int(np.random.SeedSequence([seed, total, rank]).generate_state(1, np.uint64)[0] >> 1)
    if device.type == "cpu":
        # torch.manual_seed would also record the seed for absent accelerators, each with a stack trace.
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


Augments = dict[str, Callable[..., Any] | None]  # per side: (batch, epoch, step, rank, world) -> batch


def make_augments(augment: Augmentation, pairs: Pairs, model: DualEncoder, seed: int) -> Augments:
    """Return the random variation of each side in training; None for sides that are used as they are."""
    made: Augments = {}
    for side in SIDES:
        encoder, modality = getattr(model, side), get_modality(getattr(pairs, f"{side}_kind"))
        made[side] = None
        if augment.enabled and isinstance(encoder.inputs, ImageFormat):
            scale = (augment.crop, 1.0)
            made[side] = Augment(encoder.inputs.size, seed, scale, augment.flip, augment.operations, augment.magnitude)
        elif augment.enabled and type(modality).augment is not Modality.augment:
            made[side] = functools.partial(_augment_modality, modality, seed)
    return made


def _augment_modality(
    modality: Modality, seed: int, batch: Any, epoch: int, step: int, rank: int = 0, world: int = 1
) -> Any:
    return modality.augment(batch, seed, epoch, step, rank, world)


def prepare_inputs(
    model: DualEncoder, augments: Augments, batch: Batch, epoch: int, step: int, device: torch.device
) -> tuple[Any, Any]:
    """Return the inputs of both encoders for a loaded batch."""
    prepared = []
    for side in SIDES:
        inputs, augment = getattr(model, side).inputs, augments[side]
        items = to_device(getattr(batch, side), device)
        if augment is not None:
            items = augment(items, epoch, step, distributed.rank(), distributed.world_size())
        if isinstance(inputs, ImageFormat):
            items = inputs.normalize(items)
        elif inputs is not None:
            items = to_device(inputs.prepare(items), device)
        prepared.append(items)
    return prepared[0], prepared[1]


def apply_objective(objective: Objective, x: Tensor, y: Tensor, batch: Batch, mask: bool, run: Path) -> ObjectiveOutput:
    """Return the objective's output; features that are not finite stop the run and name the samples."""
    ids = {}
    if mask:
        x_id = batch.x_id if batch.group is None else torch.stack([batch.x_id, batch.group], dim=1)
        ids = {"x_id": x_id, "y_id": batch.y_id}
    try:
        output: ObjectiveOutput = objective(x, y, batch.numbers, **ids)
        return output
    except ValueError:
        bad = ~(x.isfinite().flatten(1).all(dim=1) & y.isfinite().flatten(1).all(dim=1))
        flags = distributed.all_gather(bad.to(torch.int64))
        if not flags.any():
            raise
        raise not_finite("features are", batch.numbers, flags.cpu().bool(), run) from None


def clip_gradient(parameters: list[nn.Parameter], largest: float) -> Tensor:
    """Return the norm of the whole gradient and scale the gradient down to `largest`; 0 leaves it unchanged."""
    if largest > 0:
        return nn.utils.clip_grad_norm_(parameters, largest)
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def collapsed_loss(objective: Objective, b: int, device: torch.device) -> float:
    """Return the loss of a model whose features are all equal: the chance level shown next to the loss."""
    if b * distributed.world_size() < 2:
        return math.nan
    same = torch.zeros(b, 2, device=device)
    same[:, 0] = 1
    objective.eval()
    with torch.no_grad():
        return float(objective(same, same).loss)


def refresh_zeta(objective: Objective, model: DualEncoder, source: Source, loader: Loader, encoding: Encoding) -> None:
    """Set zeta of both sides to the exact solution on the current features: the paper's subproblem during training.

    The mean of each table, which the problem does not determine, is kept.
    """
    features = encode_pairs(model, loader, source.numbers, encoding)
    x_row, y_row = features.pair_rows.unbind(1)
    weights = {
        "x": torch.bincount(x_row, minlength=len(features.x)).float(),
        "y": torch.bincount(y_row, minlength=len(features.y)).float(),
    }
    numbers = torch.from_numpy(source.numbers)
    for side, anchors, candidates, row in (
        ("y", "x", (features.x, features.y), y_row),
        ("x", "y", (features.y, features.x), x_row),
    ):
        zeta = solve(
            *candidates,
            temperature=objective.temperature,
            tolerance=REFRESH_TOLERANCE,
            x_weight=weights[anchors],
            y_weight=weights[side],
        ).zeta
        _write_zeta(objective, side, numbers, zeta[row])


def _write_zeta(objective: Objective, side: str, numbers: Tensor, zeta: Tensor) -> None:
    table, xi = objective.get_buffer(f"zeta_{side}"), objective.get_buffer(f"xi_{side}")
    rows = numbers.to(table.device)
    new = (zeta - zeta.mean()).to(table) + table[rows].mean()
    table[rows] = new
    reached = (new.abs() if objective.xi_rule == "norm" else new).max()
    torch.maximum(xi, reached.to(xi), out=xi)
