"""Norms of rows that are far from 1: squares of float32 numbers overflow above 1.8e19 and underflow below 1.1e-19."""

import math

import torch
from torch import Tensor


def rescale_extreme_rows(features: Tensor, small: bool = True) -> Tensor:
    """Divide the rows whose squares over- or underflow by their largest absolute entry.

    The direction of a row does not change, so its unit vector can be computed afterwards. Without this, a float32 row
    with entries of 1e25 has an infinite norm, and dividing by it gives zeros. Rows of ordinary size are returned bit
    for bit. The gradient of the normalized rows is not affected either.

    Args:
        features: (n, d), floating-point.
        small: Also rescale rows that underflow. Rows of zeros are never changed.

    Returns:
        (n, d). On CPU, `features` itself if there is no extreme row.

    Example:
        >>> rescale_extreme_rows(torch.tensor([[3.0, 4.0], [3e25, 4e25]]))
        tensor([[3.0000, 4.0000],
                [0.7500, 1.0000]])

    """
    if not features.numel():
        return features
    limits = torch.finfo(features.dtype)
    largest = features.detach().abs().amax(dim=1, keepdim=True)
    extreme = largest > math.sqrt(limits.max / features.shape[1])
    if small:
        extreme |= (largest < math.sqrt(limits.tiny)) & (largest > 0)
    # On CPU, looking at a value is free. On an accelerator it would wait for the device.
    if features.device.type == "cpu" and not bool(extreme.any()):
        return features
    return features / torch.where(extreme, largest, torch.ones_like(largest))
