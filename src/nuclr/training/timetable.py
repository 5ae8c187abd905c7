"""Where a run is, and what is due there: the schedules' values, zeta's refresh, evaluation."""

import inspect
from dataclasses import dataclass

import torch

from nuclr.objectives import NUCLR, Objective
from nuclr.objectives.stateful import StatefulObjective
from nuclr.runs.settings import Settings
from nuclr.training import schedules


@dataclass
class Position:
    """Where the run is: `step` steps of `epoch` are done, `total` in all."""

    epoch: int = 0
    step: int = 0
    total: int = 0


def set_schedules(
    settings: Settings, optimizer: torch.optim.Optimizer, objective: Objective, position: Position, steps: int
) -> None:
    """Put what the schedules say for this step where it is used."""
    plan, t = settings.schedule, position.epoch + position.step / steps
    lr = schedules.learning_rate(
        position.total, plan.epochs * steps, plan.warmup_steps, plan.lr_start, settings.optimizer.lr, plan.lr_end
    )
    for group in optimizer.param_groups:
        group["lr"] = lr
    if isinstance(objective, StatefulObjective):
        objective.gamma = schedules.gamma(t, plan.epochs, _peak(settings, objective, "gamma"), plan.gamma)
    if isinstance(objective, NUCLR):
        objective.zeta_lr = schedules.zeta_rate(
            t, plan.epochs, _peak(settings, objective, "zeta_lr"), plan.zeta_frozen_epochs, plan.zeta, plan.zeta_steps
        )


def _peak(settings: Settings, objective: Objective, name: str) -> float:
    """What was set, or the objective's default: its attribute changes with time."""
    return float(settings.objective.arguments()[name])


def refresh_due(settings: Settings, objective: Objective, epoch: int) -> bool:
    """Whether zeta is to be solved for before this epoch."""
    every = settings.schedule.zeta_refresh
    past = epoch - max(1, settings.schedule.zeta_frozen_epochs)
    return isinstance(objective, NUCLR) and every > 0 and past >= 0 and past % every == 0


def evaluation_due(settings: Settings, epoch: int) -> bool:
    """Whether the held-out pairs are looked at after this epoch."""
    every = settings.evaluate.every
    return epoch + 1 == settings.schedule.epochs or (every > 0 and (epoch + 1) % every == 0)
