"""What a run tells of itself: means over the steps since the last line, and the lines themselves."""

from typing import Any

import torch
from torch import Tensor

from nuclr.objectives import Objective
from nuclr.training.progress import Clock
from nuclr.training.timetable import Position


class Window:
    """Running sums of what is logged, left on the device until they are."""

    def __init__(self, sums: dict[str, Tensor] | None = None, count: int = 0) -> None:
        self.sums, self.count = dict(sums or {}), count

    def add(self, values: dict[str, Tensor]) -> None:
        """Add one step's."""
        for name, value in values.items():
            value = value.detach().double() if value.device.type != "mps" else value.detach()
            self.sums[name] = self.sums[name].to(value.device) + value if name in self.sums else value
        self.count += 1

    def means(self) -> dict[str, float]:
        """Means over the steps since the last line."""
        return {name: float(total) / self.count for name, total in self.sums.items()}


def line(
    position: Position,
    steps: int,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    means: dict[str, float],
) -> dict[str, Any]:
    """A line of metrics.jsonl: the means since the line before, and what the schedules say."""
    values: dict[str, Any] = {"step": position.total, "epoch": round(position.epoch + position.step / steps, 6)}
    values |= {f"train/{name}": value for name, value in means.items()}
    values["train/lr"] = optimizer.param_groups[0]["lr"]
    for name in ("gamma", "zeta_lr"):
        if hasattr(objective, name):
            values[f"train/{name}"] = getattr(objective, name)
    return values


def timing(position: Position, clock: Clock, samples: int) -> dict[str, Any]:
    """A line of timing.jsonl, for the `samples` since the line before."""
    seconds = clock.total()
    rate = samples / max(seconds, 1e-9)
    return {"step": position.total, "seconds": seconds, "samples_per_second": rate, **clock.shares()}


def short(found: dict[str, float]) -> str:
    """An evaluation, for the terminal."""
    told = []
    if "mean_R@1" in found:
        recalls = ", ".join(f"@{k} {100 * found[f'mean_R@{k}']:.1f}" for k in (1, 5, 10))
        told.append(f"recall {recalls} % (chance @1 {100 * found['mean_chance@1']:.2f})")
    if "zero_shot_acc1" in found:
        told.append(f"zero-shot {100 * found['zero_shot_acc1']:.1f} % (chance {100 * found['zero_shot_chance']:.1f})")
    return "  ".join(told)
