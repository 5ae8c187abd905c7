"""A run from its first to its last line.

Everything random depends only on (seed, epoch, step): the order of the samples, augmentation, dropout. A run that is
killed at any moment and resumed from its last checkpoint therefore repeats the same steps, and ends with the same
weights, state and metrics as one that was never stopped. Position (epoch, k) means that k steps of this epoch are done;
if k is the number of steps per epoch, the epoch's evaluation is still to be done.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import nuclr
from nuclr import distributed
from nuclr.data import Batch, batches, steps_per_epoch, write_bad_samples
from nuclr.data.selection import describe_overlap
from nuclr.evaluation.metrics import score
from nuclr.objectives import ObjectiveOutput
from nuclr.objectives.base import DeferredCheck
from nuclr.runs import checkpoint, components, config, folder
from nuclr.runs.features import Encoding
from nuclr.runs.launch import Interrupted, Signals, choose_folder, on_first, pick_device, processes
from nuclr.runs.settings import Settings
from nuclr.training import logging
from nuclr.training.build import Parts, clipped_parameters
from nuclr.training.guards import TrainingFailed, check_fits, data_identity, not_finite
from nuclr.training.schedules import Position, check_refresh, evaluation_due, refresh_due, set_schedules
from nuclr.training.step import (
    apply_objective,
    clip_gradient,
    collapsed_loss,
    encode_and_backward,
    refresh_popularity,
    refuse_not_finite,
    seed_step,
)
from nuclr.training.validation import LABELS_PROTOCOL, PROTOCOL


def train(
    settings: Settings | str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    resume: bool = False,
    loaders: components.Loaders | None = None,
) -> folder.TrainedRun:
    """Train a dual encoder on pairs, as `nuclr train` does.

    Args:
        settings: of the run: a YAML file, its content as nested dicts, or the result of `nuclr.runs.config.load`.
        out: the run's folder. By default that of the setting `out`, or `runs/NAME`, or `runs/NAME-2`, ... if it exists.
        resume: continue the run in its folder if there is one.
        loaders: shared by several runs on the same pairs, so that images are decoded once.

    Returns:
        What was trained: the folder, and the content of results.json.

    Raises:
        UserError: a mistake in the settings or the data.
        TrainingFailed: a NaN, a full disk.
        Interrupted: SIGINT or SIGTERM, after a checkpoint was written.

    Example:
        >>> trained = train({"data": {"train": "pairs.csv", "val": "held_out.csv"}})  # doctest: +SKIP
        >>> trained.folder, trained.val["mean_R@1"]  # doctest: +SKIP
        (PosixPath('runs/run'), 0.31)

    """
    if not isinstance(settings, Settings):
        settings = config.load(settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = pick_device(settings.device)
    with Signals() as signals, processes(device):
        run = folder.RunFolder(choose_folder(settings, out, resume))
        try:
            return _train(
                settings,
                run,
                resume,
                device,
                signals,
                loaders,
            )
        except OSError as error:
            path = error.filename or run.folder
            reason = f"{path}: {error.strerror or error}"
            raise TrainingFailed(f"{reason}; the checkpoints so far are in {run.folder}") from error
        finally:
            run.close()


def _train(
    settings: Settings,
    run: folder.RunFolder,
    resume: bool,
    device: torch.device,
    signals: Signals,
    loaders: components.Loaders | None,
) -> folder.TrainedRun:
    rank = distributed.rank()
    world = distributed.world_size()
    first = rank == 0
    batch_size = settings.data.batch_size
    micro_batch = settings.data.micro_batch
    epochs = settings.schedule.epochs
    begin = time.perf_counter()
    logging.check_installed(settings.log)
    check_refresh(settings)

    # -- data, model, objective, optimizer -----------------------------------------------------------------------------
    parts = Parts(settings, device, loaders)
    source = parts.source
    pairs = source.pairs
    validation = parts.validation
    model = parts.model
    objective = parts.objective
    optimizer = parts.optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    clipped = clipped_parameters(optimizer)

    samples = len(parts.order(0))
    steps = steps_per_epoch(parts.order(0), batch_size)
    next(batches(parts.order(0), batch_size, rank, world))  # raises if the batch cannot be divided among the processes
    chance = collapsed_loss(
        objective,
        batch_size // world,
        model.width,
        device,
    )

    # -- the folder, and the position of an earlier run ----------------------------------------------------------------
    settings = components.resolve(
        settings,
        run.folder,
        device,
        source,
        model,
    )
    resumed = on_first(lambda: run.open(settings, resume))
    progress = logging.Progress(
        settings.name,
        epochs * steps,
        0,
        chance,
        batch_size,
    )
    if resumed and (finished := folder.read_results(run.folder)) is not None:
        progress.say(f"{settings.name}: the run in {run.folder} is finished; nothing is left to train")
        return finished
    progress.say(logging.banner(settings, parts, steps, device))
    for key, held_out in validation.sources.items() if first else ():
        if overlap := describe_overlap(source, held_out, key):
            progress.say(f"{settings.name}: warning: {overlap}")
    position = Position()
    window = logging.Window()
    best = -math.inf
    metrics_bytes = 0
    identity = data_identity(source, validation.sources)
    fits = partial(
        check_fits,
        model=model,
        objective=objective,
        optimizer=optimizer,
        data=identity,
        epochs=epochs,
        steps=steps,
    )
    saved = checkpoint.load_last(run.checkpoints, progress.say, fits) if run.checkpoints.is_dir() else None
    if saved is not None:
        model.load_state_dict(saved.model)
        objective.load_state_dict(saved.objective)
        optimizer.load_state_dict(optimizer.state_dict() | {"state": saved.optimizer["state"]})
        position = Position(**saved.position)
        window = logging.Window(saved.window["sums"], saved.window["count"])
        best = saved.best
        metrics_bytes = saved.metrics_bytes
        progress.say(f"{settings.name}: resuming from step {position.total} of {epochs * steps}")
    elif resumed or resume:
        progress.say(f"{settings.name}: there is no checkpoint in {run.folder} yet; starting from the beginning")
    progress.done = progress.begin_step = position.total
    if first:
        run.start_logs(metrics_bytes)
        folder.write_environment(run.folder)
        write_bad_samples(run.folder / folder.BAD, pairs, source.bad)
        if source.bad:
            progress.say(f"{settings.name}: {len(source.bad)} bad samples are left out, see {folder.BAD}")
    loggers = logging.Loggers(settings, run.folder, position.total) if first else None
    finite = DeferredCheck()

    def save() -> None:
        finite.raise_pending()  # a checkpoint is written only after its last step has been checked
        objective_state = objective.gather_state_dict()
        if not first:
            return
        content = checkpoint.Checkpoint(
            version=nuclr.__version__,
            position=dataclasses.asdict(position),
            model=model.state_dict(),
            objective=objective_state,
            optimizer=optimizer.state_dict(),
            window={"sums": window.sums, "count": window.count},
            best=best,
            metrics_bytes=run.metrics_bytes(),
            data=identity,
        )
        checkpoint.save_step(run.checkpoints, position.total, content)

    def log(values: dict[str, Any]) -> None:
        if first:
            run.log(folder.METRICS, values)
            cast(logging.Loggers, loggers).write(values)

    def contrast(
        batch: Batch,
        features_x: Tensor,
        features_y: Tensor,
    ) -> ObjectiveOutput:
        clock.lap("encoders")
        try:
            return apply_objective(
                objective,
                features_x,
                features_y,
                batch,
                settings.data.mask,
            )
        except ValueError:
            refuse_not_finite(
                features_x,
                features_y,
                batch,
                run.folder,
            )
            raise
        finally:
            clock.lap("objective")

    # -- epochs --------------------------------------------------------------------------------------------------------
    clock = logging.Clock()
    spent = logging.Clock()
    log_every = min(settings.log.every, steps)  # at least once per epoch
    last: dict[str, float] = {}
    with contextlib.closing(progress), loggers or contextlib.nullcontext():
        while position.epoch < epochs:
            epoch = position.epoch
            if position.step == 0 and refresh_due(settings, parts.full, epoch):
                encoding = Encoding(settings.evaluate.batch_size, device, settings.precision)
                refresh_popularity(
                    objective,
                    model,
                    source,
                    parts.loader,
                    encoding,
                    parts.groups,
                )
            model.train()
            objective.train()
            with signals.steps():
                clock.lap("other")
                for batch in parts.inputs.load(parts.loader, parts.order(epoch), batch_size, epoch, position.step):
                    clock.lap("data")
                    seed_step(
                        settings.seed,
                        position.total,
                        rank,
                        device,
                    )
                    set_schedules(
                        settings,
                        optimizer,
                        parts.full,
                        position,
                        steps,
                    )
                    x, y = parts.inputs.prepare(
                        batch,
                        epoch,
                        position.step,
                        device,
                    )
                    for parameter in parameters:
                        parameter.grad = None
                    out = encode_and_backward(
                        parts.encode,
                        x,
                        y,
                        partial(contrast, batch),
                        len(batch),
                        micro_batch,
                    )
                    norm = clip_gradient(clipped, settings.optimizer.clip)
                    finite.raise_pending()
                    failure = partial(
                        not_finite,
                        "the gradient is",
                        batch.numbers,
                        None,
                        run.folder,
                    )
                    finite.check(torch.isfinite(norm + out.loss.detach()), failure)
                    optimizer.step()
                    clock.lap("encoders")

                    position.step += 1
                    position.total += 1
                    window.add({"loss": out.loss, "grad_norm": norm, **out.metrics})
                    progress.step(position.total)
                    if position.total % log_every == 0:
                        values = window.means()
                        log(logging.metrics_line(position, steps, optimizer, parts.full, values))
                        if first:
                            run.log(folder.TIMING, logging.timing_line(position, clock, batch_size * log_every))
                        progress.report(epoch, values["loss"], clock)
                        spent.add(clock)
                        window = logging.Window()
                        clock.reset()
                    clock.lap("objective")  # state and logging
                    stop = signals.pending()
                    if stop or (position.total % settings.checkpoint_every == 0 and position.step < steps):
                        save()
                        clock.lap("other")
                    if stop:
                        raise Interrupted(stop, f"stopped at step {position.total} of {epochs * steps}")
                if position.step == steps:
                    objective.end_epoch()  # before the checkpoint; a resumed run repeats it without effect
                    save()

            # -- held-out pairs
            rows = source.numbers if parts.groups is None else np.unique(parts.groups.row[source.numbers])
            summary = parts.full.summarize(torch.from_numpy(rows)) if first else {}
            values = {f"state/{name}": value for name, value in summary.items()}
            if evaluation_due(settings, epoch):
                last = validation(model, device, settings.precision)
                if last:
                    progress.say(f"{settings.name}: epoch {epoch + 1}/{epochs}  {logging.short_metrics(last)}")
                reached = score(last)
                if first and reached is not None and reached > best:
                    checkpoint.mark_best(run.checkpoints, position.total)
                best = max(best, -math.inf if reached is None else reached)
                values |= {f"val/{k}": v for k, v in last.items()}
            if values:
                log({"step": position.total, "epoch": epoch + 1, **values})
            position = Position(epoch + 1, 0, position.total)

    # -- the end -------------------------------------------------------------------------------------------------------
    spent.add(clock)
    results = folder.TrainedRun(
        folder=run.folder,
        name=settings.name,
        objective=settings.objective.name,
        temperature=parts.full.current_temperature,
        steps=position.total,
        epochs=epochs,
        batch_size=batch_size,
        processes=world,
        pairs=len(pairs),
        sides=pairs.side_names,
        samples_per_epoch=samples,
        left_over_per_epoch=samples - steps * batch_size,
        bad_samples=len(source.bad),
        parameters=sum(parameter.numel() for parameter in parameters),
        val=last,
        best=best if math.isfinite(best) else None,
        protocol=LABELS_PROTOCOL if settings.data.contrasts_views else PROTOCOL,
        timing={
            "steps": position.total - progress.begin_step,  # fewer than all in a run that was resumed
            "seconds": time.perf_counter() - begin,
            "samples_per_second": (position.total - progress.begin_step) * batch_size / max(spent.total(), 1e-9),
            **{f"share_{k}": v for k, v in spent.shares().items()},
        },
    )

    def finish() -> None:
        if model.joint is not None:
            model.joint = model.joint.with_temperature(parts.full.current_temperature, parts.full.current_bias)
        model.save_pretrained(run.folder / folder.MODEL)
        run.finish(results)

    on_first(finish)
    return results
