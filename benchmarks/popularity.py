"""The popularity solver against POT, geomloss and the paper's gradient descent: one problem, one residual, one run.

    python benchmarks/popularity.py [--full] [--data ../shared/data/flickr8k/embeddings]

The problem: 6,000 images of Flickr8k and the first caption of each, linear heads to 256, unit norm; heads drawn at
random, and trained for three epochs of InfoNCE. Without the data, random features of the same size. All are stopped
at the true residual max_j |(n_y/n_x) sum_i P_ij - 1| <= 1e-3 of their own iterate: POT runs for exactly the iterations
that it needs, which a loop of its own formula in float64 has counted before. What is too slow to wait for is timed over
a few iterations and multiplied by their number, and marked with ~. --full adds n = 30,000 and n = 100,000, with their
peak memory.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import geomloss
import numpy as np
import ot
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from nuclr.popularity import solve
from objectives import resident

RESIDUAL, WIDTH = 1e-3, 256
DATA = Path(__file__).parents[2] / "shared" / "data" / "flickr8k" / "embeddings"


def load(folder: Path) -> tuple[Tensor, Tensor, Tensor, str]:
    """x (N_x, d_x) standardised, y (N_y, d_y), y_to_x (N_y,), and what they are."""
    if not (folder / "train.npz").is_file():
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(6000, 64, generator=generator)
        x = hidden @ torch.randn(64, 1280, generator=generator)
        y = hidden.repeat_interleave(5, 0) @ torch.randn(64, 384, generator=generator)
        return x, y + y.std() * torch.randn(y.shape, generator=generator), torch.arange(30000) // 5, "random features"
    with np.load(folder / "train.npz") as arrays:
        x, y = (torch.from_numpy(arrays[name].astype(np.float32)) for name in ("x", "y"))
        y_to_x = torch.from_numpy(arrays["y_to_x"].astype(np.int64))
    return (x - x.mean(dim=0)) / x.std(dim=0), y, y_to_x, "Flickr8k embeddings"


def heads(x: Tensor, y: Tensor, y_to_x: Tensor, epochs: int) -> tuple[Tensor, Tensor]:
    """Unit-norm features of linear heads, random ones (0 epochs) or trained."""
    torch.manual_seed(0)
    head_x, head_y = (torch.nn.Linear(t.shape[1], WIDTH, bias=False) for t in (x, y))
    optimiser = torch.optim.AdamW([*head_x.parameters(), *head_y.parameters()], lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(256):
            logits = normalize(head_x(x[y_to_x[batch]]), dim=1) @ normalize(head_y(y[batch]), dim=1).T / 0.05
            labels = torch.arange(len(batch))
            optimiser.zero_grad()
            (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)).backward()
            optimiser.step()
    with torch.no_grad():
        return normalize(head_x(x), dim=1), normalize(head_y(y), dim=1)


def true_residual(x: Tensor, y: Tensor, zeta: Tensor, temperature: float) -> float:
    """Written again here, dense and in float64, to judge all contestants alike."""
    probabilities = torch.softmax((x.double() @ y.double().T - zeta.double()) / temperature, dim=1)
    return float((probabilities.sum(dim=0) * len(y) / len(x) - 1).abs().max())


def timed(run: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found


def pot_iterations(cost: np.ndarray, temperature: float, most: int) -> int:
    """Iterations of Sinkhorn and Knopp's until the true residual is reached."""
    n = len(cost)
    kernel, u = np.exp(cost / -temperature), np.full(n, 1 / n)
    v = u
    for count in range(most):
        reached = kernel.T @ u
        if count and np.abs(n * v * reached - 1).max() <= RESIDUAL:
            return count
        v = 1 / n / reached
        u = 1 / n / (kernel @ v)
    return most


def contest(x: Tensor, y: Tensor, temperature: float) -> list[dict[str, object]]:
    """Every contestant's seconds and the residual of what it returned."""
    n = len(x)
    marginal = np.full(n, 1 / n)
    cost = 1 - x.double().numpy() @ y.double().numpy().T
    rows: list[dict[str, object]] = []

    def add(name: str, seconds: float, passes: int, residual: float | None, estimated: bool = False) -> None:
        row = {"method": name, "seconds": seconds, "passes": passes, "residual": residual, "estimated": estimated}
        rows.append(row)

    runs = [timed(lambda: solve(x, y, temperature=temperature, tolerance=RESIDUAL)) for _ in range(3)]
    seconds, found = min(runs, key=lambda run: run[0])
    add("nuclr", seconds, found.iterations, true_residual(x, y, found.zeta, temperature))

    count = pot_iterations(cost, temperature, 5000)
    seconds, (_, log) = timed(
        lambda: ot.bregman.sinkhorn_knopp(
            marginal, marginal, cost, temperature, numItermax=count, stopThr=0, log=True, warn=False
        )
    )
    zeta = -temperature * torch.from_numpy(np.log(log["v"]))
    add("POT sinkhorn_knopp", seconds, count, true_residual(x, y, zeta, temperature))

    few = 3
    for name in ("sinkhorn_log", "sinkhorn_stabilized"):
        method = getattr(ot.bregman, name)
        seconds, _ = timed(
            lambda method=method: method(marginal, marginal, cost, temperature, numItermax=few, stopThr=0, warn=False)
        )
        add(f"POT {name}", seconds * count / few, count, None, estimated=True)

    loss = geomloss.SamplesLoss(
        "sinkhorn", p=2, blur=temperature**0.5, scaling=0.95, debias=False, potentials=True, backend="tensorized",
        cost=lambda a, b: 1 - a @ b.transpose(-1, -2),
    )  # fmt: skip
    seconds, (_, potential) = timed(lambda: loss(x, y))
    add("geomloss, scaling 0.95", seconds, 0, true_residual(x, y, -potential.flatten(), temperature))

    for method, most in (("sinkhorn", 3000), ("gradient", 300)):
        seconds, found = timed(
            lambda m=method, k=most: solve(
                x, y, temperature=temperature, tolerance=RESIDUAL, method=m, max_iterations=k
            )
        )
        told = "the paper's gradient descent" if method == "gradient" else "nuclr, plain sinkhorn"
        add(told, seconds, found.iterations, true_residual(x, y, found.zeta, temperature))
    return rows


def show(title: str, rows: list[dict[str, object]]) -> None:
    print(f"\n{title}\n{'method':>30} {'seconds':>10} {'x nuclr':>8} {'passes':>7} {'residual':>9}")
    for row in rows:
        mark = "~" if row["estimated"] else " "
        residual = "" if row["residual"] is None else f"{row['residual']:.1e}"
        ratio = row["seconds"] / rows[0]["seconds"]
        print(f"{row['method']:>30} {mark}{row['seconds']:9.2f} {ratio:8.1f} {row['passes']:7} {residual:>9}")


def large(folder: Path, size: int, temperature: float, tolerance: float) -> None:
    """Print seconds, passes, residual and peak memory above the features of one large solve."""
    x, y, y_to_x, _ = load(folder)
    x, y = heads(x, y, y_to_x, epochs=3)
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(size) % len(y)
    x, y = x[y_to_x[rows]], y[rows]
    if size > len(y_to_x):  # no two samples alike
        x, y = (normalize(t + 0.02 * torch.randn(t.shape, generator=generator), dim=1) for t in (x, y))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    seconds, found = timed(lambda: solve(x, y, temperature=temperature, tolerance=tolerance, progress=True))
    print(json.dumps({
        "n": size, "temperature": temperature, "seconds": seconds, "passes": found.iterations,
        "residual": found.residual, "peak_mib": resident("VmHWM") - before,
    }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "popularity.json")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--large", nargs=3, type=float, metavar=("N", "TAU", "TOLERANCE"), help="one large solve only")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.large:
        return large(arguments.data, int(arguments.large[0]), *arguments.large[1:])

    x, y, y_to_x, kind = load(arguments.data)
    firsts = torch.searchsorted(y_to_x.contiguous(), torch.arange(len(x)))
    print(f"{kind}, torch {torch.__version__}, POT {ot.__version__}, {torch.get_num_threads()} threads")
    results: dict[str, object] = {}
    for head, epochs in (("random", 0), ("trained", 3)):
        features_x, features_y = heads(x, y, y_to_x, epochs)
        for temperature in (0.03, 0.01):
            rows = contest(features_x, features_y[firsts].contiguous(), temperature)
            show(f"{head} heads, n = {len(x)}, tau = {temperature}, true residual {RESIDUAL}", rows)
            results[f"{head} {temperature}"] = rows
    print(f"\ncost as n grows, trained heads, tau = 0.03\n{'n':>7} {'seconds':>8} {'passes':>7}")
    growth = []
    for size in (750, 1500, 3000, 6000, 12000):
        rows = torch.arange(size) * (len(y) // 12000)
        problem = features_x[y_to_x[rows]], features_y[rows]
        seconds, found = timed(lambda p=problem: solve(*p, temperature=0.03, tolerance=RESIDUAL))
        growth.append({"n": size, "seconds": seconds, "passes": found.iterations})
        print(f"{size:7} {seconds:8.2f} {found.iterations:7}")
    results["growth"] = growth
    if arguments.full:
        results["large"] = []
        for values in (("30000", "0.03", "1e-3"), ("100000", "0.05", "1e-2")):
            command = [sys.executable, __file__, "--data", str(arguments.data), "--large", *values]
            told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            print(told)
            results["large"].append(told)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1))
    return None


if __name__ == "__main__":
    main()
