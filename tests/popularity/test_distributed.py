"""One and several real processes compute the same popularity."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nuclr.popularity import solve
from tests.popularity.reference import clustered, paired

CASES = [
    {"temperature": 0.1, "tolerance": 1e-11},
    {"temperature": 0.05, "tolerance": 1e-11, "memory": 0},
    {"temperature": 0.05, "tolerance": 1e-11, "method": "sinkhorn"},
    {"temperature": 0.05, "tolerance": 1e-11, "method": "anderson"},
    {"temperature": 0.1, "tolerance": 1e-11, "x_weight": torch.arange(1, 52), "y_weight": torch.arange(1, 71)},
    {"temperature": 0.001, "max_iterations": 40},  # at first no anchor chooses some of the candidates
]
UNCONVERGED = 5


def solve_all() -> list[dict]:
    torch.set_num_threads(1)
    x, y = paired(51, 70)  # an odd number of anchors: unequal shares
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, case in enumerate(CASES):
            scores = {"scores": x @ y.T} if number % 2 else {"x": x, "y": y}
            result = solve(**scores, **case)
            kept = {name: getattr(result, name) for name in ("zeta", "log_z", "residual", "iterations", "converged")}
            results.append(kept | {"extended": result.extend((x @ y.T)[:, :5] if number % 2 else y[:5])})
    few_x, few_y = paired(2, 5)  # fewer anchors than processes
    results.append({"zeta": solve(few_x, few_y, temperature=0.1, tolerance=1e-11).zeta})
    return results


def worker(rank: int, function: Callable[[], list[dict]], world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.save(function(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run(function: Callable[[], list[dict]], world: int, folder: Path) -> tuple[list[dict], list[list[dict]]]:
    """Return the results of this process alone, and of every one of `world` processes."""
    mp.spawn(worker, args=(function, world, str(folder)), nprocs=world)
    return function(), [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_share_the_anchors(tmp_path: Path, world: int) -> None:
    alone, shared = run(solve_all, world, tmp_path)
    for number, one in enumerate(alone):
        many = shared[0][number]
        for name, value in many.items():
            assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(other[number][name])) for other in shared)
        if number == UNCONVERGED:
            assert not many["converged"]
            continue
        for name in one.keys() - {"residual"}:
            torch.testing.assert_close(many[name], one[name], atol=1e-9, rtol=1e-9)


def estimate() -> list[dict]:
    torch.set_num_threads(1)
    x, y = clustered(701, 600)
    results = []
    for temperature in (0.05, 1.0):
        result = solve(x, y, temperature=temperature, method="sample", sample=150, tolerance=1e-6)
        results.append({name: getattr(result, name) for name in ("zeta", "log_z", "error")})
    return results


def test_processes_share_the_rows_of_an_estimate(tmp_path: Path) -> None:
    alone, shared = run(estimate, 2, tmp_path)
    for number, one in enumerate(alone):
        first, second = (results[number] for results in shared)
        assert torch.equal(first["zeta"], second["zeta"])
        torch.testing.assert_close(first["zeta"], one["zeta"], atol=1e-3 * (0.05, 1.0)[number], rtol=0)
        torch.testing.assert_close(first["log_z"], one["log_z"], atol=1e-2, rtol=0)
        assert first["error"] == pytest.approx(one["error"], rel=0.05)
