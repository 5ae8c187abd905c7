"""Captions that occur more than once: an image found by a copy of its caption may count as found."""

import torch
from torch import Tensor


def with_copies(pairs: Tensor, y_id: Tensor) -> Tensor:
    """Pairs (m, 2), all (image, caption') where caption' is a copy of a caption of the image, itself included.

    Args:
        pairs: (n, 2), rows of x and y.
        y_id: (n_y,) whole numbers; equal ones mark copies of one caption.

    """
    _, group = torch.unique(y_id, return_inverse=True)
    members = group.argsort(stable=True)  # the rows of y, group by group
    size = torch.bincount(group)
    first = size.cumsum(0) - size
    links = torch.unique(torch.stack([pairs[:, 0], group[pairs[:, 1]]], dim=1), dim=0)
    image, wanted = links.unbind(1)
    count = size[wanted]
    begin = count.cumsum(0) - count
    step = torch.arange(int(count.sum()), device=pairs.device) - torch.repeat_interleave(begin, count)
    row = torch.repeat_interleave(first[wanted], count) + step
    return torch.stack([torch.repeat_interleave(image, count), members[row]], dim=1)
