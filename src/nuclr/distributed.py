"""Communication between processes for objectives and solver; on one process every function is the identity.

Every process has the same number b of samples. The global batch is their concatenation in rank order: the samples of
this process are rows [rank * b, rank * b + b). Backward passes are scaled such that DDP's mean over the processes is
the gradient of the global loss.
"""

from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# DistributedDataParallel imports this module, whose functions have the default argument `group=group.WORLD`. If a group
# exists by then, they keep it and its threads alive after destroy_process_group, and a thread that is alive when the
# interpreter exits can abort the process. Imported before any group exists, the default is None.
if dist.is_available():
    import torch.distributed.nn.functional


def world_size() -> int:
    """Return the number of processes, which is 1 if torch.distributed is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, in [0, world_size())."""
    return dist.get_rank() if world_size() > 1 else 0


def all_gather(local: Tensor, dim: int = 0) -> Tensor:
    """Concatenate the tensors of all processes along `dim`, without gradient.

    Args:
        local: the tensor of this process; all must have the same shape.
        dim: the dimension to concatenate along.

    Returns:
        The same tensor on all processes.

    """
    local = local.detach() if local.requires_grad else local
    if world_size() == 1:
        return local
    gathered = local.new_empty((world_size(), *local.shape))
    dist.all_gather(list(gathered), local.contiguous())
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def sum_over_processes(local: Tensor) -> Tensor:
    """Return the sum of the tensors of all processes, without gradient; it is the same on all of them."""
    total = local.detach().clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total


# Weak references: a group that outlives destroy_process_group leaves threads behind, which abort the process at exit.
_host_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _host_group(world: Any) -> Any:
    # Shapes are compared on the host, because reading them from an accelerator would stall it in every step.
    if dist.get_backend(world) == "gloo":
        return world
    if world not in _host_groups:
        _host_groups[world] = dist.new_group(backend="gloo")
    return _host_groups[world]


def exchange(numbers: list[int]) -> list[list[int]]:
    """Exchange a short list of integers between all processes, through host memory.

    Args:
        numbers: the list of this process; all must have the same length.

    Returns:
        The lists of all processes, in rank order.

    """
    if world_size() == 1:
        return [numbers]
    gathered = torch.empty(world_size(), len(numbers), dtype=torch.int64)
    dist.all_gather(list(gathered), torch.tensor(numbers), group=_host_group(dist.group.WORLD))
    return gathered.tolist()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        ctx.rows = len(local)
        return all_gather(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total.narrow(0, rank() * ctx.rows, ctx.rows)


def all_gather_with_gradient(local: Tensor) -> Tensor:
    """Concatenate (b, ...) of all processes; backward gives each process the sum of all gradients of its rows."""
    return local if world_size() == 1 else cast(Tensor, _Gather.apply(local))  # type: ignore[no-untyped-call]


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:  # noqa: ARG004
        return parameter.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return sum_over_processes(grads[0]) / world_size()


def replicated(parameter: Tensor) -> Tensor:
    """Return a parameter that all processes share; its gradient is their mean, inside and outside DDP."""
    return parameter if world_size() == 1 else cast(Tensor, _Replicate.apply(parameter))  # type: ignore[no-untyped-call]
