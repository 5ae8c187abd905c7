"""What stops a run, and why: values that are not finite, checkpoints that do not fit, data that changed."""

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from nuclr import distributed, files
from nuclr.data.selection import Source
from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.runs import folder
from nuclr.runs.checkpoint import Checkpoint, check_state, check_tensor


class TrainingFailed(RuntimeError):  # noqa: N818 (the name says that the run failed, not the program)
    """The run cannot continue, for a reason that its settings could not show beforehand."""


# -- values that are not finite ----------------------------------------------------------------------------------------


def not_finite(
    what: str,
    numbers: Tensor,
    flags: Tensor | None,
    run: Path,
) -> TrainingFailed:
    """Return the error for a NaN or an infinity; the numbers of all samples concerned are written to a file."""
    everyone = distributed.all_gather(numbers)
    samples = (everyone if flags is None else everyone[flags]).tolist()
    if distributed.rank() == 0:
        files.write_json(run / "not_finite.json", {"what": what, "samples": samples})
    shown = ", ".join(map(str, samples[:8]))
    more = f" and {len(samples) - 8} more, see not_finite.json" if len(samples) > 8 else ""
    return TrainingFailed(
        f"{what} not finite in the batch with the samples {shown}{more}.\n"
        f"The last good checkpoint is in {run / folder.CHECKPOINTS}; a lower optimizer.lr or optimizer.clip=1 may help."
    )


# -- checkpoints -------------------------------------------------------------------------------------------------------


def check_fits(
    saved: Checkpoint,
    model: DualEncoder,
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: dict[str, dict[str, str]],
    epochs: int,
    steps: int,
) -> None:
    """Raise any exception if a run cannot continue from a checkpoint; nothing is loaded.

    Other data is a UserError, because the checkpoint before it would not fit either.

    Args:
        saved: the checkpoint, which is not trusted.
        model: of the run.
        objective: of the run.
        optimizer: of the run, an AdamW.
        data: its `data_identity`.
        epochs: of the run.
        steps: per epoch.

    """
    for key, before in saved.data.items():
        if before != data[key]:
            same_pairs = before["pairs"] == data[key]["pairs"]
            what = "other bad samples, or another data.keep," if same_pairs else "other pairs"
            raise UserError(
                f"{key} has {what} than when the run began (see its {folder.BAD}); restore the data, or start another "
                "run with out=..."
            )
    epoch, step, total = (saved.position[key] for key in ("epoch", "step", "total"))
    if epoch >= epochs or step > steps or total != epoch * steps + step:
        raise ValueError(f"step {step} of epoch {epoch} is not a position of this run")
    check_state(saved.model, model.state_dict())
    copy.deepcopy(objective).load_state_dict(saved.objective)
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    for number, moments in saved.optimizer["state"].items():
        shape = parameters[number]
        check_state(moments, {"step": torch.zeros(()), "exp_avg": shape, "exp_avg_sq": shape})
    for name, value in saved.window["sums"].items():
        check_tensor(name, value)
        float(value)  # raises if it is not one real number
    if not 0 <= saved.window["count"] <= total:
        raise ValueError("the window has another number of steps than the run")


# -- data that changed -------------------------------------------------------------------------------------------------
#
# The order of an epoch depends on which pairs are in use. If a file became unreadable, or was repaired, while a run was
# stopped, the order would change in the middle of it, and a sample could be seen twice in an epoch or not at all.


def data_identity(train: Source, held_out: Mapping[str, Source]) -> dict[str, dict[str, str]]:
    """Return hashes of the pairs and of the numbers in use, for the checkpoint; `held_out` by their settings."""
    sources = {"data.train": train, **held_out}
    return {
        key: {"pairs": source.pairs.fingerprint, "numbers": hashlib.sha256(source.numbers.tobytes()).hexdigest()}
        for key, source in sources.items()
    }
