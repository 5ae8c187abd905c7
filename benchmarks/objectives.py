"""Measure time and memory of one step of each objective, next to plain InfoNCE and a lower bound, in one run.

    python benchmarks/objectives.py [--repeats 10] [--out benchmarks/results/objectives.json]

"infonce" is the fastest plain form: two cross-entropies of one score matrix. "two products" is the common form, which
multiplies the features once per side. "floor" is what every implementation needs: three B x B x d matrix products and
one exponential of a B x B matrix. All contestants of one size take turns, so that a busy machine slows all of them. The
order of turns is shuffled, because a contestant is faster after a similar one, and every turn uses other pairs. The
ratios are of the fastest of all repeats. The median is printed as well: it includes page faults of new memory, which
training pays for. Peak memory is that of one step in a new process, above the features. A second table has NUCLR's
extensions next to plain NUCLR, at B = 512.
"""

import argparse
import ctypes
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from nuclr.objectives import build, entry, names

PAIRS, WIDTH = 3_000_000, 256
SIZES, TEMPERATURES = (512, 1024, 2048, 4096), (0.05, 0.01)
RIVALS = ("infonce", "two products", "floor", "sogclr")
MEMORY_SIZE = 16384
EXTENSION_SIZE = 512
EXTENSIONS: dict[str, dict[str, object]] = {
    "nuclr": {},
    "one side (sides=x)": {"sides": "x"},
    "average.gamma_rule=proximal": {"average": {"gamma_rule": "proximal"}},
    "temperatures.learnt": {"temperatures": {"learnt": True}},
    "temperatures.individual": {"temperatures": {"individual": True}},
    "popularity=network": {"popularity": "network"},
    "both networks": {"popularity": "network", "normalizer": "network"},
    "state.sharding": {"state": {"sharding": True}},
    "2 x 2 views": {},
}


def make_features(size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (normalize(torch.randn(size, WIDTH, generator=generator), dim=1).requires_grad_() for _ in range(2))
    return x, y, torch.randperm(PAIRS, generator=generator)


def infonce_step(x: Tensor, y: Tensor, temperature: float, two_products: bool = False) -> None:
    labels = torch.arange(len(x))
    logits = x @ y.T / temperature
    other_logits = y @ x.T / temperature if two_products else logits.T
    ((cross_entropy(logits, labels) + cross_entropy(other_logits, labels)) / 2).backward()


def contestants(size: int, temperature: float) -> dict[str, Callable[[], object]]:
    x, y, numbers = make_features(size)
    indices = itertools.cycle(numbers[: PAIRS // size * size].split(size))
    fixed_x, fixed_y = x.detach(), y.detach()
    scores, exponentials = torch.empty(size, size), torch.empty(size, size)

    def floor() -> None:
        torch.mm(fixed_x, fixed_y.T, out=scores)
        torch.exp(scores, out=exponentials)
        torch.mm(exponentials, fixed_y)
        torch.mm(exponentials.T, fixed_x)

    def step(name: str) -> Callable[[], None]:
        objective = build(name, num_samples=PAIRS, temperature=temperature)

        def run() -> None:
            x.grad = y.grad = None
            objective(x, y, next(indices)).loss.backward()

        return run

    def infonce(two_products: bool) -> None:
        x.grad = y.grad = None
        infonce_step(x, y, temperature, two_products)

    plain: dict[str, Callable[[], object]] = {
        "infonce": partial(infonce, False),
        "two products": partial(infonce, True),
        "floor": floor,
    }
    return plain | {name: step(name) for name in names()}


def extensions(temperature: float) -> dict[str, Callable[[], object]]:
    """Return a step of plain NUCLR and of each of its extensions."""
    x, y, numbers = make_features(2 * EXTENSION_SIZE)
    views = [side.detach().view(EXTENSION_SIZE, 2, WIDTH).requires_grad_() for side in (x, y)]
    one_view = [side.detach()[:EXTENSION_SIZE].clone().requires_grad_() for side in (x, y)]
    indices = itertools.cycle(numbers[: PAIRS // EXTENSION_SIZE * EXTENSION_SIZE].split(EXTENSION_SIZE))

    def step(name: str, options: dict[str, object]) -> Callable[[], None]:
        objective = build("nuclr", num_samples=PAIRS, temperature=temperature, **options)
        features = views if "views" in name else one_view

        def run() -> None:
            for side in features:
                side.grad = None
            objective.zero_grad()
            objective(*features, next(indices)).loss.backward()

        return run

    return {name: step(name, options) for name, options in EXTENSIONS.items()}


def take_turns(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of `repeats` turns of each contestant, after two turns of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    for _ in range(repeats + 2):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    return {name: taken[2:] for name, taken in times.items()}


def peak_memory(name: str, size: int) -> float:
    """Return the peak memory of one step above the features in MiB, measured in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", name, "--size", str(size)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def measure(name: str, size: int) -> None:
    """Print by how much one step increases the peak memory of this process, in MiB."""
    kind, _, masked = name.partition(" ")
    objective = None if kind == "infonce" else build(kind, num_samples=PAIRS)
    for x, y, numbers in (
        make_features(512),
        make_features(size),
    ):  # a small one first: libraries allocate their buffers
        index = numbers[: len(x)]
        ctypes.CDLL(None).malloc_trim(0)  # freed memory must not hide what the step allocates
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = resident("VmRSS")
        if objective is None:
            infonce_step(x, y, 0.05)
        else:
            ids = index // 5 if masked else None  # five captions per image
            objective(x, y, index, x_id=ids).loss.backward()
    print(resident("VmHWM") - before)


def resident(kind: str) -> float:
    """Return the memory of this process in MiB, now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def print_extensions(repeats: int) -> dict[str, float]:
    """Print and return the seconds of the best step of each extension."""
    print(f"\nextensions of NUCLR, B = {EXTENSION_SIZE}, tau = {TEMPERATURES[0]}")
    costs = {name: min(taken) for name, taken in take_turns(extensions(TEMPERATURES[0]), repeats).items()}
    for name, seconds in costs.items():
        print(f"{name:>24} {seconds * 1e3:8.1f} ms {seconds / costs['nuclr']:8.2f} x nuclr")
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "objectives.json")
    parser.add_argument("--extensions", action="store_true", help="only the extensions of NUCLR")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return measure(arguments.measure, arguments.size)

    if arguments.extensions:
        print_extensions(arguments.repeats)
        return None
    rows = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, d = {WIDTH}, n = {PAIRS:,}")
    print(
        f"{'B':>5} {'tau':>5} {'objective':>12} {'ms':>8} {'x infonce':>10} {'x two products':>15} {'x floor':>8} "
        f"{'x sogclr':>9} {'median ms':>10} {'x infonce':>10}"
    )
    for size in SIZES:
        for temperature in TEMPERATURES:
            turns = take_turns(contestants(size, temperature), arguments.repeats)
            best = {name: min(taken) for name, taken in turns.items()}
            median = {name: statistics.median(taken) for name, taken in turns.items()}
            for name in turns:
                ratios = {f"to_{other.replace(' ', '_')}": best[name] / best[other] for other in RIVALS}
                to_median = median[name] / median["infonce"]
                print(
                    f"{size:5} {temperature:5} {name:>12} {best[name] * 1e3:8.1f} "
                    + "{:10.2f} {:15.2f} {:8.2f} {:9.2f}".format(*ratios.values())
                    + f" {median[name] * 1e3:10.1f} {to_median:10.2f}",
                    flush=True,
                )
                row = {"batch": size, "temperature": temperature, "objective": name, "seconds": best[name]} | ratios
                rows.append(row | {"median_seconds": median[name], "median_to_infonce": to_median})

    costs = print_extensions(arguments.repeats)
    print(f"\npeak memory of one step above the features, B = {MEMORY_SIZE}; one B x B float32 matrix is 1024 MiB")
    memory = {
        name: peak_memory(name, MEMORY_SIZE) for name in ("infonce", "sogclr", "isogclr", "nuclr", "nuclr masked")
    }
    for name, mebibytes in memory.items():
        print(f"{name:>12} {mebibytes:8.0f} MiB")
    stateful = [name for name in names() if entry(name).needs_num_samples]
    tables = {
        name: sum(buffer.nbytes for buffer in build(name, num_samples=PAIRS).buffers()) / PAIRS for name in stateful
    }
    print("\nstate, bytes per pair: " + ", ".join(f"{name} {size:.0f}" for name, size in tables.items()))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(
        json.dumps({"times": rows, "extensions": costs, "peak_mib": memory, "bytes_per_pair": tables}, indent=1)
    )
    return None


if __name__ == "__main__":
    main()
