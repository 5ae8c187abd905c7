"""All schedules: everything that changes during a run, as functions of the position in it.

t counts epochs with fractions: in step k of an epoch of S steps, t = epoch + k / S.
"""

import math
from dataclasses import dataclass

import torch

from nuclr.errors import UserError
from nuclr.objectives import Objective
from nuclr.runs.settings import Settings
from nuclr.training.optimizer import LR_FACTOR


@dataclass
class Position:
    """Position in a run: `step` steps of `epoch` are done, `total` steps overall."""

    epoch: int = 0
    step: int = 0
    total: int = 0


def cosine(start: float, end: float, progress: float) -> float:
    """Return a value that falls along a cosine from `start` at progress 0 to `end` at progress 1 and stays there."""
    return end + (start - end) * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2


def learning_rate(step: int, steps: int, warmup: int, start: float, peak: float, end: float) -> float:
    """Return the learning rate in step 0, ..., steps - 1: linear from `start` to `peak`, then a cosine to `end`."""
    if step < warmup:
        return start + (peak - start) * step / warmup
    return cosine(peak, end, (step - warmup) / max(1, steps - warmup))


def learning_rate_per_epoch(
    epoch: int, step: int, epochs: int, warmup: int, start: float, peak: float, end: float
) -> float:
    """Return the learning rate of an epoch: a cosine of the number of finished epochs.

    It is `peak` in the first epoch and never reaches `end`. In the first `warmup` steps of the first epoch it is linear
    from `start`.
    """
    if epoch == 0 and step < warmup:
        return start + (peak - start) * step / warmup
    return cosine(peak, end, epoch / epochs)


def zeta_rate(
    t: float, epochs: int, peak: float, frozen: int, shape: str, steps: bool, per_epoch: bool = False
) -> float:
    """Return the step size of zeta: 0 for `frozen` epochs, then constant or a cosine to 0 at the end.

    Args:
        t: position in the run, in epochs.
        epochs: number of epochs.
        peak: the largest step size.
        frozen: number of epochs without steps.
        shape: "constant" or "cosine".
        steps: divide by 10 after half, and by 100 after three quarters of the epochs, as the published code does.
        per_epoch: change from epoch to epoch only, also as the published code does: the cosine is 0 in the last epoch,
            and half and three quarters are rounded down to whole epochs.

    """
    length, half, three_quarters = float(epochs - frozen), 0.5 * epochs, 0.75 * epochs
    if per_epoch:
        t, length, half, three_quarters = math.floor(t), length - 1, epochs // 2, epochs * 3 // 4
    if t < frozen:
        return 0.0
    rate = cosine(peak, 0.0, (t - frozen) / max(1.0, length)) if shape == "cosine" else peak
    if steps:
        rate /= 100 if t >= three_quarters else 10 if t >= half else 1
    return rate


def gamma(t: float, epochs: int, value: float, shape: str) -> float:
    """Return the weight of the new batch in the running averages: constant, or a cosine from 1 down to `value`."""
    return cosine(1.0, value, t / epochs) if shape == "cosine" else value


def set_schedules(
    settings: Settings, optimizer: torch.optim.Optimizer, objective: Objective, position: Position, steps: int
) -> None:
    """Set the learning rate, and gamma and zeta's step size if the objective has them, for the next step."""
    plan, t = settings.schedule, position.epoch + position.step / steps
    warmup = plan.warmup_steps, plan.lr_start, settings.optimizer.lr, plan.lr_end
    if plan.per_epoch:
        t = float(position.epoch)
        lr = learning_rate_per_epoch(position.epoch, position.step, plan.epochs, *warmup)
    else:
        lr = learning_rate(position.total, plan.epochs * steps, *warmup)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_FACTOR, 1.0)
    peaks = settings.objective.arguments()
    if "gamma" in peaks:
        setattr(objective, "gamma", gamma(t, plan.epochs, float(peaks["gamma"]), plan.gamma))  # noqa: B010
    if "zeta_lr" in peaks:
        step_size = zeta_rate(
            t,
            plan.epochs,
            float(peaks["zeta_lr"]),
            plan.zeta_frozen_epochs,
            plan.zeta,
            plan.zeta_steps,
            plan.per_epoch,
        )
        setattr(objective, "zeta_lr", step_size)  # noqa: B010 (Module's annotations allow only tensors and modules)


def refresh_due(settings: Settings, objective: Objective, epoch: int) -> bool:
    """Return whether zeta is to be solved for before this epoch."""
    every = settings.schedule.zeta_refresh
    past = epoch - max(1, settings.schedule.zeta_frozen_epochs)
    has_table = hasattr(objective, "zeta_x") or hasattr(objective, "zeta_y")
    return has_table and every > 0 and past >= 0 and past % every == 0


def check_refresh(settings: Settings) -> None:
    """Refuse to solve for zeta exactly if no process has the whole table."""
    if settings.schedule.zeta_refresh > 0 and settings.objective.arguments().get("state_sharding"):
        raise UserError(
            "schedule.zeta_refresh solves for all rows of zeta, but objective.state_sharding=true spreads them over "
            "the processes; set one of them to 0 or false"
        )


def evaluation_due(settings: Settings, epoch: int) -> bool:
    """Return whether the held-out pairs are evaluated after this epoch."""
    every = settings.evaluate.every
    return epoch + 1 == settings.schedule.epochs or (every > 0 and (epoch + 1) % every == 0)
