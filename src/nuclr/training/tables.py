"""How an objective's tables are spread over the samples, for the logs: quantiles of zeta and of iSogCLR's tau."""

import numpy as np
import torch

from nuclr.objectives import Objective

TABLES = ("zeta_x", "zeta_y", "tau_x", "tau_y")
QUANTILES = (5, 25, 50, 75, 95)


def quantiles(objective: Objective, numbers: np.ndarray) -> dict[str, float]:
    """`state/zeta_y_q05`, ... of the rows of the pairs in use. It waits for the device: call it once an epoch."""
    found: dict[str, float] = {}
    buffers = dict(objective.named_buffers())
    for name in TABLES:
        if name in buffers:
            table = buffers[name]
            ordered = table[torch.from_numpy(numbers).to(table.device)].sort().values
            places = [round(q / 100 * (len(ordered) - 1)) for q in QUANTILES]
            found |= {f"state/{name}_q{q:02d}": float(ordered[k]) for q, k in zip(QUANTILES, places, strict=True)}
    return found
