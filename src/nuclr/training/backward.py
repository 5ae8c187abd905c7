"""The encoders' forward and backward pass of a training step: on the whole batch, or exactly in micro-batches."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nuclr import distributed
from nuclr.data.pairs import SIDES
from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.objectives import ObjectiveOutput, backward_in_micro_batches
from nuclr.objectives.micro_batches import InputsError, batch_norm_in
from nuclr.runs.settings import Settings


def check_micro_batch(settings: Settings, model: DualEncoder) -> None:
    """Refuse `data.micro_batch` if an encoder has batch norm that is not frozen."""
    micro_batch, own = settings.data.micro_batch, settings.data.batch_size // distributed.world_size()
    if not 0 < micro_batch < own:
        return
    model.train()  # pretrained encoders are loaded in eval mode; frozen ones stay in it
    for side in SIDES:
        name = batch_norm_in(getattr(model, side))
        if name is None:
            continue
        key = "model.pretrained" if settings.model.pretrained else f"model.{side}.encoder"
        raise UserError(
            f"data.micro_batch is {micro_batch}, but {key} has batch norm ({name}), whose statistics would depend on "
            f"the micro-batch; set model.{side}.frozen=true or data.micro_batch=0, or use an encoder without batch norm"
        )


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
        return backward_in_micro_batches(encode, (x, y), contrast, micro_batch, pairs=pairs)
    except InputsError as error:  # of a modality or encoder that a plugin registers
        raise UserError(f"data.micro_batch is {micro_batch}, but {error}; set data.micro_batch=0") from None
