"""How a process of a test leaves torch's process group."""

import gc

import torch.distributed as dist


def leave() -> None:
    """Destroy the process group; call it when no variable refers to a DistributedDataParallel any more.

    The group's destructor waits for its threads. If the reducer of a DistributedDataParallel has the last reference,
    the destructor runs with the GIL held, and such a thread may need the GIL to delete a finished operation: the
    process then hangs (seen once in 1,600 ends with torch 2.13). Otherwise torch releases the GIL first.
    """
    gc.collect()  # a DistributedDataParallel may be part of a cycle
    dist.destroy_process_group()
