"""Is the data path fast enough? What reading a sample costs, and the cores that feed a given rate of training.

Threads read and decode samples while the device trains. If they give fewer samples per second than the device takes,
the device waits. The CPU time per sample depends only on the samples and the processor, and so does the number of cores
that a rate needs: rate * CPU seconds per sample. Samples per second with a given number of threads also depend on
storage and on other programs.
"""

import math
import time
from collections.abc import Iterable, Sized
from dataclasses import dataclass, replace

from nuclr.runs.launch import cpu_cores

OFTEN_WAITING = 0.7  # threads that compute for a smaller share of the time wait for storage or for other programs


@dataclass(frozen=True)
class DataRate:
    """What it cost one process to read samples.

    Attributes:
        samples: number of samples.
        seconds: wall time.
        cpu_seconds: CPU time of all threads.
        workers: number of threads (`data.workers`); 0 if there is nothing to decode, and the main thread reads.
        cores: CPU cores that all processes on this machine can use.
        processes: number of processes on this machine, which share the cores.

    Example:
        >>> rate = DataRate(samples=600, seconds=2.0, cpu_seconds=4.0, workers=2, cores=8)
        >>> rate.per_second, rate.per_core, rate.cores_for(1000)
        (300.0, 150.0, 7)

    """

    samples: int
    seconds: float
    cpu_seconds: float
    workers: int
    cores: int
    processes: int = 1

    @property
    def per_second(self) -> float:
        """Samples per second with so many workers."""
        return self.samples / self.seconds

    @property
    def per_core(self) -> float:
        """Samples per second of CPU time."""
        return self.samples / self.cpu_seconds

    @property
    def busy(self) -> float:
        """The share of the time in which the workers computed, as far as there were cores for them."""
        parallel = max(1.0, min(self.workers, self.cores / self.processes))
        return min(1.0, self.cpu_seconds / (self.seconds * parallel))

    def cores_for(self, rate: float) -> int:
        """Return the number of cores, and of workers, that read so many samples per second for one process.

        Workers that wait for storage need no core; there, more workers than cores may be faster.
        """
        return max(1, math.ceil(round(rate / self.per_core, 6)))

    def is_slower_than(self, rate: float) -> bool:
        """Return whether training at so many samples per second would wait for data."""
        return self.per_second < rate


def measure(batches: Iterable[Sized], workers: int, processes: int) -> DataRate:
    """Read batches and return what it cost.

    Args:
        batches: an iterator that reads samples; all of its batches are read.
        workers: number of threads that read them.
        processes: number of processes on this machine that read at the same time.

    """
    begin, cpu_begin, samples = time.perf_counter(), time.process_time(), 0
    for batch in batches:
        samples += len(batch)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    return DataRate(samples, max(seconds, 1e-9), max(cpu_seconds, 1e-9), workers, cpu_cores(), processes)


def blend(decoded: DataRate, kept: DataRate, share: float) -> DataRate:
    """Return the rate of reading if a share of the samples is found in memory.

    Args:
        decoded: of samples that are decoded.
        kept: of the same number of samples, all found in memory.
        share: from 0 to 1.

    Example:
        >>> slow, fast = DataRate(100, 2.0, 2.0, 1, 4), DataRate(100, 1.0, 1.0, 1, 4)
        >>> blend(slow, fast, 0.5).seconds
        1.5

    """
    seconds, cpu_seconds = (
        (1 - share) * one + share * other
        for one, other in ((decoded.seconds, kept.seconds), (decoded.cpu_seconds, kept.cpu_seconds))
    )
    return replace(decoded, seconds=seconds, cpu_seconds=cpu_seconds)


def seconds_per_step(batch: int, data: DataRate, step: float, step_cpu: float, on_cpu: bool) -> float:
    """Return the expected time of a training step that gets its batch from the data path.

    Args:
        batch: samples per step of one process.
        data: the rate of reading.
        step: seconds of a step whose batch is there already.
        step_cpu: CPU seconds of this step.
        on_cpu: whether the encoders run on the CPU, and so share its cores with the workers.

    Example:
        >>> seconds_per_step(100, DataRate(100, 2.0, 4.0, 2, cores=2), step=1.5, step_cpu=3.0, on_cpu=True)
        3.5

    """
    reading, reading_cpu = batch / data.per_second, batch / data.per_core
    if data.workers == 0:
        return step + reading
    cores = max(1.0, data.cores / data.processes)
    return max(step, reading, (step_cpu + reading_cpu) / cores if on_cpu else 0.0)


def describe_rates(data: DataRate, step_rate: float, device: str, rate: float | None = None) -> str:
    """Return lines that compare the data path with the training step, per process.

    Args:
        data: the rate of reading.
        step_rate: samples per second of training steps whose batches are there already.
        device: the device of the encoders.
        rate: samples per second to calculate the cores for (`--rate`).

    """
    if data.workers == 0:
        path = f"data path: {_number(data.per_second)} samples/s in the main thread; there is nothing to decode"
    else:
        shared = f" shared by {data.processes} processes" if data.processes > 1 else ""
        slow = data.is_slower_than(step_rate if rate is None else rate)
        waiting = f". {_waiting(data)}" if slow and data.busy < OFTEN_WAITING else ""
        path = (
            f"data path: {_number(data.per_second)} samples/s with data.workers={data.workers} on "
            f"{_count(data.cores, 'core')}{shared}, {_number(data.per_core)} per core{waiting}"
        )
    slower = "the data path" if data.is_slower_than(step_rate) else "the step"
    lines = [path, f"training step: {_number(step_rate)} samples/s on {device}; {slower} is the bottleneck"]
    if data.workers:
        lines[1] += f". Reading for it needs {_needs(data, step_rate)}"
        if rate is not None:
            lines.append(f"reading {_number(rate)} samples/s (--rate) needs {_needs(data, rate)}")
    per_process = " (rates are those of one process)" if data.processes > 1 else ""
    return "\n".join(lines) + per_process


def bottleneck_warning(data: DataRate, step_rate: float, rate: float | None = None) -> str | None:
    """Return a warning if training would wait for the data path, otherwise None.

    Args:
        data: the rate of reading.
        step_rate: samples per second of training steps whose batches are there already.
        rate: samples per second that another device would train (`--rate`), to compare with instead.

    Example:
        >>> data = DataRate(samples=600, seconds=2.0, cpu_seconds=4.0, workers=2, cores=8)
        >>> print(bottleneck_warning(data, step_rate=100, rate=1000))
        the data path is the bottleneck: it gives 300 of 1,000 samples/s (--rate) with data.workers=2.
        Set data.workers=7; this machine has 8 cores.

    """
    target, source = (step_rate, "that the step takes") if rate is None else (rate, "(--rate)")
    if not data.is_slower_than(target):
        return None
    rates = f"{_number(data.per_second)} of {_number(target)} samples/s {source}"
    problem = f"the data path is the bottleneck: it gives {rates}"
    if data.workers == 0:
        return f"{problem}. It runs in the main thread, so data.workers does not change it."
    workers = data.cores_for(target)
    cores = workers * data.processes
    machine = f"{_count(data.cores, 'core')}{f' for {data.processes} processes' if data.processes > 1 else ''}"
    setting = f"data.workers={workers}" if workers > data.workers else ""
    if cores > data.cores:
        fix = f"It needs {' and '.join(filter(None, [f'{cores:,} cores', setting]))}; this machine has {machine}."
    elif setting:
        fix = f"Set {setting}; this machine has {machine}."
    else:
        fix = f"{_waiting(data)}."
    return f"{problem} with data.workers={data.workers}.\n{fix}"


def _needs(data: DataRate, rate: float) -> str:
    workers = data.cores_for(rate)
    return f"{_count(workers, 'core')} and data.workers={workers}"


def _waiting(data: DataRate) -> str:
    return (
        f"The workers waited {1 - data.busy:.0%} of the time: for storage, then set more data.workers, or for cores "
        "that other programs used, then more workers do not help"
    )


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
