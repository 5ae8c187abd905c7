"""Seven contrastive objectives with one signature: ``objective(x, y, index, x_id=None, y_id=None)``.

objective = build("nuclr", num_samples=n, temperature=0.03)
out = objective(x, y, index)
out.loss.backward()
"""

from typing import Any

from nuclr.objectives.base import Objective, ObjectiveOutput, check_choice
from nuclr.objectives.clip import CLIP
from nuclr.objectives.cyclip import CyCLIP
from nuclr.objectives.dcl import DCL
from nuclr.objectives.isogclr import ISogCLR
from nuclr.objectives.nuclr import NUCLR
from nuclr.objectives.siglip import SigLIP
from nuclr.objectives.sogclr import SogCLR
from nuclr.objectives.stateful import StatefulObjective

OBJECTIVES: dict[str, type[Objective]] = {
    "clip": CLIP,
    "siglip": SigLIP,
    "dcl": DCL,
    "cyclip": CyCLIP,
    "sogclr": SogCLR,
    "isogclr": ISogCLR,
    "nuclr": NUCLR,
}


def build(name: str, *, num_samples: int | None = None, **options: Any) -> Objective:
    """An objective by name; `num_samples` is needed by those with state and ignored by the others."""
    check_choice("name", name, tuple(OBJECTIVES))
    kind = OBJECTIVES[name]
    if not issubclass(kind, StatefulObjective):
        return kind(**options)
    if num_samples is None:
        raise ValueError(f"{name} keeps state for every pair: say how many there are with num_samples=...")
    return kind(num_samples=num_samples, **options)


__all__ = [
    "CLIP",
    "DCL",
    "NUCLR",
    "CyCLIP",
    "ISogCLR",
    "Objective",
    "ObjectiveOutput",
    "SigLIP",
    "SogCLR",
    "build",
]
