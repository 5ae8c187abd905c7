"""Run by torchrun in test_distributed.py: train small two-tower models, and pass wrong input on one process.

Usage: torchrun --nproc_per_node K tests/objectives/worker.py OUT
Every process writes OUT/{rank}.pt with its final weights, state and losses, and the messages of refused input.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nuclr.objectives import build

PAIRS, BATCH, STEPS, WIDTH = 40, 12, 5, 6
NUCLR = {"temperature": 0.1, "zeta_lr": 0.05, "zeta_momentum": 0.1, "zeta_lr_ratio_x": 0.5}
CASES: dict[str, tuple[str, dict]] = {
    "clip": ("clip", {}),
    "clip learnt": ("clip", {"learn_temperature": True}),
    "siglip": ("siglip", {}),
    "dcl": ("dcl", {}),
    "cyclip": ("cyclip", {"learn_temperature": True}),
    "sogclr": ("sogclr", {"temperature": 0.1}),
    "isogclr": ("isogclr", {"temperature": 0.1, "tau_lr": 1e-3}),
    "nuclr": ("nuclr", NUCLR),
    "nuclr unbiased": ("nuclr", NUCLR | {"zeta_estimator": "unbiased", "use_xi": False}),
    "nuclr paper": ("nuclr", NUCLR | {"zeta_estimator": "paper", "zeta_init": -0.05, "xi_rule": "max"}),
}
VARIANTS = ("outside", "inside", "adamw", "masked", "groups", "float32")


class Towers(nn.Module):
    """Two linear towers with unit-norm outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(5, WIDTH), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.normalize(self.x(x), dim=1), nn.functional.normalize(self.y(y), dim=1)


class TrainStep(nn.Module):
    """Towers and objective in one module, to wrap both in DDP."""

    def __init__(self, towers: nn.Module, objective: nn.Module) -> None:
        super().__init__()
        self.towers, self.objective = towers, objective

    def forward(self, x: Tensor, y: Tensor, *rest: Tensor | None) -> Tensor:
        return self.objective(*self.towers(x, y), *rest).loss


def train(name: str, options: dict, variant: str) -> dict[str, Tensor]:
    dtype = torch.float32 if variant == "float32" else torch.float64
    torch.manual_seed(0)
    towers, objective = Towers().to(dtype), build(name, num_samples=PAIRS, **options).to(dtype)
    data_x, data_y = torch.randn(PAIRS, 5, dtype=dtype), torch.randn(PAIRS, 7, dtype=dtype)
    x_id, y_id = torch.arange(PAIRS) // 3, torch.arange(PAIRS) % 17
    if variant == "inside":
        run: nn.Module = DistributedDataParallel(TrainStep(towers, objective), forward_sync_buffers=False)
        parameters = list(run.parameters())
    else:
        wrapped = DistributedDataParallel(towers)
        run = TrainStep(wrapped, objective)
        parameters = [*towers.parameters(), *objective.parameters()]
    kind = torch.optim.AdamW if variant == "adamw" else torch.optim.SGD
    optimizer = kind(parameters, lr=0.01 if variant == "adamw" else 0.1)
    losses = []
    share = BATCH // dist.get_world_size()
    for _ in range(STEPS):
        batch = torch.randperm(PAIRS)[:BATCH]  # the same on every process
        mine = batch[dist.get_rank() * share :][:share]
        ids = {"masked": (x_id, y_id), "groups": (torch.stack([x_id, x_id // 4], dim=1), y_id)}.get(variant, ())
        loss = run(data_x[mine], data_y[mine], mine, *(id_[mine] for id_ in ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {**towers.state_dict(), **objective.state_dict(), "losses": torch.stack(losses)}


def refusals() -> dict[str, str]:
    """Pass wrong input on one process; return the message of this process per case."""
    world, rank = dist.get_world_size(), dist.get_rank()
    last = rank == world - 1
    messages = {}

    def attempt(case: str, rows: int = 3, width: int = WIDTH, value: float = 1.0, **settings: float) -> None:
        objective = build("nuclr", num_samples=PAIRS)
        for key, setting in settings.items():
            setattr(objective, key, setting)
        x = nn.functional.normalize(torch.randn(rows, width), dim=1) * value
        index = torch.arange(rows) + (0 if case == "repeated" else rank * rows)
        if case == "out of range" and last:
            index[0] = PAIRS
        y = x.tolist() if case == "wrong type" and last else x
        try:
            objective(x, y, index)
            messages[case] = "accepted"
        except (TypeError, ValueError) as error:
            messages[case] = f"{type(error).__name__}: {error}"
        assert objective.log_u_x.isneginf().all()

    attempt("unequal batches", rows=2 if last else 3)
    attempt("unequal widths", width=WIDTH + 1 if last else WIDTH)
    attempt("not finite", value=float("nan") if last else 1.0)
    attempt("not unit norm", value=2.0 if last else 1.0)
    attempt("wrong type")
    attempt("repeated")
    attempt("out of range")
    attempt("bad gamma", gamma=2.0 if last else 0.5)
    return messages


def untouched_by_ddp() -> dict[str, float]:
    """Return a value that only the last process stores, in a row that no batch visits: DDP must not overwrite it."""
    last = dist.get_rank() == dist.get_world_size() - 1
    marks = {}
    for where in ("outside", "inside"):
        towers, objective = Towers(), build("nuclr", num_samples=PAIRS)
        if where == "inside":
            run: nn.Module = DistributedDataParallel(TrainStep(towers, objective), forward_sync_buffers=False)
        else:
            run = TrainStep(DistributedDataParallel(towers), objective)
        objective.log_u_x[-1] = 7.0 if last else -1.0
        index = torch.arange(3) + 3 * dist.get_rank()
        for _ in range(2):
            run(torch.randn(3, 5), torch.randn(3, 7), index).backward()
        marks[where] = float(objective.log_u_x[-1])
    return marks


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out = {(case, variant): train(*CASES[case], variant) for case in CASES for variant in VARIANTS}
    several = dist.get_world_size() > 1
    results = {
        "trained": out,
        "messages": refusals() if several else {},
        "marks": untouched_by_ddp() if several else {},
    }
    torch.save(results, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
