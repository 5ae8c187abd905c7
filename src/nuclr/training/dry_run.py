"""`--dry-run`: build everything, read samples, take a few steps, estimate the cost of the run, leave nothing behind.

It also answers whether the data path is fast enough. Threads read and decode samples while the device trains; if they
give fewer samples per second than the device takes, the device waits.
"""

import math
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nuclr import distributed
from nuclr.data import steps_per_epoch
from nuclr.data.selection import describe_overlap
from nuclr.runs.launch import cpu_cores, pick_device, processes
from nuclr.runs.settings import Settings
from nuclr.training.build import Parts
from nuclr.training.step import apply_objective, encode_and_backward

MB = 2**20
SAMPLES = 512  # number of samples that are read to measure the data path, at least
SAMPLES_PER_WORKER = 64  # and at least this number for each thread
STEPS = 2  # number of measured steps


@dataclass(frozen=True)
class Estimate:
    """The cost of a run.

    Attributes:
        pairs: number of training pairs.
        bad_samples: number of samples that cannot be used.
        steps: steps of the whole run.
        text: the memory and the time, for a person. Rates and memory are those of one process.
        warnings: sentences about a slow data path and about held-out pairs that are training pairs.

    """

    pairs: int
    bad_samples: int
    steps: int
    text: str
    warnings: list[str]


# -- measuring ---------------------------------------------------------------------------------------------------------


def dry_run(settings: Settings) -> Estimate:
    """Return the memory, the time, and the rates of the data path and of a step; nothing is written."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = pick_device(settings.device)
    with processes(device):
        return _try_steps(settings, device)


def _try_steps(settings: Settings, device: torch.device) -> Estimate:
    parts = Parts(settings, device)
    parts.model.train()  # as in training: dropout takes memory and time
    order = parts.order(0)
    batch_size = settings.data.batch_size
    steps = steps_per_epoch(order, batch_size) * settings.schedule.epochs
    workers = settings.data.workers if parts.loader.decodes else 0
    data_rate = _measure_data(parts, order, batch_size, workers)
    seconds_step, loss = _measure_step(
        settings,
        parts,
        order,
        device,
    )

    per_process = batch_size / distributed.world_size()
    step_rate = per_process / seconds_step
    seconds_reading = per_process / data_rate
    # Threads read while a device computes; encoders on the CPU need the same cores as the threads.
    in_turn = workers == 0 or device.type == "cpu"
    seconds = steps * (seconds_step + seconds_reading if in_turn else max(seconds_step, seconds_reading))
    reading = f"with data.workers={workers}" if workers else "in the main thread; there is nothing to decode"
    pairs = len(parts.source.pairs)
    bad = len(parts.source.bad)
    parameters = list(parts.model.parameters())
    weights = _bytes(parameters)
    trained = _bytes([parameter for parameter in parameters if parameter.requires_grad])
    state = _bytes(parts.objective.buffers())
    text = (
        f"{pairs:,} pairs ({bad} bad), {sum(parameter.numel() for parameter in parameters):,} parameters, "
        f"{steps:,} steps; {len(order) % batch_size} samples left over per epoch\n"
        f"memory: model {weights / MB:,.0f} MB, gradients and AdamW {3 * trained / MB:,.0f} MB, "
        f"objective state {state / MB:,.1f} MB, peak so far {_peak(device) / MB:,.0f} MB; "
        f"a checkpoint takes {(weights + 2 * trained + state) / MB:,.0f} MB on disk\n"
        f"time: about {seconds_step:.3f} s per step, {seconds / 60:,.1f} min in total without evaluation, if all "
        f"epochs take as long as the first; loss of the batch {loss:.4f}\n"
        f"training step: {_number(step_rate)} samples/s on {device.type}\n"
        f"data path: {_number(data_rate)} samples/s {reading}"
    )
    warnings = [describe_overlap(parts.source, held_out, key) for key, held_out in parts.validation.sources.items()]
    if data_rate < step_rate:
        warnings.append(
            f"the data path is the bottleneck: {_number(data_rate)} of {_number(step_rate)} samples/s {reading}; this "
            f"machine has {cpu_cores()} cores"
        )
    return Estimate(pairs, bad, steps, text, [warning for warning in warnings if warning])


def _measure_data(
    parts: Parts,
    order: np.ndarray,
    batch_size: int,
    workers: int,
) -> float:
    """Read the first samples of an epoch; return how many a process reads per second with this number of threads."""
    count = math.ceil(max(SAMPLES, SAMPLES_PER_WORKER * workers) * distributed.world_size() / batch_size)
    first = order[: min(count, steps_per_epoch(order, batch_size)) * batch_size]
    distributed.exchange([0])  # all processes begin together, since they share the cores in training as well
    batches = parts.inputs.load(parts.loader, first, batch_size, epoch=0, step=0)
    begin = time.perf_counter()
    samples = sum(len(batch) for batch in batches)
    return samples / max(time.perf_counter() - begin, 1e-9)


def _measure_step(
    settings: Settings,
    parts: Parts,
    order: np.ndarray,
    device: torch.device,
) -> tuple[float, float]:
    """Return the seconds of a step on a batch that has been read, and its loss."""
    data = settings.data
    batch = next(parts.inputs.load(parts.loader, order[: data.batch_size], data.batch_size, epoch=0, step=0))
    contrast = partial(
        apply_objective,
        parts.objective,
        batch=batch,
        mask=data.mask,
    )

    def take_steps(count: int) -> tuple[float, float]:
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            x, y = parts.inputs.prepare(batch, 0, 0, device)
            parts.optimizer.zero_grad(set_to_none=True)
            out = encode_and_backward(
                parts.encode,
                x,
                y,
                contrast,
                len(batch),
                data.micro_batch,
            )
            parts.optimizer.step()
        _synchronize(device)
        return (time.perf_counter() - begin) / count, out.loss.item()

    take_steps(1)  # one-time set-up
    return take_steps(STEPS)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
