"""The popularity solver against POT, geomloss and the paper's gradient descent: one problem, one residual, one run.

    python benchmarks/popularity.py [--full] [--heads correlated] [--data ../shared/data/flickr8k/embeddings]

The problem: 6,000 images of Flickr8k and the first caption of each, linear heads to 256 dimensions, unit norm. The
heads are random, trained for three epochs of InfoNCE, computed by regularized canonical correlation analysis, or taken
from a run: --heads FILE reads the output of `nuclr embed RUN --out FILE`. Without the data, random features of the same
size are used.

All solvers stop at the true residual max_j |(n_y/n_x) sum_i P_ij - 1| <= 1e-3 of their own iterate, computed by this
script in float64. POT uses another stopping norm, so it runs for exactly the iterations that it needs, counted before
by a loop of its formula. `from features` includes computing the scores or costs. Ours is the median of three runs.
POT's sinkhorn_log and sinkhorn_stabilized have the same iterates as sinkhorn_knopp: three iterations are timed and
extrapolated (~). greenkhorn and geomloss cannot stop at a residual: greenkhorn gets 20,000 iterations and geomloss two
lengths of its annealing, and the table shows the residual that they reached. The paper's gradient descent gets 1,000
passes. --full adds n = 30,000 with its peak memory and n = 100,000.
"""

import argparse
import ctypes
import json
import platform
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

from nuclr.popularity import Result, solve
from objectives import resident

RESIDUAL, WIDTH = 1e-3, 256
FEW, GREEDY = 3, 20_000  # iterations of methods that are too slow to finish
DATA = Path(__file__).parents[2] / "shared" / "data" / "flickr8k" / "embeddings"


def load(folder: Path) -> tuple[Tensor, Tensor, Tensor, str]:
    """Return x (N_x, d_x) standardized, y (N_y, d_y), y_to_x (N_y,), and a name of the data."""
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


def random_heads(x: Tensor, y: Tensor, y_to_x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """Return unit-norm features of random heads: an easy problem, because no candidate stands out."""
    generator = torch.Generator().manual_seed(0)
    return tuple(normalize(t @ torch.randn(t.shape[1], WIDTH, generator=generator), dim=1) for t in (x, y))


def trained_heads(x: Tensor, y: Tensor, y_to_x: Tensor, epochs: int = 3) -> tuple[Tensor, Tensor]:
    """Return unit-norm features of linear heads after a few epochs of InfoNCE."""
    torch.manual_seed(0)
    head_x, head_y = (torch.nn.Linear(t.shape[1], WIDTH, bias=False) for t in (x, y))
    optimizer = torch.optim.AdamW([*head_x.parameters(), *head_y.parameters()], lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(256):
            logits = normalize(head_x(x[y_to_x[batch]]), dim=1) @ normalize(head_y(y[batch]), dim=1).T / 0.05
            labels = torch.arange(len(batch))
            optimizer.zero_grad()
            (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)).backward()
            optimizer.step()
    with torch.no_grad():
        return normalize(head_x(x), dim=1), normalize(head_y(y), dim=1)


def correlated_heads(x: Tensor, y: Tensor, y_to_x: Tensor, ridge: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return unit-norm features of regularized canonical correlation analysis: trained heads in closed form."""
    y = (y - y.mean(dim=0)) / y.std()
    whiten = []
    for t in (x, y):
        covariance = (t.T @ t / len(t)).double()
        covariance.diagonal().add_(ridge * covariance.diagonal().mean())
        values, vectors = torch.linalg.eigh(covariance)
        whiten.append((vectors * values.rsqrt()) @ vectors.T)
    cross = (x[y_to_x].T @ y / len(y)).double()
    left, correlation, right = torch.linalg.svd(whiten[0] @ cross @ whiten[1], full_matrices=False)
    heads = whiten[0] @ left[:, :WIDTH], whiten[1] @ right[:WIDTH].T
    return tuple(normalize(t @ (h * correlation[:WIDTH]).float(), dim=1) for t, h in zip((x, y), heads, strict=True))


def heads_of_run(file: Path) -> tuple[Tensor, Tensor]:
    """Return the features of a trained run."""
    with np.load(file) as arrays:
        return tuple(torch.from_numpy(arrays[name].astype(np.float32)) for name in ("x", "y"))


HEADS = {"random": random_heads, "trained": trained_heads, "correlated": correlated_heads}


def true_residual(x: Tensor, y: Tensor, zeta: Tensor, temperature: float) -> float:
    """Compute the residual densely in float64, independently of all solvers."""
    probabilities = torch.softmax((x.double() @ y.double().T - zeta.double()) / temperature, dim=1)
    return float((probabilities.sum(dim=0) * len(y) / len(x) - 1).abs().max())


def timed(run: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def pot_iterations(cost: np.ndarray, temperature: float, most: int) -> int:
    """Count the Sinkhorn-Knopp iterations, in POT's order, until the true residual is reached."""
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
    """Return the seconds of every solver, from scores and from features, and the true residual of its result."""
    n = len(x)
    rows: list[dict[str, object]] = []

    def add(
        name: str, seconds: float, making: float, passes: int, zeta: Tensor | None, estimated: bool = False
    ) -> None:
        rows.append({
            "method": name, "from_scores": seconds, "from_features": seconds + making, "passes": passes,
            "residual": None if zeta is None else true_residual(x, y, zeta, temperature), "estimated": estimated,
        })  # fmt: skip

    def ours(**arguments: object) -> tuple[float, Result]:
        runs = [timed(lambda: solve(**arguments, temperature=temperature, tolerance=RESIDUAL)) for _ in range(3)]
        return sorted(runs, key=lambda run: run[0])[1]

    seconds, result = ours(scores=x @ y.T)
    add("nuclr", seconds, ours(x=x, y=y)[0] - seconds, result.iterations, result.zeta)

    making, cost = timed(lambda: 1 - x.double().numpy() @ y.double().numpy().T)
    marginal, count = np.full(n, 1 / n), pot_iterations(cost, temperature, 5000)
    problem = (marginal, marginal, cost, temperature)
    exact = {"stopThr": 0, "log": True, "warn": False}
    seconds, (_, log) = timed(lambda: ot.bregman.sinkhorn_knopp(*problem, numItermax=count, **exact))
    add("POT sinkhorn_knopp", seconds, making, count, -temperature * torch.from_numpy(np.log(log["v"])))

    making_32, cost_32 = timed(lambda: 1 - x @ y.T)
    uniform = torch.full((n,), 1 / n)
    seconds, (_, log) = timed(
        lambda: ot.bregman.sinkhorn_knopp(uniform, uniform, cost_32, temperature, numItermax=count, **exact)
    )
    add("POT knopp, torch float32", seconds, making_32, count, -temperature * log["v"].log())

    seconds, (_, log) = timed(lambda: ot.bregman.greenkhorn(*problem, numItermax=GREEDY, **exact))
    add("POT greenkhorn", seconds, making, GREEDY, -temperature * torch.from_numpy(np.log(log["v"])))
    for method in (
        ot.bregman.sinkhorn_stabilized,
        ot.bregman.sinkhorn_log,
    ):  # same iterates as sinkhorn_knopp, so the same number of them
        seconds, _ = timed(lambda m=method: m(*problem, numItermax=FEW, **exact))
        add(f"POT {method.__name__}", seconds * count / FEW, making, count, None, estimated=True)

    for scaling in (0.5, 0.9):
        loss = geomloss.SamplesLoss(
            "sinkhorn", p=2, blur=temperature**0.5, scaling=scaling, debias=False, potentials=True,
            backend="tensorized", cost=lambda a, b: 1 - a @ b.transpose(-1, -2),
        )  # fmt: skip
        seconds, (_, potential) = timed(lambda loss=loss: loss(x, y))
        add(f"geomloss, scaling {scaling}", seconds, 0.0, 0, -potential.flatten())

    for method, name in (("sinkhorn", "nuclr, plain sinkhorn"), ("gradient", "the paper's gradient descent")):
        seconds, result = timed(
            lambda m=method: solve(
                scores=x @ y.T, temperature=temperature, tolerance=RESIDUAL, method=m, max_iterations=1000
            )
        )
        add(name, seconds, making_32, result.iterations, result.zeta)
    return rows


def show(title: str, rows: list[dict[str, object]]) -> None:
    print(f"\n{title}\n{'':>30} {'from scores':>18} {'from features':>18}")
    print(f"{'method':>30} {'seconds':>9} {'x nuclr':>8} {'seconds':>9} {'x nuclr':>8} {'passes':>7} {'residual':>9}")
    for row in rows:
        residual = "" if row["residual"] is None else f"{row['residual']:.1e}"
        mark = "~" if row["estimated"] else " "
        times = "".join(f" {mark}{row[k]:8.2f} {row[k] / rows[0][k]:8.1f}" for k in ("from_scores", "from_features"))
        print(f"{row['method']:>30}{times} {row['passes']:7} {residual:>9}", flush=True)


def large(folder: Path, size: int, temperature: float, tolerance: float) -> None:
    """Print seconds, passes, residual and peak memory above the features of one large solve."""
    x, y, y_to_x, _ = load(folder)
    x, y = correlated_heads(x, y, y_to_x)
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(size) % len(y)
    x, y = x[y_to_x[rows]], y[rows]
    if size > len(y_to_x):  # make all samples different
        x, y = (normalize(t + 0.02 * torch.randn(t.shape, generator=generator), dim=1) for t in (x, y))
    ctypes.CDLL(None).malloc_trim(0)  # freed memory must not hide what the solver allocates
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    seconds, result = timed(lambda: solve(x, y, temperature=temperature, tolerance=tolerance, progress=True))
    print(json.dumps({
        "n": size, "temperature": temperature, "seconds": seconds, "passes": result.iterations,
        "residual": result.residual, "peak_mib": resident("VmHWM") - before,
    }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "popularity.json")
    parser.add_argument("--heads", nargs="+", metavar=f"{{{','.join(HEADS)}}}|FILE", default=list(HEADS))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.03, 0.01])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--large", nargs=3, type=float, metavar=("N", "TAU", "TOLERANCE"), help="one large solve only")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.large:
        return large(arguments.data, int(arguments.large[0]), *arguments.large[1:])

    x, y, y_to_x, kind = load(arguments.data)
    firsts = torch.searchsorted(y_to_x.contiguous(), torch.arange(len(x)))
    print(f"{kind}, torch {torch.__version__}, POT {ot.__version__}, {torch.get_num_threads()} threads")
    results: dict[str, object] = {"machine": f"{platform.processor()}, {torch.get_num_threads()} threads", "data": kind}
    for name in arguments.heads:
        features_x, features_y = HEADS[name](x, y, y_to_x) if name in HEADS else heads_of_run(Path(name))
        for temperature in arguments.temperatures:
            rows = contest(features_x, features_y[firsts].contiguous(), temperature)
            show(f"{name} heads, n = {len(x)}, tau = {temperature}, true residual {RESIDUAL}", rows)
            results[f"{name} {temperature}"] = rows
    print(
        f"\ncost as n grows, {name} heads, tau = 0.03, matrix kept up to 4 GiB\n{'n':>7} {'seconds':>8} {'passes':>7}"
    )
    growth = []
    for size in (750, 1500, 3000, 6000, 12000):
        rows = torch.arange(size) * (len(y) // 12000)
        problem = features_x[y_to_x[rows]], features_y[rows]
        seconds, result = timed(lambda p=problem: solve(*p, temperature=0.03, tolerance=RESIDUAL))
        growth.append({"n": size, "seconds": seconds, "passes": result.iterations})
        print(f"{size:7} {seconds:8.2f} {result.iterations:7}")
    results["growth"] = growth
    if arguments.full:
        results["large"] = []
        for values in (("30000", "0.03", "1e-3"), ("100000", "0.05", "1e-2")):
            command = [sys.executable, __file__, "--data", str(arguments.data), "--large", *values]
            measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            print(measured)
            results["large"].append(measured)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1))
    return None


if __name__ == "__main__":
    main()
