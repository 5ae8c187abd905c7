"""A run from its first to its last line.

Everything random follows from (seed, epoch, step): the order of the samples, augmentation, dropout. So a run that is
killed at any moment and resumed from its last checkpoint does the same steps again, and ends with the same weights,
state and metrics as one that was never stopped. Position (epoch, k) means: k steps of this epoch are done; where k is
all of them, the epoch's evaluation is still to come.
"""

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import nuclr
from nuclr import distributed
from nuclr.data import batches, epoch_order, steps_per_epoch, write_bad_samples
from nuclr.objectives import NUCLR
from nuclr.runs import checkpoint, environment, folder
from nuclr.runs import components as parts
from nuclr.runs.features import autocast
from nuclr.runs.launch import on_first, pick_device, processes
from nuclr.runs.settings import Settings, to_dict
from nuclr.training import tables
from nuclr.training.build import build
from nuclr.training.guards import FiniteCheck, TrainingFailed
from nuclr.training.lines import Window, line, short, timing
from nuclr.training.logging import Loggers, check_installed
from nuclr.training.optimizer import make_optimizer
from nuclr.training.progress import Clock, Progress
from nuclr.training.refresh import refresh_zeta
from nuclr.training.same_data import check_same, identity
from nuclr.training.signals import Interrupted, Signals
from nuclr.training.step import clip, collapsed_loss, contrast, inputs, seed_step
from nuclr.training.timetable import Position, evaluation_due, refresh_due, set_schedules
from nuclr.training.validation import PROTOCOL


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
    check_installed(settings.log)

    # -- data, model, objective, optimizer -----------------------------------------------------------------------------
    train_source, validation, model = build(settings, device, loaders)
    pairs = train_source.pairs
    objective = parts.make_objective(settings.objective, len(pairs)).to(device)
    loader = parts.make_loader(settings.data, pairs, model, loaders)
    augment = parts.make_augment(settings.augment, model, seed)
    o = settings.optimizer
    optimizer = make_optimizer(model, objective, o.lr, o.weight_decay, (o.beta1, o.beta2), o.eps)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    encoders = DistributedDataParallel(model) if world > 1 else model  # the objective gathers by itself, outside

    def order_of(epoch: int) -> np.ndarray:
        return epoch_order(pairs, seed, epoch, settings.data.one_pair_per_x, train_source.numbers)

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
        check_same(found, train_source, validation.source, run.folder)
        model.load_state_dict(found["model"])
        objective.load_state_dict(found["objective"])
        optimizer.load_state_dict(found["optimizer"])
        position = Position(**found["position"])
        window = Window(found["window"]["sums"], found["window"]["count"])
        best, metrics_bytes = found["best"], found["metrics_bytes"]
        progress.say(f"{settings.name}: going on from step {position.total} of {epochs * steps}")
    elif resumed or resume:
        progress.say(f"{settings.name}: no checkpoint in {run.folder} yet; starting from the beginning")
    progress.done = progress.begin_step = position.total
    if first:
        run.start_logs(metrics_bytes)
        environment.write(run.folder)
        write_bad_samples(run.folder / folder.BAD, pairs, train_source.bad)
        if train_source.bad:
            progress.say(f"{settings.name}: {len(train_source.bad)} bad samples are left out, see {folder.BAD}")
    loggers = Loggers(settings, run.folder, position.total) if first else None
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
            "optimizer": optimizer.state_dict(),
            "window": {"sums": window.sums, "count": window.count},
            "best": best,
            "metrics_bytes": run.metrics_bytes(),
            "data": identity(train_source, validation.source),
        }
        checkpoint.save_step(run.checkpoints, position.total, content)

    def log(values: dict[str, Any]) -> None:
        if first:
            run.log(folder.METRICS, values)
            cast(Loggers, loggers).write(values)

    # -- epochs --------------------------------------------------------------------------------------------------------
    clock, spent = Clock(), Clock()
    last: dict[str, float] = {}
    with progress.shown(), loggers or contextlib.nullcontext():
        while position.epoch < epochs:
            epoch = position.epoch
            if position.step == 0 and refresh_due(settings, objective, epoch):
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
                    set_schedules(settings, optimizer, objective, position, steps)
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
                    optimizer.step()
                    clock.lap("encoders")

                    position.step, position.total = position.step + 1, position.total + 1
                    window.add({"loss": out.loss, "grad_norm": norm, **out.metrics})
                    progress.step(position.total)
                    if position.total % settings.log.every == 0:
                        values = window.means()
                        log(line(position, steps, optimizer, objective, values))
                        if first:
                            run.log(folder.TIMING, timing(position, clock, batch_size * settings.log.every))
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
            spread = tables.quantiles(objective, train_source.numbers) if first else {}
            if evaluation_due(settings, epoch):
                last = validation(model, device, settings.precision)
                if last:
                    progress.say(f"{settings.name}: epoch {epoch + 1}/{epochs}  {short(last)}")
                score = last.get("mean_R@1", last.get("zero_shot_acc1", -math.inf))
                if first and score > best:
                    checkpoint.mark_best(run.checkpoints, position.total)
                best = max(best, score)
                spread |= {f"val/{k}": v for k, v in last.items()}
            if spread:
                log({"step": position.total, "epoch": epoch + 1, **spread})
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

    on_first(finish)
    return results
