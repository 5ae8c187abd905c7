"""`--dry-run`: build everything, read samples, take a few steps, estimate the cost of the run, leave nothing behind.

It also answers whether the data path is fast enough. Threads read and decode samples while the device trains; if they
give fewer samples per second than the device takes, the device waits. The CPU time per sample depends only on the
samples and the processor, and so does the number of cores that a rate needs: rate * CPU seconds per sample.
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
STEPS = 5  # number of measured steps
SLOW_STEP = 0.2  # seconds; if a step takes longer, only one is measured


@dataclass(frozen=True)
class DataRate:
    """The cost of reading samples in one process.

    Attributes:
        samples: number of samples.
        seconds: wall time.
        cpu_seconds: CPU time of all threads.
        workers: number of threads (`data.workers`); 0 if there is nothing to decode, and the main thread reads.

    Example:
        >>> rate = DataRate(samples=600, seconds=2.0, cpu_seconds=4.0, workers=2)
        >>> rate.per_second, rate.per_core, rate.cores_for(1000)
        (300.0, 150.0, 7)

    """

    samples: int
    seconds: float
    cpu_seconds: float
    workers: int

    @property
    def per_second(self) -> float:
        """Samples per second with these workers."""
        return self.samples / self.seconds

    @property
    def per_core(self) -> float:
        """Samples per second of CPU time."""
        return self.samples / self.cpu_seconds

    def cores_for(self, rate: float) -> int:
        """Return the number of cores, and of workers, that read `rate` samples per second for one process."""
        return max(1, math.ceil(round(rate / self.per_core, 6)))


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
    data = _measure_data(settings, parts, order)
    seconds_step, loss = _measure_step(
        settings,
        parts,
        order,
        device,
    )

    per_process = batch_size / distributed.world_size()
    step_rate = per_process / seconds_step
    seconds_reading = per_process / data.per_second
    # Threads read while a device computes; encoders on the CPU need the same cores as the threads.
    in_turn = data.workers == 0 or device.type == "cpu"
    seconds = steps * (seconds_step + seconds_reading if in_turn else max(seconds_step, seconds_reading))
    reading = "in the main thread; there is nothing to decode"
    if data.workers:
        needed = data.cores_for(step_rate)
        reading = (
            f"with data.workers={data.workers}, {_number(data.per_core)} per core; "
            f"{needed} cores and data.workers={needed} read as fast as the step"
        )
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
        f"data path: {_number(data.per_second)} samples/s {reading}"
    )
    warnings = [describe_overlap(parts.source, held_out, key) for key, held_out in parts.validation.sources.items()]
    warnings.append(bottleneck_warning(data, step_rate))
    return Estimate(pairs, bad, steps, text, [warning for warning in warnings if warning])


def _measure_data(
    settings: Settings,
    parts: Parts,
    order: np.ndarray,
) -> DataRate:
    """Read the first samples of an epoch, and return the cost; later epochs do not decode kept images again."""
    batch_size = settings.data.batch_size
    workers = settings.data.workers if parts.loader.decodes else 0
    count = math.ceil(max(SAMPLES, SAMPLES_PER_WORKER * workers) * distributed.world_size() / batch_size)
    first = order[: min(count, steps_per_epoch(order, batch_size)) * batch_size]
    distributed.exchange([0])  # all processes begin together, since they share the cores in training as well
    batches = parts.inputs.load(parts.loader, first, batch_size, epoch=0, step=0)
    begin = time.perf_counter()
    cpu_begin = time.process_time()
    samples = sum(len(batch) for batch in batches)
    seconds = max(time.perf_counter() - begin, 1e-9)
    cpu_seconds = max(time.process_time() - cpu_begin, 1e-9)
    return DataRate(samples, seconds, cpu_seconds, workers)


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

    first, _ = take_steps(1)  # includes one-time set-up
    slow = any(flag for (flag,) in distributed.exchange([int(first > SLOW_STEP)]))
    return take_steps(1 if slow else STEPS)


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


# -- text --------------------------------------------------------------------------------------------------------------


def bottleneck_warning(data: DataRate, step_rate: float) -> str | None:
    """Return a warning if training would wait for the data path, otherwise None.

    Args:
        data: the rate of reading.
        step_rate: samples per second of training steps whose batches have been read already.

    Example:
        >>> data = DataRate(samples=600, seconds=2.0, cpu_seconds=4.0, workers=2)
        >>> print(bottleneck_warning(data, step_rate=100))
        None

    """
    if data.per_second >= step_rate:
        return None
    problem = f"the data path is the bottleneck: {_number(data.per_second)} of {_number(step_rate)} samples/s"
    needed = data.cores_for(step_rate)
    if data.workers == 0:
        return f"{problem}; the main thread reads, so data.workers does not change it"
    if needed > data.workers:
        return f"{problem}; it needs {needed} cores and data.workers={needed}; this machine has {cpu_cores()} cores"
    return f"{problem}; the workers wait for storage, then set more than data.workers={data.workers}, or for cores"


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
