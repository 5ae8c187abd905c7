"""Use an objective in your own training loop: two towers, any sampler, any optimizer.

    python examples/own_loop.py
    torchrun --nproc_per_node 2 examples/own_loop.py

Three things differ from a loop with a plain InfoNCE loss: the batch includes the indices of its pairs, the objective
stays outside DDP (it keeps its state equal on all processes), and the checkpoint includes its state_dict.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from nuclr.objectives import build

PAIRS, BATCH, EPOCHS = 2_000, 64, 5


class Towers(nn.Module):
    """Two encoders with normalized outputs of the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(32, 16), nn.Linear(24, 16)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit-norm features of both sides."""
        return normalize(self.x(x), dim=1), normalize(self.y(y), dim=1)


def main() -> None:
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)

    torch.manual_seed(0)
    hidden = torch.randn(PAIRS, 8)
    data_x, data_y = hidden @ torch.randn(8, 32), hidden @ torch.randn(8, 24)

    towers = Towers()
    model = DistributedDataParallel(towers) if several else towers
    objective = build("nuclr", num_samples=PAIRS, temperature=0.05)
    optimizer = torch.optim.AdamW([*model.parameters(), *objective.parameters()], lr=1e-2)

    for epoch in range(EPOCHS):
        order = torch.randperm(PAIRS)  # the same on every process, because they use the same seed
        for step in range(PAIRS // (BATCH * world)):
            index = order[(step * world + rank) * BATCH :][:BATCH]
            out = objective(*model(data_x[index], data_y[index]), index)
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: estimate of the objective {out.loss.item():.4f}")

    checkpoint = {"towers": towers.state_dict(), "objective": objective.state_dict()}
    if rank == 0:
        with torch.no_grad():
            x, y = towers(data_x, data_y)
        hits = ((x @ y.T).argmax(dim=1) == torch.arange(PAIRS)).float().mean()
        print(
            f"recall@1 {hits:.2%}, chance {1 / PAIRS:.2%}; the checkpoint holds {len(checkpoint['objective'])} tables"
        )
    if several:
        del model  # before the group: otherwise torch may wait for itself in a rare case
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
