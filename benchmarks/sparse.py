"""The sparse popularity method against the exact solver: time, memory, rank correlation, and the error it reports.

    python benchmarks/sparse.py [--sizes 10000 30000 100000 1000000] [--temperatures 0.03 0.05] [--exact-up-to 30000]
                                [--data ../shared/data/flickr8k/embeddings]

The problem: captions of Flickr8k and the image of each, heads of canonical correlation analysis, 256 dimensions, unit
norm. Sizes above 30,000 repeat the captions with noise of 0.02 per coordinate, so that all rows differ. The features
are float32 files that each solver opens as np.memmap, in a process of its own.

The exact solver stops at a residual of 1e-3 and runs up to the size --exact-up-to. Above it, up to 200,000 rows, one
pass of the exact solver is timed and multiplied by the number of passes at the largest size that was solved; such
numbers are marked with ~. The exact zeta of these sizes is found in fewer passes, from the sparse zeta, to a residual
of 5e-3. `cpu` is the processor time of all threads, which a busy machine distorts less than `wall`.
`true` and `reported` are the root mean square error of zeta / tau, `std` is the standard deviation of zeta / tau.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

from nuclr.evaluation.ranks import rank_correlation
from nuclr.popularity import solve
from objectives import resident
from popularity import DATA, correlated_heads, load

RESIDUAL, WARM_RESIDUAL, NOISE, CHUNK = 1e-3, 5e-3, 0.02, 100_000
LARGEST_PASS = 200_000


def write_features(folder: Path, size: int, data: Path) -> None:
    """Write x.npy and y.npy, (size, 256) float32, a chunk at a time."""
    x, y, y_to_x, _ = load(data)
    x, y = correlated_heads(x, y, y_to_x)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(y), generator=generator)
    files = {n: np.lib.format.open_memmap(folder / f"{n}.npy", "w+", np.float32, (size, x.shape[1])) for n in "xy"}
    for start in range(0, size, CHUNK):
        rows = order[torch.arange(start, min(start + CHUNK, size)) % len(y)]
        for name, side in (("x", x[y_to_x[rows]]), ("y", y[rows])):
            if size > len(y):  # make all rows different
                side = normalize(side + NOISE * torch.randn(side.shape, generator=generator), dim=1)
            files[name][start : start + len(rows)] = side.numpy()


def one_solve(folder: Path, method: str, temperature: float, passes: int, warm: bool) -> dict[str, object]:
    """Solve in this process, from the sparse zeta if `warm`; return time, memory and quality, and write zeta."""
    warnings.simplefilter("ignore")
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    start, cpu = time.perf_counter(), time.process_time()
    init, residual = (np.load(folder / "zeta_sparse.npy"), WARM_RESIDUAL) if warm else (None, RESIDUAL)
    result = solve(x, y, temperature=temperature, method=method, tolerance=residual, max_iterations=passes, init=init)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    np.save(folder / f"zeta_{method}.npy", result.zeta.numpy())
    return {
        "method": result.method, "wall": wall, "cpu": cpu, "passes": result.iterations, "peak_mib": resident("VmHWM"),
        "converged": result.converged, "reported": result.error, "std": float(result.zeta.std()) / temperature,
    }  # fmt: skip


def in_own_process(
    folder: Path, method: str, temperature: float, passes: int = 10_000, warm: bool = False
) -> dict[str, object]:
    start = "warm" if warm else "cold"
    command = [sys.executable, __file__, "--one", str(folder), method, str(temperature), str(passes), start]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def compare(folder: Path, size: int, temperature: float, exact_up_to: int, passes: int | None) -> dict[str, object]:
    """Run both methods on the features of a folder; `passes` is what an exact solve is expected to need."""
    sparse = in_own_process(folder, "sparse", temperature)
    row: dict[str, object] = {"n": size, "temperature": temperature, "sparse": sparse}
    if size <= exact_up_to:
        row["exact"] = in_own_process(folder, "anderson", temperature)
    elif size <= LARGEST_PASS and passes:
        one = in_own_process(folder, "anderson", temperature, passes=1)
        row["exact"] = {"wall": passes * one["wall"], "cpu": passes * one["cpu"], "passes": passes, "estimated": True}
        in_own_process(folder, "anderson", temperature, warm=True)
    if "exact" in row:
        zeta, exact = (torch.from_numpy(np.load(folder / f"zeta_{m}.npy")) for m in ("sparse", "anderson"))
        row["true"] = float((zeta - exact).std()) / temperature
        row["rank_correlation"] = rank_correlation(zeta, exact)
    return row


def show(row: dict[str, object]) -> None:
    sparse, exact = row["sparse"], row.get("exact")
    mark = "~" if exact and exact.get("estimated") else " "
    times = f"{mark}{exact['cpu']:8.0f} {mark}{exact['cpu'] / sparse['cpu']:6.1f}" if exact else " " * 17
    true = f"{row['true']:8.3f} {row['rank_correlation']:8.4f}" if "true" in row else " " * 17
    print(
        f"{row['n']:8} {row['temperature']:5} {sparse['method']:>20} {sparse['wall']:8.0f} {sparse['cpu']:8.0f} "
        f"{times} {sparse['peak_mib']:8.0f} {sparse['reported']:8.3f} {true} {sparse['std']:6.2f} "
        f"{sparse['converged']!s:>9}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sparse.json")
    parser.add_argument("--sizes", nargs="+", type=int, default=[10_000, 30_000, 100_000, 1_000_000])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.03, 0.05])
    parser.add_argument("--exact-up-to", type=int, default=30_000)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        folder, method, temperature, passes, start = arguments.one
        print(json.dumps(one_solve(Path(folder), method, float(temperature), int(passes), start == "warm")))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; exact to a residual of {RESIDUAL}")
    print(
        f"{'n':>8} {'tau':>5} {'sparse method':>20} {'wall':>8} {'cpu':>8} {'exact':>9} {'ratio':>7} {'peak MiB':>8} "
        f"{'reported':>8} {'true':>8} {'rank cor':>8} {'std':>6} {'converged':>9}"
    )
    rows: list[dict[str, object]] = []
    passes: dict[float, int] = {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as name:
            write_features(Path(name), size, arguments.data)
            for temperature in arguments.temperatures:
                row = compare(Path(name), size, temperature, arguments.exact_up_to, passes.get(temperature))
                if size <= arguments.exact_up_to:
                    passes[temperature] = row["exact"]["passes"]
                rows.append(row)
                show(row)
                machine = f"{platform.processor()}, {torch.get_num_threads()} threads"
                arguments.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
