"""What the objectives and the solver need of torch.distributed; each function is the identity on one process.

Every process holds the same number b of samples; the global batch is their concatenation in rank order, so that
this process's samples are rows [rank * b, rank * b + b). Backward passes are scaled so that DDP's mean over the
processes is the gradient of the global loss.
"""

from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes; 1 where torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process in [0, world_size())."""
    return dist.get_rank() if world_size() > 1 else 0


def all_gather(local: Tensor, dim: int = 0) -> Tensor:
    """Concatenate every process's tensors along dim, without gradient."""
    local = local.detach() if local.requires_grad else local
    if world_size() == 1:
        return local
    gathered = local.new_empty((world_size(), *local.shape))
    dist.all_gather(list(gathered), local.contiguous())
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def sum_over_processes(local: Tensor) -> Tensor:
    """The sum of one tensor per process, the same on all of them, without gradient."""
    total = local.detach().clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total


# Held weakly: a group that outlives destroy_process_group leaves threads behind, which abort the process at its end.
_host_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _host_group(world: Any) -> Any:
    # Shapes are compared on the host: reading them back from an accelerator would stall it once a step.
    if dist.get_backend(world) == "gloo":
        return world
    if world not in _host_groups:
        _host_groups[world] = dist.new_group(backend="gloo")
    return _host_groups[world]


def exchange(numbers: list[int]) -> list[list[int]]:
    """A short list of integers from every process, in rank order, over host memory."""
    if world_size() == 1:
        return [numbers]
    mine = torch.tensor(numbers)
    everyone = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(everyone, mine, group=_host_group(dist.group.WORLD))
    return [row.tolist() for row in everyone]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        ctx.rows = len(local)
        return all_gather(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total.narrow(0, rank() * ctx.rows, ctx.rows)


def all_gather_with_gradient(local: Tensor) -> Tensor:
    """Concatenate (b, ...) of every process; in backward each gets the sum of what all ask of its rows."""
    return local if world_size() == 1 else cast(Tensor, _Gather.apply(local))  # type: ignore[no-untyped-call]


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:  # noqa: ARG004
        return parameter.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return sum_over_processes(grads[0]) / world_size()


def replicated(parameter: Tensor) -> Tensor:
    """A parameter that every process holds; its gradient is the mean of theirs, inside and outside DDP."""
    return parameter if world_size() == 1 else cast(Tensor, _Replicate.apply(parameter))  # type: ignore[no-untyped-call]
