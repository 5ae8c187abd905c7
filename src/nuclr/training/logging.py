"""What a run reports: metrics.jsonl and timing.jsonl, TensorBoard and W&B, the start banner, the progress."""

import dataclasses
import shutil
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nuclr import distributed, objectives
from nuclr.errors import printable, require
from nuclr.evaluation.metrics import set_prefixes
from nuclr.runs.settings import Log, Settings, flatten, to_dict
from nuclr.training.build import Parts
from nuclr.training.schedules import Position

SECTIONS = ("data", "encoders", "objective")


# -- lines of the logs -------------------------------------------------------------------------------------------------


class Window:
    """Running sums of the logged values since the last line, kept on the device until they are needed."""

    def __init__(self, sums: dict[str, Tensor] | None = None, count: int = 0) -> None:
        self.sums = dict(sums or {})
        self.count = count

    def add(self, values: dict[str, Tensor]) -> None:
        """Add the values of one step."""
        for name, value in values.items():
            value = value.detach().double() if value.device.type != "mps" else value.detach()
            self.sums[name] = self.sums[name].to(value.device) + value if name in self.sums else value
        self.count += 1

    def means(self) -> dict[str, float]:
        """Return the means over the steps since the last line."""
        return {name: float(total) / self.count for name, total in self.sums.items()}


class Clock:
    """Seconds that this process spent in each section since the last `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all sections to zero."""
        self.seconds = dict.fromkeys((*SECTIONS, "other"), 0.0)
        self.begin = self._last = time.perf_counter()

    def lap(self, section: str) -> None:
        """Add the time since the last lap to this section."""
        now = time.perf_counter()
        self.seconds[section] += now - self._last
        self._last = now

    def add(self, other: "Clock") -> None:
        """Add the seconds of another clock."""
        self.seconds = {key: self.seconds[key] + other.seconds[key] for key in self.seconds}

    def total(self) -> float:
        """Return the seconds in all sections."""
        return sum(self.seconds.values())

    def shares(self) -> dict[str, float]:
        """Return each section's share of the total time."""
        total = self.total() or 1.0
        return {name: seconds / total for name, seconds in self.seconds.items()}


def metrics_line(
    position: Position,
    steps: int,
    optimizer: torch.optim.Optimizer,
    objective: objectives.Objective,
    means: dict[str, float],
) -> dict[str, Any]:
    """Return a line of metrics.jsonl: means since the line before, and the scheduled values."""
    values: dict[str, Any] = {"step": position.total, "epoch": round(position.epoch + position.step / steps, 6)}
    values |= {f"train/{name}": value for name, value in means.items()}
    values["train/lr"] = optimizer.param_groups[0]["lr"]
    for name in objective.scheduled:
        values[f"train/{name}"] = getattr(objective, name)
    return values


def timing_line(
    position: Position,
    clock: Clock,
    samples: int,
) -> dict[str, Any]:
    """Return a line of timing.jsonl for the `samples` since the line before."""
    seconds = clock.total()
    rate = samples / max(seconds, 1e-9)
    return {"step": position.total, "seconds": seconds, "samples_per_second": rate, **clock.shares()}


# -- TensorBoard and W&B -----------------------------------------------------------------------------------------------


def check_installed(log: Log) -> None:
    """Refuse, before a run begins, loggers that cannot be imported."""
    for package in ("tensorboard", "wandb"):
        if getattr(log, package):
            require(package, "logging", f"log.{package}")


class Loggers:
    """Copy the lines of metrics.jsonl after `step` to TensorBoard and W&B; pending lines are sent when the block ends.

    A run that resumes from `step` logs the steps after it again, with the same values. TensorBoard drops the first
    copy; W&B keeps it, since it continues the same W&B run.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        step: int,
    ) -> None:
        self.board: Any = None
        self.wandb: Any = None
        if settings.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        if settings.log.wandb:
            import wandb

            path = folder / "wandb_id"
            if not (path.is_file() and path.read_text()):  # empty if the run was killed while writing it
                path.write_text(uuid.uuid4().hex[:16])
            self.wandb = wandb.init(
                project="nuclr",
                name=settings.name,
                id=path.read_text(),
                resume="allow",
                dir=str(folder),
                config=to_dict(settings),
            )

    def write(self, values: dict[str, Any]) -> None:
        """Log one line."""
        numbers = {key: value for key, value in values.items() if "/" in key}
        if self.board is not None:
            for key, value in numbers.items():
                self.board.add_scalar(key, value, values["step"])
        if self.wandb is not None:
            self.wandb.log(numbers, step=values["step"])

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *_: object) -> None:
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


# -- what a person sees ------------------------------------------------------------------------------------------------


def banner(
    settings: Settings,
    parts: Parts,
    steps: int,
    device: torch.device,
) -> str:
    """Return what is about to be trained: data, encoders, objective, plan, device and output folder.

    Args:
        settings: resolved settings.
        parts: of the run.
        steps: steps per epoch.
        device: where it is trained.

    """
    data = settings.data
    source = parts.source
    held_out = [f"{len(own.numbers):,} pairs of {key}" for key, own in parts.validation.sources.items()]
    rows = {
        "training data": f"{len(source.numbers):,} pairs of {data.train} ({len(source.bad):,} bad samples left out)",
        "held-out data": "; ".join(held_out) or "none (set data.val, or data.classes, to evaluate during training)",
    }
    for name, side in source.pairs.sides.items():
        options = dataclasses.asdict(getattr(settings.model, name)) | {"views": getattr(data, name).views}
        chosen = {key: value for key, value in options.items() if value not in (None, False)}
        rows[f"side {name}"] = f"{side.name}: {side.modality.name}s, {_list(chosen)}"
    parameters = sum(p.numel() for p in parts.model.parameters())
    trained = sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    objective = objectives.entry(settings.objective.name)
    options = {
        key: value
        for key, value in flatten(settings.objective.arguments())
        if key == "temperature" or value != objective.flat_options[key]
    }
    rows |= {
        "model": f"{parameters:,} parameters, {trained:,} trained; common space of width {parts.model.width}"
        f"{'; one encoder for both sides' if parts.model.shared else ''}"
        f"{f'; Matryoshka {settings.model.matryoshka}' if settings.model.matryoshka else ''}",
        "objective": f"{objective.label}: {_list(options)}",
        "plan": f"{settings.schedule.epochs} epochs of {steps:,} steps, batch size {data.batch_size}, "
        f"learning rate {settings.optimizer.lr:g}, {settings.precision}",
        "device": f"{device}, processes: {distributed.world_size()}, threads: {torch.get_num_threads()}",
        "output": str(settings.out),
    }
    return "\n".join([f"{settings.name}:", *(f"  {name:14} {value}" for name, value in rows.items())])


def _list(options: Mapping[str, Any]) -> str:
    shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in options.items()}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def short_metrics(metrics: dict[str, float]) -> str:
    """Return the metrics of an evaluation in one line for the terminal."""
    parts = []
    for prefix in set_prefixes(metrics):
        recalls = ", ".join(f"@{k} {100 * metrics[f'{prefix}mean_R@{k}']:.1f}" for k in (1, 5, 10))
        name = f"{prefix.rstrip('/')} " if prefix else ""
        parts.append(f"{name}recall {recalls} % (chance @1 {100 * metrics[f'{prefix}mean_chance@1']:.2f})")
    for key, label in (("zero_shot", "zero-shot"), ("knn", "nearest neighbors")):
        if f"{key}_acc1" in metrics:
            parts.append(f"{label} {metrics[f'{key}_acc1']:.1%} (chance {metrics[f'{key}_chance']:.1%})")
    return "  ".join(parts)


class Progress:
    """Lines on stderr, of which a terminal shows only the last one; silent on all but the first process."""

    def __init__(
        self,
        name: str,
        steps: int,
        done: int,
        chance: float,
        batch: int,
    ) -> None:
        self.name = name
        self.steps = steps
        self.chance = chance
        self.batch = batch
        self.done = self.begin_step = done
        self.begin = time.perf_counter()

    def say(self, text: str, stays: bool = True) -> None:
        """Print a line; on a terminal, one that does not stay is replaced by the next one."""
        if distributed.rank() != 0:
            return
        text = printable(text)  # it may name files
        end = "\n"
        if sys.stderr.isatty():
            if not stays:
                text = text[: shutil.get_terminal_size().columns - 1]  # the terminal would wrap a longer one
                end = "\r"
            text = f"\x1b[2K{text}"  # erases what the line showed before
        print(text, end=end, file=sys.stderr, flush=True)  # noqa: T201

    def close(self) -> None:
        """Erase a line that does not stay."""
        if sys.stderr.isatty():
            self.say("", stays=False)

    def step(self, done: int) -> None:
        """Set the number of steps done."""
        self.done = done

    def report(
        self,
        epoch: int,
        loss: float,
        clock: Clock,
    ) -> None:
        """Show loss, chance level, speed, shares of time and time left of the last steps."""
        rate = (self.done - self.begin_step) * self.batch / max(1e-9, time.perf_counter() - self.begin)
        shares = ", ".join(f"{name} {clock.shares()[name]:.0%}" for name in SECTIONS)
        left = (self.steps - self.done) * self.batch / max(rate, 1e-9)
        self.say(
            f"{self.name}: step {self.done}/{self.steps}, epoch {epoch + 1}  {duration(left)} left, loss {loss:.4f} "
            f"(chance {self.chance:.4f})  {rate:,.0f} samples/s  {shares}",
            stays=False,
        )


def duration(seconds: float) -> str:
    """Return seconds as minutes and seconds, with hours in front if there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
