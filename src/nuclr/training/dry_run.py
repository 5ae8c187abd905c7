"""`--dry-run`: build everything, read samples, take a few steps, estimate the cost of the run, leave nothing behind.

It also answers whether the data path is fast enough. Threads read and decode samples while the device trains; if they
give fewer samples per second than the device takes, the device waits. The CPU time per sample depends only on the
samples and the processor, and so does the number of cores that a rate needs: rate * CPU seconds per sample.
"""

import math
import resource
import sys
import time
from collections.abc import Iterable, Sized
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
    """The cost of a run. Rates and memory are those of one process.

    Attributes:
        pairs: number of training pairs.
        bad_samples: number of samples that cannot be used.
        left_over: visits per epoch that do not fill a batch.
        steps: steps of the whole run.
        parameters: of the model.
        loss: of the batch that was tried.
        model_bytes: size of the weights.
        optimizer_bytes: size of the gradients and of AdamW's two moments.
        state_bytes: size of the objective's state.
        peak_bytes: largest memory of this process so far.
        checkpoint_bytes: size of a checkpoint on disk.
        data: the cost of reading in the first epoch; images that stay in memory have none in later ones.
        device: type of the device.
        step_rate: samples per second of steps whose batches have been read already.
        seconds_step: of a step whose batch has been read already.
        seconds: of the whole run without evaluation.
        overlaps: sentences about held-out pairs that are training pairs.

    """

    pairs: int
    bad_samples: int
    left_over: int
    steps: int
    parameters: int
    loss: float
    model_bytes: int
    optimizer_bytes: int
    state_bytes: int
    peak_bytes: int
    checkpoint_bytes: int
    data: DataRate
    device: str
    step_rate: float
    seconds_step: float
    seconds: float
    overlaps: list[str]


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
    steps = steps_per_epoch(order, batch_size)
    data = _measure_data(settings, parts, order)
    seconds_step, loss = _measure_step(
        settings,
        parts,
        order,
        device,
    )

    reading = batch_size / distributed.world_size() / data.per_second
    # Threads read while a device computes; encoders on the CPU need the same cores as the threads.
    in_turn = data.workers == 0 or device.type == "cpu"
    expected = seconds_step + reading if in_turn else max(seconds_step, reading)
    parameters = list(parts.model.parameters())
    weights = _bytes(parameters)
    trained = _bytes([parameter for parameter in parameters if parameter.requires_grad])
    state = _bytes(parts.objective.buffers())
    overlaps = [describe_overlap(parts.source, held_out, key) for key, held_out in parts.validation.sources.items()]
    return Estimate(
        pairs=len(parts.source.pairs),
        bad_samples=len(parts.source.bad),
        left_over=len(order) - steps * batch_size,
        steps=steps * settings.schedule.epochs,
        parameters=sum(parameter.numel() for parameter in parameters),
        loss=loss,
        model_bytes=weights,
        optimizer_bytes=3 * trained,
        state_bytes=state,
        peak_bytes=_peak(device),
        checkpoint_bytes=weights + 2 * trained + state,
        data=data,
        device=device.type,
        step_rate=batch_size / distributed.world_size() / seconds_step,
        seconds_step=seconds_step,
        seconds=steps * settings.schedule.epochs * expected,
        overlaps=[overlap for overlap in overlaps if overlap],
    )


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
    return measure(parts.inputs.load(parts.loader, first, batch_size, epoch=0, step=0), workers)


def measure(batches: Iterable[Sized], workers: int) -> DataRate:
    """Read batches and return the cost.

    Args:
        batches: an iterator that reads samples; all of its batches are read.
        workers: number of threads that read them.

    """
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


def describe(estimate: Estimate) -> str:
    """Return the estimate as text for a person."""
    e = estimate
    reading = "in the main thread; there is nothing to decode"
    if e.data.workers:
        needed = e.data.cores_for(e.step_rate)
        reading = (
            f"with data.workers={e.data.workers}, {_number(e.data.per_core)} per core; "
            f"{needed} cores and data.workers={needed} read as fast as the step"
        )
    return (
        f"{e.pairs:,} pairs ({e.bad_samples} bad), {e.parameters:,} parameters, {e.steps:,} steps; "
        f"{e.left_over} samples left over per epoch\n"
        f"memory: model {e.model_bytes / MB:,.0f} MB, gradients and AdamW {e.optimizer_bytes / MB:,.0f} MB, "
        f"objective state {e.state_bytes / MB:,.1f} MB, peak so far {e.peak_bytes / MB:,.0f} MB; "
        f"a checkpoint takes {e.checkpoint_bytes / MB:,.0f} MB on disk\n"
        f"time: about {e.seconds_step:.3f} s per step, {e.seconds / 60:,.1f} min in total without evaluation, if all "
        f"epochs take as long as the first; "
        f"loss of the batch {e.loss:.4f}\n"
        f"training step: {_number(e.step_rate)} samples/s on {e.device}\n"
        f"data path: {_number(e.data.per_second)} samples/s {reading}"
    )


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
