"""Contrastive objectives with one signature: ``objective(x, y, index, x_id=None, y_id=None)``.

Example:
    objective = build("nuclr", num_samples=n, temperature=0.03)
    out = objective(x, y, index)
    out.loss.backward()

"""

from nuclr.objectives.base import AutogradObjective, Objective, ObjectiveOutput, Scores
from nuclr.objectives.clip import CLIP
from nuclr.objectives.cyclip import CyCLIP
from nuclr.objectives.dcl import DCL
from nuclr.objectives.isogclr import ISogCLR
from nuclr.objectives.micro_batches import backward_in_micro_batches
from nuclr.objectives.nuclr import NUCLR
from nuclr.objectives.registry import Entry, build, entry, names, options, register, unregister
from nuclr.objectives.siglip import SigLIP
from nuclr.objectives.sogclr import SogCLR
from nuclr.objectives.stateful import StatefulObjective

__all__ = [
    "CLIP",
    "DCL",
    "NUCLR",
    "AutogradObjective",
    "CyCLIP",
    "Entry",
    "ISogCLR",
    "Objective",
    "ObjectiveOutput",
    "Scores",
    "SigLIP",
    "SogCLR",
    "StatefulObjective",
    "backward_in_micro_batches",
    "build",
    "entry",
    "names",
    "options",
    "register",
    "unregister",
]
