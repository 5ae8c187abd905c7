"""Contrastive objectives with one signature: ``objective(x, y, index, x_id=None, y_id=None)``.

Example:
    objective = build("nuclr", num_samples=n, temperature=0.03)
    out = objective(x, y, index)
    out.loss.backward()

"""

from nuclr.objectives.authors import AuthorsNUCLR
from nuclr.objectives.base import AutogradObjective, Objective, ObjectiveOutput, Scores
from nuclr.objectives.clip import CLIP, CyCLIP
from nuclr.objectives.dcl import DCL
from nuclr.objectives.micro_batches import backward_in_micro_batches
from nuclr.objectives.nuclr import NUCLR
from nuclr.objectives.registry import Entry, build, entry, names, options, register, unregister
from nuclr.objectives.siglip import SigLIP
from nuclr.objectives.sogclr import ISogCLR, SogCLR
from nuclr.objectives.state import StatePlacement
from nuclr.objectives.stateful import RunningAverage, StatefulObjective, Temperatures

__all__ = [
    "CLIP",
    "DCL",
    "NUCLR",
    "AuthorsNUCLR",
    "AutogradObjective",
    "CyCLIP",
    "Entry",
    "ISogCLR",
    "Objective",
    "ObjectiveOutput",
    "RunningAverage",
    "Scores",
    "SigLIP",
    "SogCLR",
    "StatePlacement",
    "StatefulObjective",
    "Temperatures",
    "backward_in_micro_batches",
    "build",
    "entry",
    "names",
    "options",
    "register",
    "unregister",
]
