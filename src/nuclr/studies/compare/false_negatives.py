"""The share of the negatives' weight that falls on false negatives, for pairs whose truth is known: the built-in ones.

An anchor x_i weights the captions y_j of other pairs by softmax over j of (s_ij - zeta_j)/tau; these weights are the
gradient of SogCLR (zeta = 0) and of NUCLR. A caption that also fits the anchor's picture is a false negative. The
paper's argument for NUCLR is that popular captions, which are more often false negatives, get a larger zeta and
therefore less weight.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor

from nuclr.data.builtin import BuiltinPairs
from nuclr.objectives import entry
from nuclr.runs.features import encode_x, encode_y
from nuclr.runs.run import Run
from nuclr.runs.settings import Settings
from nuclr.studies.compare import cells

FILE = "false_negatives.npz"
SAMPLE = 2000  # training pairs: a matrix of 4 million weights


def applies(settings: Settings) -> bool:
    """Return True if the truth is known and the objective weights its negatives by a softmax."""
    builtin = str(settings.data.train).partition(":")[0] == "builtin"
    return builtin and entry(settings.objective.name).softmax_negatives


def share(scores: Tensor, false: Tensor, excluded: Tensor, tau: Tensor | float, zeta: Tensor | float = 0.0) -> Tensor:
    """Return the share of the negatives' weight that lies on false negatives, per anchor.

    Args:
        scores: (n, m), scores of anchors and candidates.
        false: (n, m) bool, true for false negatives.
        excluded: (n, m) bool, true for pairs that are not negatives.
        tau: Temperature, a number or (n, 1).
        zeta: Log popularity of the candidates times the temperature, a number or (m,).

    Returns:
        One share per anchor that has negatives.

    """
    logits = ((scores - zeta) / tau).masked_fill(excluded, -torch.inf)
    kept = ~excluded.all(dim=1)
    return (logits[kept].softmax(dim=1) * false[kept]).sum(dim=1)


def measure_cell(run: Run) -> None:
    """Write false_negatives.npz: `weighted`, the mean share of each side, and `uniform`, the share at equal weights."""
    cell = run.folder
    if (cell / FILE).is_file():
        return
    pairs, numbers = run.train.pairs, run.train.numbers[:SAMPLE]
    truth = cast(BuiltinPairs, pairs).truth
    x = encode_x(run.model, run.loader(pairs), numbers, *run.encoding)
    y = encode_y(run.model, pairs, numbers, *run.encoding)
    false = torch.from_numpy(truth.false_negatives(numbers))
    captions = torch.from_numpy(pairs.y_id[numbers])
    excluded = captions[:, None] == captions if run.settings.data.mask else torch.eye(len(numbers), dtype=torch.bool)
    false &= ~excluded
    state = cells.read_groups(cell / cells.STATE).get("", {})
    tau = _tau(state, numbers, run.temperature)
    scores = x @ y.T
    sides = [
        share(scores, false, excluded, tau["x"], _rows(state, "zeta_y", numbers)),
        share(scores.T, false.T, excluded.T, tau["y"], _rows(state, "zeta_x", numbers)),
    ]
    uniform = false.sum() / (~excluded).sum()
    weighted = np.array([float(side.mean()) for side in sides])
    cells.write_groups(cell / FILE, {"": {"weighted": weighted, "uniform": np.array(float(uniform))}})


def _tau(state: dict[str, np.ndarray], numbers: np.ndarray, temperature: float) -> dict[str, Tensor | float]:
    """Return the temperature of each side's anchors: individual ones, the learnt one, or the one of the settings."""
    if "tau_x" in state:
        return {side: torch.from_numpy(state[f"tau_{side}"][numbers])[:, None] for side in ("x", "y")}
    learnt = float(np.exp(-state["log_scale"])) if "log_scale" in state else temperature
    return {"x": learnt, "y": learnt}


def _rows(state: dict[str, np.ndarray], name: str, numbers: np.ndarray) -> Tensor | float:
    return torch.from_numpy(state[name][numbers]) if name in state else 0.0
