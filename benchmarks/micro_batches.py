"""Measure time and memory of a training step in exact micro-batches, next to the same step on the full batch.

    python benchmarks/micro_batches.py [--repeats 3] [--threads 2] [--out benchmarks/results/micro_batches.json]

B = 1024 pairs in chunks of 64, for towers of texts (a BERT-like transformer, both sides texts) and of images (a vision
transformer against bag-of-words texts), both with dropout. Each step encodes both sides, runs NUCLR and back-propagates
to the weights. Both ways of a model take turns in one process, so that a busy machine slows both; the ratio is of the
fastest turns. The ratio of CPU seconds is printed as well: with one thread it hardly depends on other programs. One
more forward pass costs about a third of a step. Memory is the peak of the second step of a new process above what it
holds after the first (weights, gradients, inputs, state, buffers of libraries). `largest difference` is between the
gradients of micro-batches and of one graph over the same chunks and random numbers, relative to the largest gradient.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nuclr.objectives import ObjectiveOutput, backward_in_micro_batches, build

PAIRS, BATCH, CHUNK = 100_000, 1024, 64
WIDTH, LAYERS, HEADS, DROPOUT = 128, 2, 4, 0.1
LENGTH, VOCABULARY, IMAGE, PATCH = 16, 8192, 40, 8
MODELS = ("text", "image")
WAYS = ("full batch", "micro-batches")


class Transformer(nn.Module):
    """A pre-norm transformer with dropout on embedded tokens, pooled by the mean."""

    def __init__(self, embed: nn.Module, length: int) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Parameter(torch.randn(length, WIDTH) / 10)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, DROPOUT, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return unit-norm features (b, width)."""
        return normalize(self.layers(self.embed(inputs) + self.positions).mean(1), dim=1)


class Patches(nn.Conv2d):
    """Map images (b, 3, size, size) to tokens (b, patches, width)."""

    def __init__(self) -> None:
        super().__init__(3, WIDTH, PATCH, PATCH)

    def forward(self, images: Tensor) -> Tensor:
        """Return one token per patch."""
        return super().forward(images).flatten(2).transpose(1, 2)


class BagOfWords(nn.EmbeddingBag):
    """Map texts (b, length) to unit-norm means of token embeddings."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return unit-norm features (b, width)."""
        return normalize(super().forward(tokens), dim=1)


class Towers(nn.Module):
    """A model of two towers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "text":
            self.x = self.y = Transformer(nn.Embedding(VOCABULARY, WIDTH), LENGTH)
        else:
            self.x, self.y = Transformer(Patches(), (IMAGE // PATCH) ** 2), BagOfWords(VOCABULARY, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit-norm features of both sides."""
        return self.x(x), self.y(y)


class Step:
    """One step of a model, on the full batch or in micro-batches."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = Towers(kind)
        self.objective = build("nuclr", num_samples=PAIRS)
        texts = torch.randint(VOCABULARY, (2, BATCH, LENGTH))
        self.x = texts[0] if kind == "text" else torch.randn(BATCH, 3, IMAGE, IMAGE)
        self.y = texts[1]
        self.index = torch.arange(BATCH)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def contrast(self, x: Tensor, y: Tensor) -> ObjectiveOutput:
        """Run the objective."""
        return self.objective(x, y, self.index)

    def __call__(self, way: str) -> None:
        """Add the gradients of one batch."""
        if way == "full batch":
            self.contrast(*self.model(self.x, self.y)).loss.backward()
        else:
            backward_in_micro_batches(self.model, (self.x, self.y), self.contrast, CHUNK)

    def seconds(self, way: str) -> tuple[float, float]:
        """Return the time of one step: wall clock and CPU."""
        start, cpu = time.perf_counter(), time.process_time()
        self(way)
        return time.perf_counter() - start, time.process_time() - cpu

    def largest_difference(self) -> float:
        """Return the largest difference of gradients to one graph of the same chunks, relative to the largest one."""
        parameters, results = list(self.model.parameters()), []
        for micro in (True, False):
            torch.manual_seed(1)
            self.objective = build("nuclr", num_samples=PAIRS)
            self.model.zero_grad()
            if micro:
                self("micro-batches")
            else:
                chunks = zip(self.x.split(CHUNK), self.y.split(CHUNK), strict=True)
                sides = zip(*(self.model(x, y) for x, y in chunks), strict=True)
                self.contrast(*(torch.cat(side) for side in sides)).loss.backward()
            results.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        return float((results[0] - results[1]).abs().max() / results[1].abs().max())


def measure_memory(kind: str, way: str) -> None:
    """Print by how much one step increases the peak memory of this process, in MiB."""
    step = Step(kind)
    step(way)
    ctypes.CDLL(None).malloc_trim(0)  # freed memory must not hide what the step allocates
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resident("VmRSS")
    step(way)
    print(resident("VmHWM") - before)


def resident(kind: str) -> float:
    """Return the memory of this process in MiB, now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def peak_memory(kind: str, way: str) -> float:
    """Return the peak memory of one step above what is there before, in MiB, measured in a new process."""
    command = [sys.executable, __file__, "--measure", kind, "--way", way, "--threads", str(torch.get_num_threads())]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "micro_batches.json")
    parser.add_argument("--measure", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.measure:
        return measure_memory(arguments.measure, arguments.way)

    rows, load = [], os.getloadavg()[0]
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, B = {BATCH} in chunks of {CHUNK}, "
        f"load of the machine before the run {load:.1f}"
    )
    print(
        f"{'towers':>8} {'parameters':>11} {'full s':>7} {'micro s':>8} {'ratio':>6} {'of CPU':>7} "
        f"{'full MiB':>9} {'micro MiB':>10} {'ratio':>6} {'largest difference':>19}"
    )
    for kind in MODELS:
        step = Step(kind)
        times = [{way: step.seconds(way) for way in WAYS} for _ in range(arguments.repeats + 1)][1:]
        full, micro = (min(turn[way][0] for turn in times) for way in WAYS)
        cpu_full, cpu_micro = (min(turn[way][1] for turn in times) for way in WAYS)
        memory = {way: peak_memory(kind, way) for way in WAYS}
        row = {
            "model": kind,
            "parameters": sum(parameter.numel() for parameter in step.model.parameters()),
            "seconds_full": full,
            "seconds_micro": micro,
            "time_ratio": micro / full,
            "cpu_seconds_full": cpu_full,
            "cpu_seconds_micro": cpu_micro,
            "cpu_time_ratio": cpu_micro / cpu_full,
            "mib_full": memory["full batch"],
            "mib_micro": memory["micro-batches"],
            "memory_ratio": memory["micro-batches"] / memory["full batch"],
            "largest_difference": step.largest_difference(),
        }
        rows.append(row)
        print(
            f"{kind:>8} {row['parameters']:11,} {full:7.2f} {micro:8.2f} {row['time_ratio']:6.2f} "
            f"{row['cpu_time_ratio']:7.2f} {row['mib_full']:9.0f} {row['mib_micro']:10.0f} "
            f"{row['memory_ratio']:6.3f} {row['largest_difference']:19.1e}",
            flush=True,
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"batch": BATCH, "chunk": CHUNK, "repeats": arguments.repeats, "threads": arguments.threads}
    content = settings | {"load_before": load, "rows": rows}
    arguments.out.write_text(json.dumps(content, indent=1))
    return None


if __name__ == "__main__":
    main()
