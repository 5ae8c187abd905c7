"""Copies from host memory to an accelerator that are queued, so that the host does not wait for the device.

From ordinary memory, a copy first waits for the work that is queued on the device. From page-locked (pinned) memory it
is queued like any other operation. Torch reuses a block of page-locked memory only after the copies that read it are
done, so a tensor may be dropped, but not overwritten, as soon as its copy is queued.
"""

import torch
from torch import Tensor


def can_pin(device: torch.device) -> bool:
    """Return whether copies to a device are faster from page-locked memory: on an accelerator other than Apple's.

    Args:
        device: the target of the copies.

    Example:
        >>> can_pin(torch.device("cpu"))
        False

    """
    if device.type in ("cpu", "meta", "mps"):
        return False
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and accelerator.type == device.type


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a copy from the host to an accelerator is only queued.

    Args:
        tensor: on any device. A host tensor that is not page-locked yet is copied to page-locked memory first.
        device: the target. The host waits for copies from an accelerator to the host.

    Returns:
        The tensor itself if it is on the device already.

    Example:
        >>> to_device(torch.arange(3), torch.device("cpu"))
        tensor([0, 1, 2])

    """
    if tensor.device == device:
        return tensor
    if tensor.device.type != "cpu":
        return tensor.to(device)
    if can_pin(device):
        tensor = tensor.pin_memory()  # returns the tensor itself if it is page-locked already
    return tensor.to(device, non_blocking=True)
