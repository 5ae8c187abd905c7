"""How much of the negatives' weight falls on false negatives, where they are known: on the built-in pairs.

An anchor x_i weighs the captions y_j of other pairs by softmax over j of (s_ij - zeta_j)/tau: those weights are the
gradient of SogCLR (zeta = 0) and NUCLR. A caption that fits the anchor's picture too is a false negative. The paper's
argument for NUCLR is that popular captions, which are more often false negatives, get a larger zeta and so less weight.
"""

from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from nuclr.data.builtin import BuiltinPairs
from nuclr.models import DualEncoder
from nuclr.runs import components as parts
from nuclr.runs import folder
from nuclr.runs.features import encode_x, encode_y
from nuclr.runs.launch import pick_device
from nuclr.runs.settings import Settings
from nuclr.studies.compare import measure as sets
from nuclr.studies.compare.arrays import read_groups, write_groups
from nuclr.studies.compare.cells import STATE

FILE = "false_negatives.npz"
SAMPLE = 2000  # training pairs: a matrix of 4 million weights
SOFTMAX = ("clip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr")


def applies(settings: Settings) -> bool:
    """Whether the truth is known and the method weighs its negatives by a softmax."""
    return str(settings.data.train).partition(":")[0] == "builtin" and settings.objective.name in SOFTMAX


def share(scores: Tensor, false: Tensor, excluded: Tensor, tau: Tensor | float, zeta: Tensor | float = 0.0) -> Tensor:
    """(n,): for each anchor that has negatives, the share of their weight that lies on false ones.

    scores (n, m); false, excluded (n, m) bool: false negatives; pairs that are no negatives; tau: a number or (n, 1);
    zeta: a number or (m,).
    """
    logits = ((scores - zeta) / tau).masked_fill(excluded, -torch.inf)
    kept = ~excluded.all(dim=1)
    return (logits[kept].softmax(dim=1) * false[kept]).sum(dim=1)


def measure_cell(settings: Settings, cell: Path, loaders: parts.Loaders) -> None:
    """Write false_negatives.npz: `weighted`, both sides' mean share, and `uniform`, that of equal weights."""
    if (cell / FILE).is_file():
        return
    data = settings.data
    source = parts.open_source(data, str(data.train), data.split, data.keep, check=False)
    pairs = source.pairs
    truth = cast(BuiltinPairs, pairs).truth
    numbers = source.numbers[:SAMPLE]
    model = DualEncoder.from_pretrained(cell / folder.MODEL).to(pick_device(settings.device))
    options = sets.encoding(settings)
    x = encode_x(model, parts.make_loader(data, pairs, model, loaders), numbers, *options)
    y = encode_y(model, pairs, numbers, *options)
    false = torch.from_numpy(truth.false_negatives(numbers))
    captions = torch.from_numpy(pairs.y_id[numbers])
    excluded = captions[:, None] == captions if data.mask else torch.eye(len(numbers), dtype=torch.bool)
    false &= ~excluded
    state = read_groups(cell / STATE).get("", {})
    tau = _tau(state, numbers, float((folder.read_results(cell) or {})["temperature"]))
    scores = x @ y.T
    sides = [
        share(scores, false, excluded, tau["x"], _rows(state, "zeta_y", numbers)),
        share(scores.T, false.T, excluded.T, tau["y"], _rows(state, "zeta_x", numbers)),
    ]
    uniform = false.sum() / (~excluded).sum()
    weighted = np.array([float(side.mean()) for side in sides])
    write_groups(cell / FILE, {"": {"weighted": weighted, "uniform": np.array(float(uniform))}})


def _tau(state: dict[str, np.ndarray], numbers: np.ndarray, temperature: float) -> dict[str, Tensor | float]:
    """Of the anchors of each side: their own, the learnt one, or the set one."""
    if "tau_x" in state:
        return {side: torch.from_numpy(state[f"tau_{side}"][numbers])[:, None] for side in ("x", "y")}
    learnt = float(np.exp(-state["log_scale"])) if "log_scale" in state else temperature
    return {"x": learnt, "y": learnt}


def _rows(state: dict[str, np.ndarray], name: str, numbers: np.ndarray) -> Tensor | float:
    return torch.from_numpy(state[name][numbers]) if name in state else 0.0
