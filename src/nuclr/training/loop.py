"""A run from its first to its last line.

Everything random follows from (seed, epoch, step): the order of the samples, augmentation, dropout. So a run that is
killed at any moment and resumed from its last checkpoint does the same steps again, and ends with the same weights,
state and metrics as one that was never stopped. Position (epoch, k) means: k steps of this epoch are done; where k is
all of them, the epoch's evaluation is still to come.
"""

import dataclasses
import inspect
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nuclr
from nuclr import distributed
from nuclr.data import batches, epoch_order, steps_per_epoch, write_bad_samples
from nuclr.data.loader import Batch
from nuclr.data.transforms import Augment
from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.objectives import NUCLR, Objective
from nuclr.objectives.stateful import StatefulObjective
from nuclr.training import checkpoint, folder, parts, schedules
from nuclr.training.features import autocast
from nuclr.training.launch import on_first, pick_device, processes
from nuclr.training.loggers import Loggers
from nuclr.training.optimiser import make_optimiser
from nuclr.training.progress import Clock, Progress
from nuclr.training.refresh import refresh_zeta
from nuclr.training.settings import Settings, to_dict
from nuclr.training.signals import Interrupted, Signals
from nuclr.training.validate import PROTOCOL, Validation


class TrainingFailed(RuntimeError):  # noqa: N818 (the run failed; it says why)
    """The run cannot go on, through no fault in its settings that could have been seen before."""


@dataclass
class Position:
    """Where the run is: `step` steps of `epoch` are done, `total` in all."""

    epoch: int = 0
    step: int = 0
    total: int = 0


def train(settings: Settings, out: Path, resume: bool = False, loaders: parts.Loaders | None = None) -> dict[str, Any]:
    """Train, and return what results.json holds; `loaders` are shared by several runs on the same pairs."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = pick_device(settings.device)
    with Signals() as signals, processes(device):
        run = folder.RunFolder(out)
        try:
            return _train(settings, run, resume, device, signals, loaders)
        except OSError as error:
            where = error.filename or out
            raise TrainingFailed(f"{where}: {error.strerror or error}; the checkpoints so far are in {out}") from error
        finally:
            run.close()


def _train(
    settings: Settings,
    run: folder.RunFolder,
    resume: bool,
    device: torch.device,
    signals: Signals,
    loaders: parts.Loaders | None,
) -> dict[str, Any]:
    rank, world, first = distributed.rank(), distributed.world_size(), distributed.rank() == 0
    batch_size, epochs, seed = settings.data.batch_size, settings.schedule.epochs, settings.seed
    begin = time.perf_counter()

    # -- data, model, objective, optimiser -----------------------------------------------------------------------------
    train_source, validation, model = build(settings, device, loaders)
    pairs = train_source.pairs
    objective = parts.make_objective(settings.objective, len(pairs)).to(device)
    loader = parts.make_loader(settings.data, pairs, model, loaders)
    augment = parts.make_augment(settings.augment, model, seed)
    o = settings.optimiser
    optimiser = make_optimiser(model, objective, o.lr, o.weight_decay, (o.beta1, o.beta2), o.eps)
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    encoders = DistributedDataParallel(model) if world > 1 else model  # the objective gathers by itself, outside

    def order_of(epoch: int) -> np.ndarray:
        return epoch_order(pairs, seed, epoch, settings.data.one_caption_per_image, train_source.numbers)

    samples = len(order_of(0))
    steps = steps_per_epoch(order_of(0), batch_size)
    next(batches(order_of(0), batch_size, rank, world))  # refuses a batch that cannot be shared
    chance = collapsed_loss(objective, batch_size // world, device)

    # -- the folder, and where an earlier run stopped ------------------------------------------------------------------
    resumed = on_first(lambda: run.open(to_dict(settings), resume))
    progress = Progress(settings.name, epochs * steps, 0, chance, batch_size)
    position, window, best, metrics_bytes = Position(), Window(), -math.inf, 0
    found = checkpoint.load_last(run.checkpoints, progress.say) if run.checkpoints.is_dir() else None
    if found is not None:
        _check_data(found, pairs.fingerprint, run.folder)
        model.load_state_dict(found["model"])
        objective.load_state_dict(found["objective"])
        optimiser.load_state_dict(found["optimiser"])
        position = Position(**found["position"])
        window = Window(found["window"]["sums"], found["window"]["count"])
        best, metrics_bytes = found["best"], found["metrics_bytes"]
        progress.say(f"{settings.name}: going on from step {position.total} of {epochs * steps}")
    elif resumed or resume:
        progress.say(f"{settings.name}: no checkpoint in {run.folder} yet; starting from the beginning")
    progress.done = progress.begin_step = position.total
    if first:
        run.start_logs(metrics_bytes)
        write_bad_samples(run.folder / folder.BAD, pairs, train_source.bad)
        if train_source.bad:
            progress.say(f"{settings.name}: {len(train_source.bad)} bad samples are left out, see {folder.BAD}")
    loggers = Loggers(settings, run.folder) if first else None
    finite = FiniteCheck(run.folder)

    def save() -> None:
        finite.flush()
        if not first:
            return
        content = {
            "version": nuclr.__version__,
            "position": dataclasses.asdict(position),
            "model": model.state_dict(),
            "objective": objective.state_dict(),
            "optimiser": optimiser.state_dict(),
            "window": {"sums": window.sums, "count": window.count},
            "best": best,
            "metrics_bytes": run.metrics_bytes(),
            "fingerprint": pairs.fingerprint,
        }
        checkpoint.save_step(run.checkpoints, position.total, content)

    def log(values: dict[str, Any]) -> None:
        if first:
            run.log(folder.METRICS, values)
            cast(Loggers, loggers).write(values)

    # -- epochs --------------------------------------------------------------------------------------------------------
    clock, spent = Clock(), Clock()
    last: dict[str, float] = {}
    with progress.shown():
        while position.epoch < epochs:
            epoch = position.epoch
            if position.step == 0 and _refresh_due(settings, objective, epoch):
                refresh_zeta(
                    cast(NUCLR, objective), model, train_source, loader, settings.evaluate.batch_size, device,
                    settings.precision,
                )  # fmt: skip
            model.train()
            objective.train()
            numbers = batches(order_of(epoch), batch_size, rank, world, position.step)
            with signals.steps():
                clock.lap("other")
                for batch in loader.load(numbers):
                    clock.lap("data")
                    seed_step(seed, position.total, rank, device)
                    set_schedules(settings, optimiser, objective, position, steps)
                    x, y = inputs(model, augment, batch, epoch, position.step, device)
                    with autocast(device, settings.precision):
                        fx, fy = encoders(x, y)
                    clock.lap("encoders")
                    out = contrast(objective, fx, fy, batch, settings.data.mask, run.folder)
                    clock.lap("objective")
                    for parameter in parameters:
                        parameter.grad = None
                    out.loss.backward()
                    norm = clip(parameters, o.clip)
                    finite.check(torch.isfinite(norm + out.loss.detach()), batch.numbers)
                    optimiser.step()
                    clock.lap("encoders")

                    position.step, position.total = position.step + 1, position.total + 1
                    window.add({"loss": out.loss, "grad_norm": norm, **out.metrics})
                    progress.step(position.total)
                    if position.total % settings.log.every == 0:
                        values = window.means()
                        log(_line(position, steps, optimiser, objective, values))
                        if first:
                            run.log(folder.TIMING, _timing(position, clock, batch_size * settings.log.every))
                        progress.told(epoch, values["loss"], clock)
                        spent.seconds = {key: spent.seconds[key] + clock.seconds[key] for key in clock.seconds}
                        window = Window()
                        clock.reset()
                    clock.lap("objective")  # state and logging
                    stop = signals.wanted()
                    if stop or (position.total % settings.checkpoint_every == 0 and position.step < steps):
                        save()
                        clock.lap("other")
                    if stop:
                        raise Interrupted(stop, f"stopped at step {position.total} of {epochs * steps}")
                if position.step == steps:
                    save()

            # -- held-out pairs
            if _evaluation_due(settings, epoch):
                last = validation(model, device, settings.precision)
                if last:
                    log({"step": position.total, "epoch": epoch + 1, **{f"val/{k}": v for k, v in last.items()}})
                    progress.say(f"{settings.name}: epoch {epoch + 1}/{epochs}  {_short(last)}")
                score = last.get("mean_R@1", last.get("zero_shot_acc1", -math.inf))
                if first and score > best:
                    checkpoint.mark_best(run.checkpoints, position.total)
                best = max(best, score)
            position = Position(epoch + 1, 0, position.total)

    # -- the end -------------------------------------------------------------------------------------------------------
    spent.seconds = {key: spent.seconds[key] + clock.seconds[key] for key in clock.seconds}
    results = {
        "name": settings.name,
        "objective": settings.objective.name,
        "temperature": objective.temperature,
        "steps": position.total,
        "epochs": epochs,
        "batch_size": batch_size,
        "processes": world,
        "pairs": len(pairs),
        "samples_per_epoch": samples,
        "left_over_per_epoch": samples - steps * batch_size,
        "bad_samples": len(train_source.bad),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "val": last,
        "best_mean_R@1": best if math.isfinite(best) else None,
        "protocol": PROTOCOL,
        "timing": {
            "seconds": time.perf_counter() - begin,
            "samples_per_second": (position.total - progress.begin_step) * batch_size / max(spent.total(), 1e-9),
            **{f"share_{k}": v for k, v in spent.shares().items()},
        },
    }

    def finish() -> None:
        model.save_pretrained(run.folder / folder.MODEL)
        run.finish(results)
        cast(Loggers, loggers).close()

    on_first(finish)
    return results


def build(
    settings: Settings, device: torch.device, loaders: parts.Loaders | None = None
) -> tuple[parts.Source, Validation, DualEncoder]:
    """Data and model, checked against each other."""
    data = settings.data
    source = parts.open_source(data, cast(str, data.train), data.split, data.keep)
    held_out = None if data.val is None else parts.open_source(data, data.val, data.val_split or data.split)
    if held_out is not None:
        for side in ("x", "y"):
            kinds = [getattr(pairs, f"{side}_kind") for pairs in (source.pairs, held_out.pairs)]
            if kinds[0] != kinds[1]:
                raise UserError(f"data.val holds {kinds[1]}s on side {side}, but data.train {kinds[0]}s")
            widths = [len(np.asarray(getattr(pairs, side)(0))) for pairs in (source.pairs, held_out.pairs)
                      if kinds[0] == "vector"]  # fmt: skip
            if len(set(widths)) > 1:
                raise UserError(f"data.val has {side} of width {widths[1]}, but data.train of {widths[0]}")
    classes = parts.open_classes(data, source.pairs)
    model = parts.make_model(settings.model, source, settings.seed).to(device)
    if classes is not None and (model.images is None or model.tokeniser is None):
        raise UserError("data.classes needs images and texts, but this model takes vectors; leave it out")
    val_loader = parts.make_loader(data, held_out.pairs, model, loaders) if held_out else None
    class_loader = parts.make_loader(data, classes, model, loaders) if classes is not None else None
    return source, Validation(held_out, val_loader, classes, class_loader, settings.evaluate.batch_size), model


def inputs(
    model: DualEncoder, augment: Augment | None, batch: Batch, epoch: int, step: int, device: torch.device
) -> tuple[Any, Any]:
    """What the two encoders take, from a batch as it was loaded."""
    x = batch.x.to(device, non_blocking=True)
    if model.images is not None:
        if augment is not None:
            x = augment(x, epoch, step, distributed.rank(), distributed.world_size())
        x = model.images.normalise(x)
    y = batch.y if isinstance(batch.y, Tensor) else model.prepare_texts(batch.y)
    return x, parts.to_device(y, device)


def contrast(objective: Objective, fx: Tensor, fy: Tensor, batch: Batch, mask: bool, run: Path) -> Any:
    """The objective on this batch; features that are not finite end the run with the samples' numbers."""
    ids = {"x_id": batch.x_id, "y_id": batch.y_id} if mask else {}
    try:
        return objective(fx, fy, batch.numbers, **ids)
    except ValueError:
        bad = ~(fx.isfinite().all(dim=1) & fy.isfinite().all(dim=1))
        flags = distributed.all_gather(bad.to(torch.int64))
        if not flags.any():
            raise
        raise not_finite("features are", batch.numbers, flags.cpu().bool(), run) from None


def clip(parameters: list[nn.Parameter], largest: float) -> Tensor:
    """Norm of the whole gradient, which is scaled down to `largest`; 0: no limit, and the gradient is left alone."""
    if largest > 0:
        return nn.utils.clip_grad_norm_(parameters, largest)
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


class FiniteCheck:
    """Ends the run at the first gradient that is not finite: at once on a CPU, elsewhere one step later.

    An accelerator so never waits for the host; no checkpoint is written before the check of its last step.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._pending: tuple[Tensor, Tensor] | None = None

    def check(self, finite: Tensor, numbers: Tensor) -> None:
        """The flag of this step, and the numbers of its samples."""
        self.flush()
        self._pending = (finite, numbers)
        if finite.device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Look at the last step's flag."""
        pending, self._pending = self._pending, None
        if pending is not None and not bool(pending[0]):
            raise not_finite("the gradient is", pending[1], None, self.run)


def not_finite(what: str, numbers: Tensor, flags: Tensor | None, run: Path) -> TrainingFailed:
    """The error for a NaN or an infinity; the numbers of all samples concerned go to a file."""
    everyone = distributed.all_gather(numbers)
    found = (everyone if flags is None else everyone[flags]).tolist()
    if distributed.rank() == 0:
        (run / "not_finite.json").write_text(json.dumps({"what": what, "samples": found}) + "\n", encoding="utf-8")
    shown = ", ".join(map(str, found[:8])) + (
        f" and {len(found) - 8} more, see not_finite.json" if len(found) > 8 else ""
    )
    return TrainingFailed(
        f"{what} not finite in the batch with the samples {shown}.\n"
        f"The last good checkpoint is in {run / folder.CHECKPOINTS}; a lower optimiser.lr or optimiser.clip=1 may help."
    )


def set_schedules(
    settings: Settings, optimiser: torch.optim.Optimizer, objective: Objective, position: Position, steps: int
) -> None:
    """Put what the schedules say for this step where it is used."""
    plan, t = settings.schedule, position.epoch + position.step / steps
    lr = schedules.learning_rate(
        position.total, plan.epochs * steps, plan.warmup_steps, plan.lr_start, settings.optimiser.lr, plan.lr_end
    )
    for group in optimiser.param_groups:
        group["lr"] = lr
    if isinstance(objective, StatefulObjective):
        objective.gamma = schedules.gamma(t, plan.epochs, _peak(settings, objective, "gamma"), plan.gamma)
    if isinstance(objective, NUCLR):
        objective.zeta_lr = schedules.zeta_rate(
            t, plan.epochs, _peak(settings, objective, "zeta_lr"), plan.zeta_frozen_epochs, plan.zeta, plan.zeta_steps
        )


def _peak(settings: Settings, objective: Objective, name: str) -> float:
    """What was set, or the objective's default: its attribute changes with time."""
    given = getattr(settings.objective, name)
    return float(inspect.signature(type(objective)).parameters[name].default if given is None else given)


def seed_step(seed: int, total: int, rank: int, device: torch.device) -> None:
    """Seed what torch draws in this step (dropout), with another number on each process."""
    number = int(np.random.SeedSequence([seed, total, rank]).generate_state(1, np.uint64)[0] >> 1)
    if device.type == "cpu":
        # torch.manual_seed also notes the seed for accelerators that are not there, each with a stack trace.
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def collapsed_loss(objective: Objective, b: int, device: torch.device) -> float:
    """The loss of a model that tells no pair from another: the chance level beside which the loss is shown."""
    if b * distributed.world_size() < 2:
        return math.nan
    same = torch.zeros(b, 2, device=device)
    same[:, 0] = 1
    objective.eval()
    with torch.no_grad():
        return float(objective(same, same).loss)


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


def _check_data(found: dict[str, Any], fingerprint: str, run: Path) -> None:
    if found["fingerprint"] != fingerprint:
        raise UserError(
            f"the data is not that of the run in {run}: its pairs have changed, so their numbers may mean others; "
            "restore them, or begin another run with out=..."
        )


def _refresh_due(settings: Settings, objective: Objective, epoch: int) -> bool:
    every = settings.schedule.zeta_refresh
    past = epoch - max(1, settings.schedule.zeta_frozen_epochs)
    return isinstance(objective, NUCLR) and every > 0 and past >= 0 and past % every == 0


def _evaluation_due(settings: Settings, epoch: int) -> bool:
    every = settings.evaluate.every
    return epoch + 1 == settings.schedule.epochs or (every > 0 and (epoch + 1) % every == 0)


def _line(
    position: Position,
    steps: int,
    optimiser: torch.optim.Optimizer,
    objective: Objective,
    means: dict[str, float],
) -> dict[str, Any]:
    line: dict[str, Any] = {"step": position.total, "epoch": round(position.epoch + position.step / steps, 6)}
    line |= {f"train/{name}": value for name, value in means.items()}
    line["train/lr"] = optimiser.param_groups[0]["lr"]
    for name in ("gamma", "zeta_lr"):
        if hasattr(objective, name):
            line[f"train/{name}"] = getattr(objective, name)
    return line


def _timing(position: Position, clock: Clock, samples: int) -> dict[str, Any]:
    seconds = clock.total()
    rate = samples / max(seconds, 1e-9)
    return {"step": position.total, "seconds": seconds, "samples_per_second": rate, **clock.shares()}


def _short(found: dict[str, float]) -> str:
    told = []
    if "mean_R@1" in found:
        recalls = ", ".join(f"@{k} {100 * found[f'mean_R@{k}']:.1f}" for k in (1, 5, 10))
        told.append(f"recall {recalls} % (chance @1 {100 * found['mean_chance@1']:.2f})")
    if "zero_shot_acc1" in found:
        told.append(f"zero-shot {100 * found['zero_shot_acc1']:.1f} % (chance {100 * found['zero_shot_chance']:.1f})")
    return "  ".join(told)
