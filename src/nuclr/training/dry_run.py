"""`--dry-run`: build everything, read samples, take a few steps, estimate the cost of the run, leave nothing behind."""

import math
import os
import resource
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nuclr import distributed
from nuclr.data import Loader, epoch_order, steps_per_epoch
from nuclr.data.pairs import SIDES, Side
from nuclr.objectives import ObjectiveOutput
from nuclr.runs import components
from nuclr.runs.features import autocast
from nuclr.runs.launch import pick_device, processes
from nuclr.runs.settings import Settings
from nuclr.training.backward import encode_and_backward
from nuclr.training.batch_inputs import TrainingInputs
from nuclr.training.data_path import DataRate, blend, describe_rates, measure, seconds_per_step
from nuclr.training.optimizer import make_optimizer
from nuclr.training.step import apply_objective, state_index
from nuclr.training.validation import build_parts

MB = 2**20
SAMPLES, SAMPLES_PER_WORKER = 512, 64  # at least so many are read to measure the data path
SMALL_SHARE = 0.01  # of the images; if fewer fit into memory, reading from memory is not measured
STEPS, SLOW_STEP = 5, 0.2  # number of measured steps, but only one if it takes longer than so many seconds


def dry_run(settings: Settings) -> dict[str, Any]:
    """Return memory in bytes, time in seconds, and the rates of the data path and of a step; nothing is written."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = pick_device(settings.device)
    with processes(device):
        source, validation, model = build_parts(settings, device)
        model.train()  # as in training: dropout takes memory and time
        pairs, world = source.pairs, distributed.world_size()
        groups = components.view_groups(settings, source)
        objective = components.make_objective(settings.objective, groups.count if groups else len(pairs)).to(device)
        optimizer = make_optimizer(model, objective, settings.optimizer.lr, settings.optimizer.weight_decay)
        loader = components.make_loader(settings.data, pairs, model, smallest_crop=settings.augment.smallest_crop)
        views: dict[Side, int] = {"x": settings.data.x.views, "y": settings.data.y.views}
        inputs = TrainingInputs(settings.augment, views, pairs, model, settings.seed, groups)
        encoders = DistributedDataParallel(model) if world > 1 else model
        row = groups.row if groups else None
        order = epoch_order(pairs, settings.seed, 0, settings.data.one_pair_per_x, source.numbers, row)
        steps, b = steps_per_epoch(order, settings.data.batch_size), settings.data.batch_size // world

        data = _measure_data(settings, inputs, loader, order)
        batch = next(inputs.load(loader, order[: settings.data.batch_size], settings.data.batch_size, epoch=0, step=0))

        def encode(x: Any, y: Any) -> tuple[Tensor, Tensor]:
            with autocast(device, settings.precision):
                return encoders(x, y)

        def contrast(x: Tensor, y: Tensor) -> ObjectiveOutput:
            return apply_objective(objective, x, y, batch, settings.data.mask)

        def take_steps(count: int) -> tuple[float, float, float]:
            """Return wall time and CPU time per step, and the loss."""
            _synchronize(device)
            begin, cpu_begin = time.perf_counter(), time.process_time()
            for _ in range(count):
                objective.prefetch(state_index(batch))
                x, y = inputs.prepare(batch, 0, 0, device)
                optimizer.zero_grad(set_to_none=True)
                out = encode_and_backward(encode, x, y, contrast, len(batch), settings.data.micro_batch)
                optimizer.step()
            _synchronize(device)
            seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
            return seconds / count, cpu_seconds / count, out.loss.item()

        first, _, _ = take_steps(1)  # includes one-time set-up
        slow = any(flag for (flag,) in distributed.exchange([int(first > SLOW_STEP)]))
        step, step_cpu, loss = take_steps(1 if slow else STEPS)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        state = sum(table.numel() * table.element_size() for table in objective.buffers())
        return {
            "pairs": len(pairs),
            "views": {getattr(pairs, f"{side}_name"): views[side] for side in SIDES},
            "visits": len(order),
            "bad_samples": len(source.bad),
            "steps": steps * settings.schedule.epochs,
            "micro_batches": math.ceil(b / settings.data.micro_batch) if settings.data.micro_batch else 1,
            "left_over_per_epoch": len(order) - steps * settings.data.batch_size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "loss": loss,
            "bytes_model": weights,
            "bytes_optimizer": 3 * trained,  # gradient and two moments
            "bytes_objective": state,
            "bytes_peak": _peak(device),
            "bytes_checkpoint": weights + 2 * trained + state,
            "data_rate": data,
            "step_rate": b / step,
            "device": device.type,
            "seconds_step": step,
            "seconds": steps
            * settings.schedule.epochs
            * seconds_per_step(b, data, step, step_cpu, on_cpu=device.type == "cpu"),
            "overlaps": [
                overlap
                for key, held_out in validation.sources.items()
                if (overlap := components.describe_overlap(source, held_out, key))
            ],
            "evaluation_pairs": len(validation.source.numbers) if validation.source else 0,
        }


def _measure_data(settings: Settings, inputs: TrainingInputs, loader: Loader, order: np.ndarray) -> DataRate:
    """Read the first samples of an epoch, and return the mean cost of reading over all epochs."""
    batch_size, epochs, world = settings.data.batch_size, settings.schedule.epochs, distributed.world_size()
    workers = settings.data.workers if loader.decodes else 0
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    count = math.ceil(max(SAMPLES, SAMPLES_PER_WORKER * workers) * world / batch_size)
    measured = order[: min(count, steps_per_epoch(order, batch_size)) * batch_size]

    def read() -> DataRate:
        distributed.exchange([0])  # all processes begin together, since they share the cores in training as well
        return measure(inputs.load(loader, measured, batch_size, epoch=0, step=0), workers, local_world)

    decoded = read()
    share = loader.share_kept(order) * (epochs - 1) / epochs  # of all visits, the share whose images are in memory
    return blend(decoded, read(), share) if workers and share >= SMALL_SHARE else decoded


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe(estimate: dict[str, Any], rate: float | None = None) -> str:
    """Return the estimate as text for a person.

    Args:
        estimate: from `dry_run`.
        rate: samples per second of one process (`--rate`), for which the necessary cores are calculated.

    """
    minutes = estimate["seconds"] / 60
    several = " and ".join(f"{count} of {name}" for name, count in estimate["views"].items())
    views = f"views: {several} per visit; {estimate['visits']:,} visits per epoch\n"
    micro = f" of {estimate['micro_batches']} micro-batches (data.micro_batch)" if estimate["micro_batches"] > 1 else ""
    return (
        f"{estimate['pairs']:,} pairs ({estimate['bad_samples']} bad), {estimate['parameters']:,} parameters, "
        f"{estimate['steps']:,} steps; {estimate['left_over_per_epoch']} samples left over per epoch\n"
        f"{views if max(estimate['views'].values()) > 1 else ''}"
        f"memory: model {estimate['bytes_model'] / MB:,.0f} MB, "
        f"gradients and AdamW {estimate['bytes_optimizer'] / MB:,.0f} MB, "
        f"objective state {estimate['bytes_objective'] / MB:,.1f} MB, "
        f"peak so far {estimate['bytes_peak'] / MB:,.0f} MB; "
        f"a checkpoint takes {estimate['bytes_checkpoint'] / MB:,.0f} MB on disk\n"
        f"time: about {estimate['seconds_step']:.3f} s per step{micro}, "
        f"{minutes:,.1f} min in total without evaluation; loss of the batch {estimate['loss']:.4f}\n"
        f"{describe_rates(estimate['data_rate'], estimate['step_rate'], estimate['device'], rate)}"
    )
