"""Run by the processes of test_sharding.py: train a part of a fixed sequence of batches with sharded state."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize

from tests.objectives.make import make

PAIRS, BATCH, WIDTH = 41, 12, 6
OPTIONS = {
    "num_samples": PAIRS,
    "temperature": 0.1,
    "zeta_lr": 0.02,
    "zeta_momentum": 0.5,
    "individual_temperature": True,
    "tau_max": 0.2,
}


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, y and index of one global batch, in float64."""
    generator = torch.Generator().manual_seed(number)
    x, y = (normalize(torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator), dim=1) for _ in range(2))
    return x, y, torch.randperm(PAIRS, generator=generator)[:BATCH]


def train(objective: torch.nn.Module, first: int, last: int, rows: slice) -> Tensor:
    """Train on these rows of the batches first to last - 1; return the losses."""
    losses = [objective(*(part[rows] for part in batch(number))).loss for number in range(first, last)]
    return torch.stack(losses).detach()


def main(checkpoint: str, first: str, last: str, out: str) -> None:
    """Load the checkpoint, unless it is "-", train on batches first to last - 1, and write the whole state to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    objective = make("nuclr", **OPTIONS, state_sharding=True).double()
    if checkpoint != "-":
        objective.load_state_dict(torch.load(checkpoint, weights_only=True))
    share = BATCH // dist.get_world_size()
    losses = train(objective, int(first), int(last), slice(dist.get_rank() * share, (dist.get_rank() + 1) * share))
    state = objective.gather_state_dict()
    if dist.get_rank() == 0:
        torch.save(state | {"losses": losses}, out)
    else:
        assert state == {}
    dist.destroy_process_group()
