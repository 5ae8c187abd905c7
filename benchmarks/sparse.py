"""The popularity solver's methods on several kinds of features: processor time, true error, reported error.

    python benchmarks/sparse.py [--sizes 10000 30000] [--kinds cca ridge NAME=FILE.npz] [--temperatures 0.03 0.2sd 1sd]
                                [--methods rough anderson sample warm] [--other SRC] [--problems 200]
                                [--busy 2]

Kinds: `cca` and `ridge` are captions of Flickr8k and the image of each, under heads of canonical correlation analysis
(256 dimensions) or of ridge regression from images to captions (384 dimensions; each image is repeated with noise of
norm 0.3). NAME=FILE reads the arrays q and d (unit norm) of a file. Sizes above that of the data repeat rows with noise
of 0.02 per coordinate. A temperature ending in `sd` is in standard deviations of the scores.

Methods: "sparse", and others of `solve`, which stop at a residual of 1e-3 if they are exact; `rough`, which is "sparse"
to a residual of 0.3; and `warm`, the estimate from a sample of 4,096, then "anderson" from there. Above 100,000 rows
only the estimate is computed, from a sample of 16,384, and its residual is that of 512 candidates. `--other` runs
method "sparse" of another version of nuclr, whose `src` folder it names, as `other`.

Each solve runs in a process of its own with one thread; `cpu` is its processor time without computing the features,
`MiB` its peak memory above them. `true` is the root mean square error of zeta / tau against a solution with a residual
of 1e-4 ("sparse", continued), and `residual` is max |c - 1| of the returned zeta, computed here in float64 sums.
`reported` is the error of an estimate or the residual of an exact method. Results are kept in --out; what is there is
not computed again.

`--busy N` solves a problem with all threads, alone and next to N processes that never wait, and prints seconds and
processor time.

`--problems N` checks the promise of `converged` instead: on N random parts of these features with random temperatures,
tolerances and shapes, the exact residual is at most the tolerance whenever `converged` is True.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.popularity import solve
from objectives import resident
from popularity import DATA, correlated_heads, load

TOLERANCES = {"reference": 1e-4, "rough": 0.3}
TOLERANCE = 1e-3  # of other methods
SAMPLE, LARGE_SAMPLE, LARGE = 4096, 16_384, 100_000
NOISE = 0.02


def ridge_heads(x: Tensor, y: Tensor, y_to_x: Tensor) -> tuple[Tensor, Tensor]:
    """Return unit-norm captions, and images mapped to them by ridge regression."""
    images = x[y_to_x].double()
    covariance = images.T @ images
    covariance.diagonal().add_(covariance.diagonal().mean())
    head = torch.linalg.solve(covariance, images.T @ y.double()).float()
    return normalize(x @ head, dim=1), normalize(y, dim=1)


def features(kind: str, size: int, data: Path) -> tuple[Tensor, Tensor]:
    """Return x and y of a kind of features, at most `size` rows each, in random order."""
    generator = torch.Generator().manual_seed(0)
    if "=" in kind:
        with np.load(kind.partition("=")[2]) as arrays:
            x, y = (normalize(torch.from_numpy(arrays[name].astype(np.float32)), dim=1) for name in "qd")
        rows_x, rows_y = (torch.randperm(len(t), generator=generator)[torch.arange(size) % len(t)] for t in (x, y))
        distinct = min(len(x), len(y))
    else:
        raw_x, raw_y, y_to_x, name = load(data)
        if "random" in name:
            raise SystemExit(f"--data {data}: no train.npz")
        x, y = (correlated_heads if kind == "cca" else ridge_heads)(raw_x, raw_y, y_to_x)
        distinct = len(y)
        rows_y = torch.randperm(distinct, generator=generator)[torch.arange(size) % distinct]
        rows_x = y_to_x[rows_y]
    x = x[rows_x]
    y = y[rows_y]
    if kind == "ridge":
        x = normalize(x + 0.3 * normalize(torch.randn(x.shape, generator=generator), dim=1), dim=1)
    if size > distinct:  # make all rows different
        x, y = (normalize(t + NOISE * torch.randn(t.shape, generator=generator), dim=1) for t in (x, y))
    return x, y


def temperature_of(name: str, x: Tensor, y: Tensor) -> float:
    return float(name[:-2]) * float((x[:2000] @ y[:2000].T).std()) if name.endswith("sd") else float(name)


def exact_residual(x: Tensor, y: Tensor, zeta: Tensor, temperature: float) -> float:
    """Compute the residual independently of the solver: scores in the features' precision, sums in float64."""
    total = torch.zeros(len(y), dtype=torch.float64)
    for rows in x.split(256):
        total += torch.softmax((rows @ y.T).sub_(zeta.to(rows)).div_(temperature), dim=1).double().sum(dim=0)
    return float((total * (len(y) / len(x)) - 1).abs().max())


def one_solve(kind: str, size: int, name: str, method: str, data: Path, folder: Path) -> dict[str, object]:
    """Solve in this process, and write zeta."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    x, y = features(kind, size, data)
    temperature = temperature_of(name, x, y)
    options = {"temperature": temperature, "tolerance": TOLERANCES.get(method, TOLERANCE)}
    if method == "reference":
        options["init"] = torch.from_numpy(np.load(folder / "sparse.npy"))
    sample = LARGE_SAMPLE if size > LARGE else SAMPLE
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    cpu = time.process_time()
    if method == "warm":
        start = solve(x, y, method="sample", sample=sample, **options).zeta
        result = solve(x, y, method="anderson", init=start, **options)
    elif method == "sample":
        result = solve(x, y, method="sample", sample=sample, **options)
    else:
        result = solve(x, y, method="sparse" if method in ("other", *TOLERANCES) else method, **options)
    cpu = time.process_time() - cpu
    peak = resident("VmHWM") - before
    np.save(folder / f"{method}.npy", result.zeta.double().numpy())
    return {
        "kind": kind.partition("=")[0], "n": len(y), "tau": temperature, "method": method, "cpu": cpu, "mib": peak,
        "passes": result.iterations, "converged": result.converged,
        "reported": result.residual if result.error is None else result.error,
        "residual": result.residual if size > LARGE else exact_residual(x, y, result.zeta, temperature),
    }  # fmt: skip


def show(name: str, row: dict[str, object]) -> None:
    reached = f"{row['residual']:9.2g} {row['reported']:9.2g} {row.get('true', np.nan):8.4f} {row['converged']!s:>9}"
    print(
        f"{row['kind']:>12} {row['n']:7} {name:>6} {row['tau']:6.4f} {row['method']:>9} {row['cpu']:8.1f} "
        f"{row['passes']:6} {row['mib']:6.0f} {reached}",
        flush=True,
    )


def compare(arguments: argparse.Namespace) -> None:
    """Fill the table; every solve is a process, and its row is stored when it ends."""
    done = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"{'features':>12} {'n':>7} {'':>6} {'tau':>6} {'method':>9} {'cpu, s':>8} {'passes':>6} {'MiB':>6} "
        f"{'residual':>9} {'reported':>9} {'true':>8} {'converged':>9}"
    )
    methods = dict.fromkeys(["sparse", "reference", *arguments.methods, *(["other"] if arguments.other else [])])
    for size in arguments.sizes:
        for kind in arguments.kinds:
            for name in arguments.temperatures:
                folder = arguments.out.parent / "zeta" / f"{kind.partition('=')[0]}-{size}-{name}"
                folder.mkdir(parents=True, exist_ok=True)
                keys = {method: f"{folder.name}-{method}" for method in (methods if size <= LARGE else ["sample"])}
                for method, key in keys.items():
                    if key not in done:
                        command = [sys.executable, __file__, "--data", str(arguments.data)]
                        command += ["--one", kind, str(size), name, method, str(folder)]
                        environment = os.environ | ({"PYTHONPATH": arguments.other} if method == "other" else {})
                        output = subprocess.run(
                            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
                        ).stdout
                        done[key] = json.loads(output)
                        arguments.out.write_text(json.dumps(done, indent=1))
                for method, key in keys.items():
                    if "reference" in keys:
                        zeta, best = (np.load(folder / f"{m}.npy") for m in (method, "reference"))
                        done[key]["true"] = float((zeta - best).std()) / done[key]["tau"]
                    show(name, done[key])
                arguments.out.write_text(json.dumps(done, indent=1))


def check_promise(count: int, kinds: list[str], data: Path) -> None:
    """Compare the exact residual with the tolerance on random problems, and print how often `converged` is true."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sides = [features(kind, 30_000, data) for kind in kinds]
    generator = np.random.default_rng(0)
    converged = good = broken = 0
    worst = 0.0
    for _ in range(count):
        x, y = sides[generator.integers(len(sides))]
        n_x, n_y = generator.integers(100, 1500, size=2)
        first = int(generator.integers(len(x) - n_x))
        x = x[first : first + n_x]
        first = min(first, len(y) - n_y) if generator.random() < 0.7 else int(generator.integers(len(y) - n_y))
        y = y[first : first + n_y]
        temperature = float(np.exp(generator.uniform(np.log(0.005), np.log(0.3))))
        tolerance = float(10 ** generator.uniform(-5, -1))
        method = generator.choice(["sparse", "anderson", "sinkhorn", "sample"])
        passes = int(generator.choice([20, 1000]))
        result = solve(
            x, y, temperature=temperature, tolerance=tolerance, method=method, max_iterations=passes, sample=200
        )
        residual = exact_residual(x.double(), y.double(), result.zeta, temperature)
        converged += result.converged
        good += residual <= tolerance
        worst = max(worst, residual / tolerance if result.converged else 0.0)
        if result.converged and residual > tolerance:
            broken += 1
            print(f"broken: {n_x} x {n_y}, tau {temperature:.4f}, tolerance {tolerance:.2g}, {method}: {residual:.3g}")
    print(
        f"{count} problems: residual within the tolerance {good}, converged {converged}, of these above it {broken}; "
        f"largest residual / tolerance where converged: {worst:.4f}"
    )


def next_to_busy(count: int, data: Path) -> None:
    """Print what one problem takes on a quiet machine and next to busy processes, with and without a kept matrix."""
    x, y = features("ridge", 8000, data)
    for number in (0, count):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
        try:
            for memory in (2**30, 2**26):
                cpu = time.process_time()
                begin = time.perf_counter()
                solve(x, y, temperature=0.03, memory=memory)
                wall = time.perf_counter() - begin
                print(
                    f"{number} busy processes, memory {memory >> 20} MiB: {wall:.1f} s, "
                    f"processor time {time.process_time() - cpu:.1f} s"
                )
        finally:
            for other in others:
                other.kill()
                other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sparse.json")
    parser.add_argument("--sizes", nargs="+", type=int, default=[10_000, 30_000])
    parser.add_argument("--kinds", nargs="+", default=["cca", "ridge"])
    parser.add_argument("--temperatures", nargs="+", default=["0.03", "0.2sd", "1sd"])
    parser.add_argument("--methods", nargs="+", default=["rough", "anderson", "sample", "warm"])
    parser.add_argument("--other", metavar="SRC")
    parser.add_argument("--problems", type=int)
    parser.add_argument("--busy", type=int)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, size, name, method, folder = arguments.one
        print(json.dumps(one_solve(kind, int(size), name, method, arguments.data, Path(folder))))
    elif arguments.busy:
        next_to_busy(arguments.busy, arguments.data)
    elif arguments.problems:
        check_promise(arguments.problems, arguments.kinds, arguments.data)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
