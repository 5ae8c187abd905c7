"""The paper's exact subproblem as a part of training: set zeta to the exact solution on the current features."""

import numpy as np
import torch
from torch import Tensor

from nuclr.data import Loader
from nuclr.models import DualEncoder
from nuclr.objectives import NUCLR
from nuclr.popularity import solve
from nuclr.runs.components import Source
from nuclr.runs.features import encode_x, encode_y

TOLERANCE = 1e-3


def refresh_zeta(
    objective: NUCLR,
    model: DualEncoder,
    source: Source,
    loader: Loader,
    batch: int,
    device: torch.device,
    precision: str,
) -> None:
    """Both sides' zeta of the pairs in use; the mean of each table, which the problem leaves free, stays as it is."""
    pairs, numbers = source.pairs, source.numbers
    _, first_x, x_row, x_count = np.unique(
        pairs.x_id[numbers], return_index=True, return_inverse=True, return_counts=True
    )
    _, first_y, y_row, y_count = np.unique(
        pairs.y_id[numbers], return_index=True, return_inverse=True, return_counts=True
    )
    x = encode_x(model, loader, numbers[first_x], batch, device, precision)
    y = encode_y(model, pairs, numbers[first_y], batch, device, precision)
    weights = {"x": torch.from_numpy(x_count).float(), "y": torch.from_numpy(y_count).float()}
    for side, anchors, candidates, row in (("y", "x", (x, y), y_row), ("x", "y", (y, x), x_row)):
        zeta = solve(
            *candidates,
            temperature=objective.temperature,
            tolerance=TOLERANCE,
            x_weight=weights[anchors],
            y_weight=weights[side],
        ).zeta
        _write(objective, side, torch.from_numpy(numbers), zeta[torch.from_numpy(row)])


def _write(objective: NUCLR, side: str, numbers: Tensor, zeta: Tensor) -> None:
    table, xi = objective.get_buffer(f"zeta_{side}"), objective.get_buffer(f"xi_{side}")
    rows = numbers.to(table.device)
    new = (zeta - zeta.mean()).to(table) + table[rows].mean()
    table[rows] = new
    reached = (new.abs() if objective.xi_rule == "norm" else new).max()
    torch.maximum(xi, reached.to(xi), out=xi)
