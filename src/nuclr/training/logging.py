"""What a run reports: metrics.jsonl and timing.jsonl, TensorBoard and W&B, the start banner, the progress bar."""

import importlib
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr import distributed, objectives
from nuclr.data.pairs import SIDES, Pairs
from nuclr.errors import UserError, install_command, printable
from nuclr.evaluation.metric_names import set_prefixes
from nuclr.models import DualEncoder, ImageFormat, Tokenizer, modality_of
from nuclr.objectives import Objective
from nuclr.runs.components import Source
from nuclr.runs.settings import Data, Log, Settings, to_dict
from nuclr.training.schedules import Position

SECTIONS = ("data", "encoders", "objective")
TABLES = ("zeta_x", "zeta_y", "tau_x", "tau_y")
QUANTILES = (5, 25, 50, 75, 95)


# -- lines of the logs -------------------------------------------------------------------------------------------------


class Window:
    """Running sums of the logged values since the last line, kept on the device until they are needed."""

    def __init__(self, sums: dict[str, Tensor] | None = None, count: int = 0) -> None:
        self.sums, self.count = dict(sums or {}), count

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
    position: Position, steps: int, optimizer: torch.optim.Optimizer, objective: Objective, means: dict[str, float]
) -> dict[str, Any]:
    """Return a line of metrics.jsonl: means since the line before, and the scheduled values."""
    values: dict[str, Any] = {"step": position.total, "epoch": round(position.epoch + position.step / steps, 6)}
    values |= {f"train/{name}": value for name, value in means.items()}
    values["train/lr"] = optimizer.param_groups[0]["lr"]
    for name in ("gamma", "zeta_lr"):
        if hasattr(objective, name):
            values[f"train/{name}"] = getattr(objective, name)
    return values


def timing_line(position: Position, clock: Clock, samples: int) -> dict[str, Any]:
    """Return a line of timing.jsonl for the `samples` since the line before."""
    seconds = clock.total()
    rate = samples / max(seconds, 1e-9)
    return {"step": position.total, "seconds": seconds, "samples_per_second": rate, **clock.shares()}


def state_quantiles(objective: Objective, rows: np.ndarray) -> dict[str, float]:
    """Return quantiles of zeta and of individual temperatures over the rows in use: `state/zeta_y_q05`, ...

    Of sharded tables, these are the rows of this process. It waits for the device, so it is called once per epoch.
    """
    quantiles: dict[str, float] = {}
    buffers = dict(objective.named_buffers())
    for name in (name for name in TABLES if name in buffers):
        table = buffers[name]
        held = torch.from_numpy(rows[rows < len(table)]).to(table.device)  # process 0 holds the first rows
        ordered = table[held].sort().values
        positions = [round(q / 100 * (len(ordered) - 1)) for q in QUANTILES]
        quantiles |= {f"state/{name}_q{q:02d}": float(ordered[k]) for q, k in zip(QUANTILES, positions, strict=True)}
    return quantiles


# -- TensorBoard and W&B -----------------------------------------------------------------------------------------------


def check_installed(log: Log) -> None:
    """Refuse, before a run begins, loggers that cannot be imported."""
    for package, enabled in (("tensorboard", log.tensorboard), ("wandb", log.wandb)):
        if not enabled:
            continue
        try:
            importlib.import_module("torch.utils.tensorboard" if package == "tensorboard" else package)
        except ImportError as error:
            reason = "is not installed" if (error.name or package) == package else f"cannot be imported ({error})"
            fix = f"{install_command('logging')}; or set log.{package}=false"
            raise UserError(f"log.{package}: {package} {reason}; {fix}") from None


class Loggers:
    """Copy the lines of metrics.jsonl after `step` to TensorBoard and W&B; pending lines are sent when the block ends.

    A run that resumes from `step` logs the steps after it again, with the same values. TensorBoard drops the first
    copy; W&B keeps it, since it continues the same W&B run.
    """

    def __init__(self, settings: Settings, folder: Path, step: int) -> None:
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
    train: Source,
    held_out: Mapping[str, Source],
    model: DualEncoder,
    steps: int,
    visits: int,
    device: torch.device,
) -> str:
    """Return what is about to be trained: data, encoders, objective, plan, device and output folder.

    Args:
        settings: resolved settings.
        train: the training pairs.
        held_out: the sets of held-out pairs by their settings.
        model: the dual encoder.
        steps: steps per epoch.
        visits: pairs, or groups of pairs, in an epoch.
        device: where it is trained.

    """
    data, plan, pairs = settings.data, settings.schedule, train.pairs
    bad = f", {len(train.bad):,} bad samples left out" if train.bad else ""
    if data.contrasts_views:
        size = f"{len(train.numbers):,} images, {data.x.views} + {data.y.views} views each"
        evaluated = "none; data.classes evaluates by nearest neighbors" if data.classes is None else "none"
    else:
        size = f"{len(train.numbers):,} pairs, {pairs.x_name} to {pairs.y_name}"
        paths = [chosen.path for chosen in data.val_sets.values()]
        sizes = [f"{len(own.numbers):,} pairs of {path}" for own, path in zip(held_out.values(), paths, strict=True)]
        evaluated = "; ".join(sizes) or "none (set data.val to evaluate during training)"
    options = [
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in settings.objective.arguments().items()
        if key in ("temperature", "gamma", "zeta_lr", "rho", "learn_temperature")
    ]
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    processes = distributed.world_size()
    micro = f" in micro-batches of {data.micro_batch}" if data.micro_batch else ""
    rows = {
        "training data": f"{size}, of {data.train}{bad}",
        "held-out data": evaluated,
        **_describe_sides(settings, pairs, model),
        **_describe_views(data, pairs, visits),
        "model": f"{parameters:,} parameters, {trained:,} trained; common space of width {model.width}",
        "objective": f"{objectives.entry(settings.objective.name).label}: {', '.join(options)}",
        "plan": f"{plan.epochs} epoch{'s' if plan.epochs > 1 else ''} of {steps:,} steps, "
        f"batch size {data.batch_size}{micro}, learning rate {settings.optimizer.lr:g}, {settings.precision}",
        "device": f"{device}, {processes} process{'es' if processes > 1 else ''}, {torch.get_num_threads()} threads",
        "output": str(settings.out),
    }
    return "\n".join([f"{settings.name}:", *(f"  {name:14} {value}" for name, value in rows.items())])


def _describe_views(data: Data, pairs: Pairs, visits: int) -> dict[str, str]:
    """Return a row with the views of a visit, if a side has several that are not views of the same image."""
    views = [f"{getattr(data, side).views} of {getattr(pairs, f'{side}_name')}" for side in SIDES]
    if data.contrasts_views or data.x.views == data.y.views == 1:
        return {}
    return {"views": f"{' and '.join(views)} per visit; {visits:,} visits per epoch"}


def _describe_sides(settings: Settings, pairs: Pairs, model: DualEncoder) -> dict[str, str]:
    """Return a row per side with its items and its encoder; one row if both sides are views of the same images."""
    y = "the encoder of side x" if model.shared else _describe_encoder("y", settings, model)
    rows = {"x": _describe_encoder("x", settings, model), "y": y}
    if pairs.views:
        return {"views": f"{pairs.x_kind}s, {rows['x']}" + ("" if model.shared else f"; side y: {rows['y']}")}
    described = {}
    for side, encoder in rows.items():
        name, kind, key = (getattr(pairs, f"{side}_{what}") for what in ("name", "kind", "key"))
        column = f" in {key}" if key and key != name else ""
        described[f"side {side}"] = (
            f"{name}: {kind}s{column}, {encoder}" if name != kind else f"{kind}s{column}, {encoder}"
        )
    return described


def _describe_encoder(side: str, settings: Settings, model: DualEncoder) -> str:
    options, encoder = getattr(settings.model, side), getattr(model, side)
    if settings.model.pretrained is not None:
        details = [f"pretrained {settings.model.pretrained}"]
    elif options.encoder == "vectors":
        details = ["as they are"]
    else:
        random = modality_of(options.encoder) is not None
        details = [f"{options.encoder}, {'random initialization' if random else 'pretrained'}"]
    if isinstance(encoder.inputs, ImageFormat):
        details.append(f"{encoder.inputs.size} x {encoder.inputs.size} pixels")
    if isinstance(encoder.inputs, Tokenizer):
        details.append(f"up to {encoder.inputs.max_length} tokens")
    if settings.model.pretrained is None:
        details.append(f"{options.head} head" if options.head != "none" else "no head")
    if options.frozen:
        details.append("frozen")
    return ", ".join(details)


def short_metrics(metrics: dict[str, float]) -> str:
    """Return the metrics of an evaluation in one line for the terminal."""
    parts = []
    for prefix in set_prefixes(metrics):
        recalls = ", ".join(f"@{k} {100 * metrics[f'{prefix}mean_R@{k}']:.1f}" for k in (1, 5, 10))
        name = f"{prefix.rstrip('/')} " if prefix else ""
        parts.append(f"{name}recall {recalls} % (chance @1 {100 * metrics[f'{prefix}mean_chance@1']:.2f})")
    if "zero_shot_acc1" in metrics:
        accuracy, chance = 100 * metrics["zero_shot_acc1"], 100 * metrics["zero_shot_chance"]
        parts.append(f"zero-shot {accuracy:.1f} % (chance {chance:.1f})")
    if "knn_acc1" in metrics:
        accuracy, chance = 100 * metrics["knn_acc1"], 100 * metrics["knn_chance"]
        parts.append(f"nearest neighbors {accuracy:.1f} % (chance {chance:.1f})")
    return "  ".join(parts)


class Progress:
    """A bar on a terminal, a line now and then elsewhere, on stderr; silent on all but the first process."""

    def __init__(self, name: str, steps: int, done: int, chance: float, batch: int) -> None:
        self.name, self.steps, self.chance, self.batch = name, steps, chance, batch
        self.done = self.begin_step = done
        self.begin = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Show the bar for the length of the block."""
        if distributed.rank() == 0 and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[status]}"))
            with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as self._bar:
                self._task = self._bar.add_task(self.name, total=self.steps, completed=self.done, status="")
                yield self
            self._bar = None
            return
        yield self

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if distributed.rank() != 0:
            return
        text = printable(text)  # it may name files
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def step(self, done: int) -> None:
        """Set the number of steps done."""
        self.done = done
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def report(self, epoch: int, loss: float, clock: Clock) -> None:
        """Show loss, chance level, speed, shares of time and time left of the last steps."""
        if distributed.rank() != 0:
            return
        rate = (self.done - self.begin_step) * self.batch / max(1e-9, time.perf_counter() - self.begin)
        shares = ", ".join(f"{name} {clock.shares()[name]:.0%}" for name in SECTIONS)
        text = f"loss {loss:.4f} (chance {self.chance:.4f})  {rate:,.0f} samples/s  {shares}"
        if self._bar is not None:
            self._bar.update(self._task, status=text)
            return
        left = (self.steps - self.done) * self.batch / max(rate, 1e-9)
        self.say(f"{self.name}: step {self.done}/{self.steps}, epoch {epoch + 1}  {text}, {_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
