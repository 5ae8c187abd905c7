"""All schedules: everything that changes during a run, as functions of the position in it.

t counts epochs with fractions: in step k of an epoch of S steps, t = epoch + k / S.
"""

import math
from dataclasses import dataclass

import torch

from nuclr.errors import UserError
from nuclr.objectives import Objective
from nuclr.runs.settings import Schedule, Settings

LR_FACTOR = "lr_factor"  # key of a parameter group: its learning rate relative to that of the model


@dataclass
class Position:
    """Position in a run: `step` steps of `epoch` are done, `total` steps overall."""

    epoch: int = 0
    step: int = 0
    total: int = 0


def cosine(
    start: float,
    end: float,
    progress: float,
) -> float:
    """Return a value that falls along a cosine from `start` at progress 0 to `end` at progress 1 and stays there."""
    return end + (start - end) * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2


def learning_rate(
    step: int,
    steps: int,
    warmup: int,
    start: float,
    peak: float,
    end: float,
) -> float:
    """Return the learning rate in step 0, ..., steps - 1: linear from `start` to `peak`, then a cosine to `end`."""
    if step < warmup:
        return start + (peak - start) * step / warmup
    return cosine(peak, end, (step - warmup) / max(1, steps - warmup))


def learning_rate_per_epoch(
    epoch: int,
    step: int,
    epochs: int,
    warmup: int,
    start: float,
    peak: float,
    end: float,
) -> float:
    """Return the learning rate of an epoch: a cosine of the number of finished epochs.

    It is `peak` in the first epoch and never reaches `end`. In the first `warmup` steps of the first epoch it is linear
    from `start`.
    """
    if epoch == 0 and step < warmup:
        return start + (peak - start) * step / warmup
    return cosine(peak, end, epoch / epochs)


def step_size(
    t: float,
    plan: Schedule,
    peak: float,
) -> float:
    """Return a step size of the objective: 0 while it is frozen, then constant or a cosine to 0 at the end.

    Args:
        t: position in the run, in epochs.
        plan: the schedule. With `zeta_steps` the step size is divided by 10 after half, and by 100 after three quarters
            of the epochs. With `per_epoch` it changes from epoch to epoch only: the cosine is 0 in the last epoch, and
            half and three quarters are rounded down to whole epochs, as in the published code.
        peak: the largest step size.

    """
    length = float(plan.epochs - plan.frozen_epochs)
    half = 0.5 * plan.epochs
    three_quarters = 0.75 * plan.epochs
    if plan.per_epoch:
        t = math.floor(t)
        length -= 1
        half = plan.epochs // 2
        three_quarters = plan.epochs * 3 // 4
    if t < plan.frozen_epochs:
        return 0.0
    size = peak
    if plan.zeta == "cosine":
        size = cosine(peak, 0.0, (t - plan.frozen_epochs) / max(1.0, length))
    if plan.zeta_steps and t >= half:
        size /= 100 if t >= three_quarters else 10
    return size


def weight(
    t: float,
    plan: Schedule,
    value: float,
) -> float:
    """Return the weight of new values in running averages: constant, or a cosine from 1 down to `value`."""
    return cosine(1.0, value, t / plan.epochs) if plan.gamma == "cosine" else value


def set_schedules(
    settings: Settings,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    position: Position,
    steps: int,
) -> None:
    """Set the learning rate, and the attributes of the objective that have a schedule, for the next step."""
    plan = settings.schedule
    t = position.epoch + position.step / steps
    warmup = plan.warmup_steps, plan.lr_start, settings.optimizer.lr, plan.lr_end
    if plan.per_epoch:
        t = float(position.epoch)
        lr = learning_rate_per_epoch(position.epoch, position.step, plan.epochs, *warmup)
    else:
        lr = learning_rate(position.total, plan.epochs * steps, *warmup)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_FACTOR, 1.0)
    arguments = settings.objective.arguments()
    for name, kind in objective.scheduled.items():
        schedule = step_size if kind == "step size" else weight
        setattr(objective, name, schedule(t, plan, float(arguments[name])))


def refresh_due(
    settings: Settings,
    objective: Objective,
    epoch: int,
) -> bool:
    """Return whether popularity is to be solved for before this epoch."""
    every = settings.schedule.zeta_refresh
    past = epoch - max(1, settings.schedule.frozen_epochs)
    return bool(objective.table_sides) and every > 0 and past >= 0 and past % every == 0


def check_refresh(settings: Settings) -> None:
    """Refuse to solve for popularity exactly if no process has the whole table."""
    if settings.schedule.zeta_refresh > 0 and settings.objective.arguments().get("state", {}).get("sharding"):
        raise UserError(
            "schedule.zeta_refresh needs the whole table, but objective.state.sharding=true spreads its rows over the "
            "processes; set one of them to 0 or false"
        )


def evaluation_due(settings: Settings, epoch: int) -> bool:
    """Return whether the held-out pairs are evaluated after this epoch."""
    every = settings.evaluate.every
    return epoch + 1 == settings.schedule.epochs or (every > 0 and (epoch + 1) % every == 0)
