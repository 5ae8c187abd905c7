"""Parts of a training step: random numbers, encoders and objective, the gradient norm, the refresh of popularity."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nuclr import distributed
from nuclr.data import Batch, Loader, ViewGroups
from nuclr.data.selection import Source
from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.objectives import ObjectiveOutput, backward_in_micro_batches
from nuclr.objectives.micro_batches import InputsError
from nuclr.popularity import solve
from nuclr.runs.features import Encoding, encode_pairs
from nuclr.runs.matryoshka import per_width
from nuclr.training.guards import not_finite

REFRESH_TOLERANCE = 1e-3  # of the residual when popularity is solved for during training


def seed_step(
    seed: int,
    total: int,
    rank: int,
    device: torch.device,
) -> None:
    """Seed torch's random numbers of this step (dropout), differently on each process."""
    number = int(np.random.SeedSequence([seed, total, rank]).generate_state(1, np.uint64)[0] >> 1)
    if device.type == "cpu":
        # torch.manual_seed would also record the seed for absent accelerators, each with a stack trace.
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def apply_objective(
    objective: nn.Module,
    x: Tensor,
    y: Tensor,
    batch: Batch,
    mask: bool,
) -> ObjectiveOutput:
    """Return the objective's output for a batch.

    Args:
        objective: the objective, or one per width.
        x: features of side x, (b, d), or (b * m, d) with the m views of a pair next to each other.
        y: the same for side y.
        batch: the pairs.
        mask: whether pairs that share an x, a y or a group are not negatives of each other.

    Returns:
        The objective's output; it moves the state of each pair once, whatever the number of views.

    """
    ids = {}
    if mask and batch.shared is not None:
        ids = {"x_id": batch.shared} if batch.shared.shape[1] else {}
    elif mask:
        x_id = batch.x_id if batch.group is None else torch.stack([batch.x_id, batch.group], dim=1)
        ids = {"x_id": x_id, "y_id": batch.y_id}
    x, y = (f if len(f) == len(batch) else f.unflatten(0, (len(batch), -1)) for f in (x, y))
    rows = batch.numbers if batch.row is None else batch.row  # of the objective's state
    return cast(ObjectiveOutput, objective(x, y, rows, **ids))


def refuse_not_finite(
    x: Tensor,
    y: Tensor,
    batch: Batch,
    run: Path,
) -> None:
    """Raise an error that names the samples of all processes whose features are not finite, if there are any."""
    finite = (features.unflatten(0, (len(batch), -1)).isfinite().flatten(1).all(dim=1) for features in (x, y))
    flags = distributed.all_gather((~torch.stack(list(finite)).all(dim=0)).to(torch.int64))
    if flags.any():
        raise not_finite("features are", batch.numbers, flags.cpu().bool(), run) from None


def clip_gradient(parameters: list[nn.Parameter], largest: float) -> Tensor:
    """Return the norm of the whole gradient and scale the gradient down to `largest`; 0 leaves it unchanged."""
    if largest > 0:
        return nn.utils.clip_grad_norm_(parameters, largest)
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def collapsed_loss(
    objective: nn.Module,
    b: int,
    width: int | None,
    device: torch.device,
) -> float:
    """Return the loss of a model whose features are all equal: the chance level shown next to the loss.

    It is not known (nan) if the objective has networks and the width of the features is not known.
    """
    waits_for_width = any(is_lazy(parameter) for parameter in objective.parameters())
    if b * distributed.world_size() < 2 or (waits_for_width and width is None):
        return math.nan
    same = torch.zeros(b, width or 2, device=device)
    same[:, 0] = 1
    objective.eval()
    with torch.no_grad():
        return float(objective(same, same).loss)


def refresh_popularity(
    objective: nn.Module,
    model: DualEncoder,
    source: Source,
    loader: Loader,
    encoding: Encoding,
    groups: ViewGroups | None = None,
) -> None:
    """Set the objective's popularity to the exact solution on the current features: the paper's problem in training.

    Args:
        objective: an objective with `table_sides`, or one per width.
        model: the dual encoder.
        source: the training pairs.
        loader: of these pairs.
        encoding: how to encode them.
        groups: the groups of pairs that have a row of state; by default each pair has one. Pairs that share a row get
            the mean of their values, unless each view has a value of its own.

    """
    features = encode_pairs(
        model,
        loader,
        source.numbers,
        encoding,
    )
    rows = source.numbers if groups is None else groups.row[source.numbers]
    item_of_pair = dict(zip("xy", features.pair_rows.unbind(1), strict=True))
    for own, x, y in per_width(objective, features.x, features.y):
        sides = {"x": x, "y": y}
        weights = {side: torch.bincount(item_of_pair[side], minlength=len(sides[side])).float() for side in sides}
        for side in own.table_sides:
            anchors = "y" if side == "x" else "x"
            result = solve(
                sides[anchors],
                sides[side],
                temperature=own.current_temperature,
                tolerance=REFRESH_TOLERANCE,
                x_weight=weights[anchors],
                y_weight=weights[side],
            )
            zeta = result.zeta[item_of_pair[side]]
            if groups is not None and own.get_buffer(f"zeta_{side}").ndim == 2:
                pairs_of_views = groups.stored()["y" if side == "y" else "x"].reshape(-1)
                rows_of_views = np.flatnonzero(pairs_of_views >= 0)
                places = np.searchsorted(source.numbers, pairs_of_views[rows_of_views])
                own.set_popularity(side, torch.from_numpy(rows_of_views), zeta[torch.from_numpy(places)])
            else:
                own.set_popularity(side, torch.from_numpy(rows), zeta)


# -- the encoders' forward and backward pass ---------------------------------------------------------------------------


def encode_and_backward(
    encode: Callable[..., tuple[Tensor, Tensor]],
    x: Any,
    y: Any,
    contrast: Callable[[Tensor, Tensor], ObjectiveOutput],
    pairs: int,
    micro_batch: int,
) -> ObjectiveOutput:
    """Add the gradients of one batch to those of all parameters.

    Args:
        encode: from the inputs of both sides to their features.
        x: inputs of side x, one or more rows per pair.
        y: the same for side y.
        contrast: from the features of the batch to the objective's output.
        pairs: number of pairs of this process.
        micro_batch: number of pairs to encode at once; 0 for all.

    Returns:
        The objective's output.

    """
    if micro_batch == 0:
        output = contrast(*encode(x, y))
        output.loss.backward()
        return output
    try:
        return backward_in_micro_batches(
            encode,
            (x, y),
            contrast,
            micro_batch,
            pairs=pairs,
        )
    except InputsError as error:
        raise UserError(f"data.micro_batch is {micro_batch}, but {error}; set data.micro_batch=0") from None
