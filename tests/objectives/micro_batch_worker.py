"""Train small transformers with dropout on full batches and in micro-batches, on one process or on two."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from nuclr import distributed
from nuclr.objectives import ObjectiveOutput, backward_in_micro_batches, build
from tests import process_group

PAIRS, BATCH, CHUNK, STEPS, LENGTH, WIDTH = 3000, 1024, 64, 5, 4, 16
CASES = {
    "nuclr": ("nuclr", {"num_samples": PAIRS, "temperature": 0.1, "zeta_lr": 0.05}),
    "clip learnt": ("clip", {"temperature": 0.1, "learn_temperature": True}),
}
DROPOUT = 0.2


class Tower(nn.Module):
    """One transformer block with dropout, from (b, length, width) to unit-norm features (b, width).

    Projections to keys have no bias: its gradient is zero but for rounding, which AdamW would turn into whole steps.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = tokens + self.dropout(scaled_dot_product_attention(*self.qkv(tokens).chunk(3, dim=-1)))
        return normalize((hidden + self.mlp(self.norm(hidden))).mean(1), dim=-1)


class Towers(nn.Module):
    def __init__(self, dropout: float = DROPOUT) -> None:
        super().__init__()
        self.x, self.y = Tower(dropout), Tower(dropout)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.x(x), self.y(y)


def in_one_graph(
    encode: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, ...],
    objective: Callable[..., ObjectiveOutput],
    micro_batch: int,
) -> ObjectiveOutput:
    """Encode the same chunks in the same order, with gradient: the full batch that micro-batches must equal."""
    parts = [encode(*chunk) for chunk in zip(*(tensor.split(micro_batch) for tensor in inputs), strict=True)]
    output = objective(*(torch.cat(side) for side in zip(*parts, strict=True)))
    output.loss.backward()
    return output


def train(
    case: str,
    step: Callable[..., ObjectiveOutput],
    dropout: float,
    chunk: int = CHUNK,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return weights, state and losses after five steps of AdamW."""
    rank, world = distributed.rank(), distributed.world_size()
    name, options = CASES[case]
    torch.manual_seed(0)
    towers, objective = Towers(dropout).to(dtype), build(name, **options).to(dtype)
    data = torch.randn(2, PAIRS, LENGTH, WIDTH, dtype=dtype)
    model = DistributedDataParallel(towers) if world > 1 else towers
    optimizer = torch.optim.AdamW([*towers.parameters(), *objective.parameters()], lr=1e-3)
    order = torch.randperm(PAIRS)
    torch.manual_seed(1 + rank)  # other dropout on each process
    share, losses = BATCH // world, []
    for number in range(STEPS):
        index = order.roll(-number * BATCH // 2)[rank * share :][:share]  # visits samples again
        x, y = data[:, index]
        optimizer.zero_grad()
        output = step(model, (x, y), lambda u, v, index=index: objective(u, v, index), chunk)
        optimizer.step()
        losses.append(output.loss.detach())
    return {**towers.state_dict(), **objective.state_dict(), "losses": torch.stack(losses)}


def count_synchronizations() -> list[int]:
    """Return how often DDP reduced gradients: in one call, and in one call inside `no_sync`."""
    torch.manual_seed(0)
    model, objective, calls = DistributedDataParallel(Towers()), build("clip"), []

    def reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, reduce)
    x, y = torch.randn(2, 32, LENGTH, WIDTH)
    counts = []
    for encode in (model, lambda x, y: model(x, y)):
        calls.clear()
        backward_in_micro_batches(encode, (x, y), objective, 4)
        counts.append(len(calls))
        with model.no_sync():
            backward_in_micro_batches(encode, (x, y), objective, 4)
        counts.append(len(calls) - counts[-1])
    return counts


def refusals() -> dict[str, str]:
    """Pass wrong input on the last process; return the message of this process per case."""
    last, messages = dist.get_rank() == dist.get_world_size() - 1, {}
    model = DistributedDataParallel(Towers())
    for case, rows, chunk in (
        ("chunks", 16, 4 if last else 8),
        ("inputs", 16, 0 if last else 8),
        ("pairs", 12 if last else 16, 8),
    ):
        x = torch.randn(rows, LENGTH, WIDTH)
        try:
            backward_in_micro_batches(model, (x, x), build("clip"), chunk)
        except ValueError as error:
            messages[case] = str(error)
    return messages


def main(folder: str) -> None:
    """Train all cases as one of several processes.

    Writes FOLDER/{rank}.pt with the final weights and state per case, the number of times that DDP synchronized
    gradients, and the messages of refused input.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained = {}
    for case in CASES:
        trained[case, "micro-batches"] = train(case, backward_in_micro_batches, DROPOUT)
        trained[case, "one graph"] = train(case, in_one_graph, DROPOUT)
        trained[case, "without dropout"] = train(case, backward_in_micro_batches, 0.0)
    results = {"trained": trained, "synchronizations": count_synchronizations(), "messages": refusals()}
    torch.save(results, Path(folder) / f"{dist.get_rank()}.pt")
    process_group.leave()
